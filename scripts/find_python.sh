#!/usr/bin/env bash
# Prints the interpreter to build .venv with: $PYTHON, python3.13, python3.12, python3, then those under pyenv's root.
# Each is run before it is believed: pyenv leaves commands for versions that are not active, and those only fail;
# Debian's python3 may come without venv.
set -u

usable() {
  "$1" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1 </dev/null
}

if [ -n "${PYTHON:-}" ]; then
  usable "$PYTHON" && echo "$PYTHON" && exit 0
  echo "PYTHON=$PYTHON is not a Python 3.12 or newer that runs (with its venv module): point it at one or unset it." >&2
  exit 1
fi

for candidate in python3.13 python3.12 python3; do
  usable "$candidate" && command -v "$candidate" && exit 0
done

if root=$(pyenv root 2>/dev/null); then
  for candidate in "$root"/versions/{3.13,3.12,3}.*/bin/python; do
    usable "$candidate" && echo "$candidate" && exit 0
  done
fi

echo "jaxinfer needs Python 3.12 or newer (with its venv module) and found none: install it, or run make with PYTHON=/path/to/python3.12." >&2
exit 1

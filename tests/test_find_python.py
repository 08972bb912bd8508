"""scripts/find_python.sh picks a Python that runs, in the stated order, and otherwise says one sentence."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "find_python.sh"


@pytest.fixture
def machine(tmp_path):
    """A machine with only bash's own tools and the interpreters a test puts there: returns (install, find).

    install(path, version) writes a fake interpreter that answers the script as that version would, or
    fails as a pyenv command of an inactive version does when version is None; find() runs the script.
    """
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in ("bash", "env"):
        (bin_folder / tool).symlink_to(f"/usr/bin/{tool}")

    def write(path: Path, body: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{body}\n")
        path.chmod(0o755)
        return path

    def install(path: str, version: tuple[int, int] | None) -> Path:
        if version is None:
            return write(tmp_path / path, "echo 'pyenv: command not found' >&2; exit 127")
        # sys.exit(True) is exit code 1
        return write(
            tmp_path / path, f"case $2 in *'< (3, 12)'*) exit {int(version < (3, 12))};; esac; exit 9"
        )

    def find(**environment: str) -> subprocess.CompletedProcess[str]:
        write(bin_folder / "pyenv", f"[ $1 = root ] && echo {tmp_path}/pyenv")
        return subprocess.run(
            [SCRIPT], env={"PATH": str(bin_folder)} | environment, capture_output=True, text=True, timeout=20
        )

    return install, find


def test_order(machine):
    install, find = machine
    in_pyenv = install("pyenv/versions/3.12.1/bin/python", (3, 12))
    assert find().stdout.strip() == str(in_pyenv)
    in_pyenv = install("pyenv/versions/3.13.0/bin/python", (3, 13))
    assert find().stdout.strip() == str(in_pyenv)
    for name in ("python3", "python3.12", "python3.13"):
        on_path = install(f"bin/{name}", (3, 13))
        assert find().stdout.strip() == str(on_path)
    elsewhere = install("elsewhere/python", (3, 12))
    assert find(PYTHON=str(elsewhere)).stdout.strip() == str(elsewhere)


def test_command_that_does_not_run_is_passed_over(machine):
    """pyenv puts python3.13 on PATH for every installed version; without activation it only fails."""
    install, find = machine
    install("bin/python3.13", None)
    install("bin/python3.12", None)
    install("bin/python3", (3, 11))
    in_pyenv = install("pyenv/versions/3.12.1/bin/python", (3, 12))
    result = find()
    assert (result.returncode, result.stdout.strip()) == (0, str(in_pyenv))


def test_none_found_is_one_sentence(machine):
    install, find = machine
    install("bin/python3", (3, 11))
    install("pyenv/versions/3.11.7/bin/python", (3, 11))
    result = find()
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1 and "Python 3.12 or newer" in result.stderr


def test_a_bad_choice_is_refused_not_replaced(machine):
    install, find = machine
    install("bin/python3.13", (3, 13))
    old = install("elsewhere/python", (3, 11))
    result = find(PYTHON=str(old))
    assert (result.returncode, result.stdout) == (1, "")
    assert len(result.stderr.splitlines()) == 1 and str(old) in result.stderr

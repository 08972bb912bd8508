"""The persistent compilation cache: compiled programs outlive the process.

XLA:CPU entries hold machine code, so the folder's name carries the processor's features beside the versions:
a home folder shared by different machines never serves one of them the other's code.
"""

import hashlib
import logging
import os
import platform
import stat
from pathlib import Path

import jax
import jaxlib
from jax.experimental.compilation_cache import compilation_cache

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """The folder used unless another is named: inside the user's cache folder."""
    import platformdirs  # here: device checks run where it is not installed

    parts = [f"jax-{jax.__version__}", f"jaxlib-{jaxlib.__version__}", platform.machine(), cpu_features()]
    return Path(platformdirs.user_cache_dir("jaxinfer")) / "compiled" / "-".join(parts)


def enable(folder: str | Path | None) -> Path | None:
    """Use `folder` for compiled programs of any size and compile time; None switches the cache off.

    A folder that cannot be written to, or that others can, is said once in the log, and nothing is cached.

    Returns:
      the folder in use, or None.
    """
    if folder is not None:
        folder = Path(folder).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise PermissionError("not writable")
            if problem := why_untrusted(folder):
                raise PermissionError(problem)
        except OSError as error:
            logger.warning("programs are not cached: compilation cache folder %s: %s", folder, error)
            folder = None
    jax.config.update("jax_compilation_cache_dir", None if folder is None else str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    # jax decides on first use whether there is a cache; an array made before this call would have settled it.
    compilation_cache.reset_cache()
    return folder


def why_untrusted(path: Path) -> str | None:
    """Who else could have put machine code into a file or folder, as a sentence; None: nobody but its owner and root.

    It has to belong to this user or to root, and only they may write to it, or the user's own primary group. In a
    folder above it others may write if it is sticky, as /tmp is.
    """
    if not hasattr(os, "geteuid"):  # no POSIX system
        return None
    path = path.resolve()
    status = path.stat()
    if status.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {status.st_uid}, not to you ({os.geteuid()}) or root: make a copy of your own"
    if status.st_mode & stat.S_IWOTH:
        return f"others can write to {path}: chmod o-w {path}"
    if status.st_mode & stat.S_IWGRP and status.st_gid not in (0, os.getegid()):
        return f"group {status.st_gid} can write to {path}: chmod g-w {path}"
    for above in path.parents:
        mode = above.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            return f"others can write to {above}, above {path.name}: chmod o-w {above}"
    return None


def cpu_features() -> str:
    """A short hash of the processor's instruction sets; of its name where those are not told."""
    features = features_line() or platform.processor()
    return hashlib.sha256(" ".join(sorted(set(features.split()))).encode()).hexdigest()[:12]


def features_line(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The line of `cpuinfo` that names the processor's instruction sets; empty where the system has none."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.lower().startswith(("flags", "features"))), "")

"""Refuses JAX in a forked process: its threads stayed in the parent, and a wait for a device would never end."""

import os

_used = False  # an engine was made in this process, or in the one that it was forked from
_forked = False  # after that


def begin_use() -> None:
    """Notes that JAX runs in this process from now on. Raises as `check`."""
    global _used
    check()
    _used = True


def is_forked() -> bool:
    """Whether this process was forked from one in which an engine had been made."""
    return _forked


def check() -> None:
    """Raises RuntimeError in a process that `is_forked`."""
    if _forked:
        raise RuntimeError(
            "this process was forked from one that had made an LLM, and JAX does not work here: its threads stayed in "
            "the parent. Start processes by multiprocessing's 'spawn' method, or make the LLM in the child alone"
        )


def _after_fork() -> None:
    global _forked
    _forked = _used


os.register_at_fork(after_in_child=_after_fork)

"""The persistent compilation cache in fresh processes: it is used, and damage to it is survived."""

import subprocess
import sys
import textwrap
from pathlib import Path

from jaxinfer.programs import compile_cache

SCRIPT = """
    import sys, jax, jax.numpy as jnp
    jnp.ones(3).sum()  # an array made before the cache is named must not switch it off
    from jaxinfer.programs import compile_cache
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append(name) if "cache_hits" in name else None)
    used = compile_cache.enable(sys.argv[1])
    x = jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((8, 8)))
    print(len(hits), used is not None, float(x.sum()))
"""


def run(folder: Path) -> tuple[list[str], str]:
    """(words printed, stderr) of a fresh process that compiles with the cache in `folder`."""
    code = textwrap.dedent(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    return done.stdout.split(), done.stderr


def test_a_second_process_reads_what_the_first_compiled_and_survives_damage(tmp_path):
    (hits, used, first), _ = run(tmp_path)
    assert (hits, used) == ("0", "True")
    entries = [path for path in tmp_path.iterdir() if path.name.endswith("-cache")]
    assert entries
    (hits, _, second), errors = run(tmp_path)
    assert int(hits) > 0 and second == first and "persistent" not in errors
    for entry in entries:
        entry.write_bytes(entry.read_bytes()[:40])
    (hits, _, third), errors = run(tmp_path)
    assert third == first
    assert "Error reading persistent compilation cache entry" in errors


def test_a_folder_that_cannot_be_made_is_said_and_nothing_is_cached(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    try:
        assert compile_cache.enable(blocked / "folder") is None
        assert "programs are not cached" in caplog.text
    finally:
        compile_cache.enable(compile_cache.default_folder())


def test_the_folder_is_named_after_versions_and_processor():
    import jax

    name = compile_cache.default_folder().name
    assert f"jax-{jax.__version__}" in name and len(name.rsplit("-", 1)[1]) == 12


def test_a_folder_that_others_can_write_to_is_said_and_nothing_is_cached(tmp_path, caplog):
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    try:
        assert compile_cache.enable(folder) is None
        assert f"programs are not cached: compilation cache folder {folder}: others can write" in caplog.text
        folder.chmod(0o755)
        assert compile_cache.enable(folder) == folder
    finally:
        compile_cache.enable(compile_cache.default_folder())

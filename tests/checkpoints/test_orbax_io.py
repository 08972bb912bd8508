"""orbax: what 8 devices saved, any other number of devices restores, in the dtype that is asked for."""

import dataclasses
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_models import CONFIGS

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.loading import named_leaves
from jaxinfer.checkpoints.orbax_io import restore_weights, save_weights
from jaxinfer.models import llama

CONFIG = llama.Config.from_hf(CONFIGS["llama_gqa"] | {"num_hidden_layers": 1})


def make_weights() -> Any:
    """Every element another number: float32 that bfloat16 has to round."""
    shapes = jax.eval_shape(lambda: llama.init(CONFIG, jax.random.key(0)))
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape).astype(np.float32), shapes)


def same(restored, expected) -> bool:
    pairs = zip(jax.tree.leaves(restored), jax.tree.leaves(expected), strict=True)
    return all(np.array_equal(np.asarray(a), b.astype(a.dtype)) for a, b in pairs)


EIGHT_DEVICES = """
import sys
import jax
from jax.sharding import NamedSharding, PartitionSpec as P
from test_orbax_io import CONFIG, llama, make_weights, restore_weights, same, save_weights

assert len(jax.devices()) == 8
mesh = jax.make_mesh((2, 4), ("data", "model"))
weights = make_weights()
split = lambda leaf: P(("data", "model")) if leaf.shape[0] % 8 == 0 else P()
shardings = jax.tree.map(lambda leaf: NamedSharding(mesh, split(leaf)), weights)
save_weights(sys.argv[1], jax.device_put(weights, shardings))
for count in (2, 4, 8):
    mesh = jax.make_mesh((count,), ("other",), devices=jax.devices()[:count])
    wanted = jax.tree.map(lambda leaf: NamedSharding(mesh, P(*[None] * (leaf.ndim - 1), "other")), weights)
    restored = restore_weights(sys.argv[1], llama, CONFIG, wanted)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == wanted
    assert same(restored, weights), count
"""


@pytest.fixture(scope="module")
def saved_by_eight(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("orbax") / "weights"
    root = Path(__file__).parents[2]
    run = subprocess.run(
        [sys.executable, "-c", EIGHT_DEVICES, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        env={
            "PATH": "",
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": f"{root}:{root / 'tests'}:{Path(__file__).parent}",
        },
    )
    assert run.returncode == 0, run.stderr
    return folder


def test_eight_devices_to_one(saved_by_eight):
    # Bug: the sharding saved with the arrays was rebuilt on restore, and failed with fewer devices.
    restored = restore_weights(saved_by_eight, llama, CONFIG)
    assert jax.tree.structure(restored) == jax.tree.structure(make_weights())
    assert same(restored, make_weights())
    assert all(leaf.devices() == {jax.devices()[0]} for leaf in jax.tree.leaves(restored))


def test_float32_to_bfloat16(saved_by_eight):
    restored = restore_weights(saved_by_eight, llama, dataclasses.replace(CONFIG, dtype="bfloat16"))
    assert same(restored, make_weights())
    for name, leaf in named_leaves(restored):
        assert leaf.dtype == ("float32" if "norm" in name else "bfloat16"), name


def test_misfits_are_all_named(saved_by_eight):
    other = dataclasses.replace(CONFIG.with_layers(2), mlp_dim=96, tie_word_embeddings=True)
    with pytest.raises(CheckpointError) as error:
        restore_weights(saved_by_eight, llama, other)
    for problem in ("layers.1.q_proj is missing", "no place for unembed", "down_proj is [64, 128] there"):
        assert problem in str(error.value)


def test_folders_that_are_not_ours(tmp_path, saved_by_eight):
    with pytest.raises(CheckpointError, match="exists"):
        save_weights(saved_by_eight, make_weights())
    canary = tmp_path / "canary"

    class Evil:
        def __reduce__(self):
            return (open, (str(canary), "w"))

    for name in ("_METADATA", "_CHECKPOINT_METADATA", "checkpoint"):
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(CheckpointError, match="not a complete orbax checkpoint"):
            restore_weights(folder, llama, CONFIG)
    assert not canary.exists()


@pytest.mark.parametrize("content", [b"", b"\x00{]", None])
def test_damaged_files_are_an_error_with_the_folder(tmp_path, saved_by_eight, content):
    """Whatever orbax makes of it: JSONDecodeError, plain Exception, KeyError."""
    files = [path.relative_to(saved_by_eight) for path in saved_by_eight.rglob("*") if path.is_file()]
    metadata = next(path for path in files if path.name == "_METADATA")
    process = next(path for path in files if path.name.startswith("process_"))
    data = max(files, key=lambda path: (saved_by_eight / path).stat().st_size)
    refused = 0
    for i, file in enumerate((metadata, process, data)):
        folder = shutil.copytree(saved_by_eight, tmp_path / str(i))
        half = (folder / file).read_bytes()[: (folder / file).stat().st_size // 2]
        (folder / file).write_bytes(half if content is None else content)
        with pytest.raises(CheckpointError) as error:
            restore_weights(folder, llama, CONFIG)
        refused += str(error.value).startswith(str(folder)) and "\n" not in str(error.value)
    assert refused == 3

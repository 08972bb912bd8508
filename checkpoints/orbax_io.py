"""Weights trees saved and restored with orbax, from any number of devices to any other.

On disk a tree is a flat dict, leaf path ("layers.0.q_proj") to array: independent of the classes of this
version and of the sharding it was saved with. What a restore puts where is decided by its arguments alone.
"""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jaxinfer.checkpoints.files import CheckpointError
from jaxinfer.checkpoints.loading import leaf_shardings, named_leaves, weight_leaves
from jaxinfer.models.spec import ModelModule
from jaxinfer.text.wording import first_line, listed


def save_weights(path: str | Path, weights: Any) -> None:
    """Saves a weights tree (sharded or not) to the new folder `path`; returns when it is written.

    Raises CheckpointError if `path` exists.
    """
    path = Path(path).expanduser().absolute()
    if path.exists():
        raise CheckpointError(f"{path} exists; give a new folder or remove it")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, dict(named_leaves(weights)))


def restore_weights(path: str | Path, model_module: ModelModule, config: Any, sharding: Any = None) -> Any:
    """The weights tree of `model_module` for `config` from a folder that `save_weights` wrote.

    Shapes and dtypes are those of `model_module.init(config, key)`: what was saved in another dtype is
    converted. `sharding` is None (the default device), one `jax.sharding.Sharding` for all leaves or a tree
    of them; the one of the saved arrays plays no part.

    Raises CheckpointError for a folder that is damaged, and naming the leaves that are missing, left over or have
    another shape.
    """
    path = Path(path).expanduser().absolute()
    leaves, treedef = weight_leaves(model_module, config)
    shardings = leaf_shardings(sharding, leaves, treedef)
    default = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    targets = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding or default)
        for (name, leaf), leaf_sharding in zip(leaves.items(), shardings, strict=True)
    }
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check(path, checkpointer, targets)
            restored = checkpointer.restore(path, targets)
    except CheckpointError:
        raise
    except Exception as error:  # orbax raises whatever its parts do: of JSON, of tensorstore, plain ones
        raise CheckpointError(
            f"{path} is damaged: orbax cannot read it ({type(error).__name__}: {first_line(error)}); save it again"
        ) from error
    return jax.tree.unflatten(treedef, [restored[name] for name in leaves])


def _check(
    path: Path, checkpointer: ocp.StandardCheckpointer, targets: dict[str, jax.ShapeDtypeStruct]
) -> None:
    metadata = checkpointer.metadata(path).item_metadata if path.is_dir() else None
    if metadata is None:
        raise CheckpointError(
            f"{path} is not a complete orbax checkpoint; give a folder written by save_weights"
        )
    saved = metadata.tree
    problems = [f"{name} is missing" for name in targets if name not in saved]
    problems += [f"the model has no place for {name}" for name in saved if name not in targets]
    problems += [
        f"{name} is {list(saved[name].shape)} there, the config asks for {list(target.shape)}"
        for name, target in targets.items()
        if name in saved and tuple(saved[name].shape) != target.shape
    ]
    if problems:
        raise CheckpointError(
            f"{path} does not fit the config: {listed(problems, 60, '; ')}. Nothing was loaded"
        )

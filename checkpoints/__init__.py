"""Published checkpoints: from a file or folder to a model's weights tree, and back."""

from pathlib import Path

from jaxinfer.checkpoints.files import CheckpointError, is_gguf
from jaxinfer.checkpoints.huggingface import open_checkpoint as open_huggingface
from jaxinfer.checkpoints.loading import (
    Checkpoint,
    TensorSource,
    load_weights,
    weights_from_tree,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "TensorSource",
    "load_weights",
    "open_checkpoint",
    "weights_from_tree",
]


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a GGUF file (whatever its name is) or a Hugging Face folder; no tensor is read yet.

    Raises CheckpointError.
    """
    path = Path(path).expanduser()
    if path.is_dir():
        return open_huggingface(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; give a GGUF file or a folder with config.json")
    if not is_gguf(path):
        raise CheckpointError(f"{path} is neither a GGUF file nor a folder with config.json and safetensors")
    try:
        from jaxinfer.checkpoints.gguf import (
            open_checkpoint as open_gguf,  # here: nothing else needs the gguf package
        )
    except ModuleNotFoundError as error:
        raise CheckpointError(f"{path} needs the {error.name} package: pip install {error.name}") from error
    return open_gguf(path)

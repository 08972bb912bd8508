"""What every checkpoint format shares: tensors by Hugging Face name, and from them a weights tree.

A format file (huggingface, gguf) turns a path into a `Checkpoint`; `load_weights` turns a `Checkpoint` into
the weights of a model module. Nothing here unpickles or executes anything from a checkpoint.
"""

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from jaxinfer.checkpoints.files import CheckpointError
from jaxinfer.models.spec import Leaves, ModelModule
from jaxinfer.text.wording import listed

logger = logging.getLogger(__name__)

# Rows are read and converted in pieces of this many elements, so that the float32 form of a large quantized
# matrix never exists as a whole: it alone would break the 1.3x bound on the peak while loading.
CHUNK_ELEMENTS = 1 << 19
# Tensors that are read and converted at the same time: numpy leaves the interpreter to others meanwhile.
THREADS = 2

# Tensors that older exporters wrote although they can be computed from the config.
IGNORED_TENSORS = re.compile(r"(?:^|\.)rotary_emb\.inv_freq$")

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class TensorSource:
    """One tensor of a checkpoint file; nothing is read before `read` or `read_rows`.

    `shape` and `dtype` are those of the array that is read (quantized file types read as float32); `nbytes`
    is the size in the file. `read_rows(start, stop)` reads that part of the first axis into new memory.
    `read_blocks()` reads a quantized matrix as the file has it (gguf_blocks.Blocks), and `blocks` are the shapes of
    what it reads; None where it is not stored so.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    nbytes: int
    read_rows: Callable[[int, int], np.ndarray] = field(repr=False)
    blocks: Any = field(default=None, repr=False)
    read_blocks: Callable[[], Any] | None = field(default=None, repr=False)

    def read(self) -> np.ndarray:
        """The whole tensor, `shape` and `dtype` as the fields say."""
        return self.read_rows(0, self.shape[0] if self.shape else 1).reshape(self.shape)

    def part(self, start: int, stop: int) -> "TensorSource":
        """These rows alone, as a tensor of its own."""
        read_blocks = self.read_blocks
        return TensorSource(
            (stop - start, *self.shape[1:]),
            self.dtype,
            self.nbytes // self.shape[0] * (stop - start),
            lambda first, last: self.read_rows(start + first, start + last),
            None if self.blocks is None else self.blocks.part(start, stop),
            None if read_blocks is None else lambda: read_blocks().part(start, stop),
        )

    def chunks(self) -> Iterator[tuple[slice, np.ndarray]]:
        """The tensor in pieces of about CHUNK_ELEMENTS along its first axis (at least one axis)."""
        rows = max(1, CHUNK_ELEMENTS // max(1, math.prod(self.shape[1:])))
        for start in range(0, self.shape[0], rows):
            part = slice(start, min(start + rows, self.shape[0]))
            yield part, self.read_rows(part.start, part.stop)


# (leaf name, array, its tensor; None of a leaf that was given) -> what stands in the tree
Transform = Callable[[str, jax.Array, TensorSource | None], Any]


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: `config` with the keys of config.json, `tensors` by Hugging Face name.

    `metadata`: all key-value pairs of a GGUF file, which its tokenizer is built from; None for a folder.
    """

    config: dict[str, Any]
    tensors: dict[str, TensorSource]
    generation_config: dict[str, Any] | None
    end_token_ids: tuple[int, ...]
    path: Path
    kind: Literal["gguf", "huggingface"]
    metadata: Mapping[str, Any] | None = field(default=None, repr=False)


def check_against_tensors(config: Mapping[str, Any], tensors: Mapping[str, TensorSource], path: Path) -> None:
    """Compares the sizes in `config` that everything else follows from with the tensors that a file has.

    Cheap, and done when a checkpoint is opened: a config of other sizes would first have a model of these sizes traced.

    Raises CheckpointError with the key, its value, and what the file has.
    """
    indices = {int(m[1]) for name in tensors if (m := re.match(r"model\.layers\.(\d{1,9})\.", name))}
    num_layers = config.get("num_hidden_layers")
    if num_layers is not None and indices and num_layers != len(indices):
        raise CheckpointError(
            f"{path}: num_hidden_layers is {num_layers}, but the file has tensors of {len(indices)} layers"
        )
    embed = tensors.get(EMBED)
    sizes = (config.get("vocab_size"), config.get("hidden_size"))
    if embed is not None and None not in sizes and embed.shape != sizes:
        raise CheckpointError(
            f"{path}: vocab_size and hidden_size are {sizes[0]} and {sizes[1]}, but {EMBED} is {list(embed.shape)}"
        )


def settle_tied_head(config: dict[str, Any], tensors: dict[str, TensorSource], path: Path) -> None:
    """Writes `tie_word_embeddings` into `config` so that it says what the file holds; changes both in place.

    Without a flag (here or in a nested `text_config`) a file without its own head is tied. A flag that says
    tied beside a head that differs from the embedding gives way to the file, with a warning; an equal copy of
    the embedding is dropped. Untied without a head stays so, and `load_weights` names the missing tensor.
    """
    nested = config.get("text_config")
    nested = nested if isinstance(nested, dict) else {}
    tied = config.get("tie_word_embeddings", nested.get("tie_word_embeddings"))
    if tied is None:
        tied = HEAD not in tensors
    elif tied and HEAD in tensors:
        if EMBED in tensors and _equal(tensors[HEAD], tensors[EMBED]):
            del tensors[HEAD]
        else:
            logger.warning(
                "%s: tie_word_embeddings is true, but the file has its own %s; using the file's head",
                path,
                HEAD,
            )
            tied = False
    config["tie_word_embeddings"] = bool(tied)


def _equal(a: TensorSource, b: TensorSource) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return all(
        np.array_equal(x.view(np.uint8), y.view(np.uint8))
        for (_, x), (_, y) in zip(a.chunks(), b.chunks(), strict=True)
    )


def load_weights(
    checkpoint: Checkpoint,
    model_module: ModelModule,
    config: Any,
    dtype: Any,
    sharding: Any = None,
    transform: Transform = lambda name, leaf, source: leaf,
) -> Any:
    """The weights tree of `model_module` for `config`, read from `checkpoint` one tensor at a time.

    Tensors that the file stores with one axis (norms, biases) become float32, all others `dtype`. `sharding`
    is None (the default device), one `jax.sharding.Sharding` for every leaf, or a tree of them like the
    weights. `transform(leaf name, array, source)` makes what stands in the tree of each leaf as it comes (quantized,
    say: the whole model in `dtype` never exists), on one of THREADS threads. Peak host memory is the loaded weights
    plus a few chunks; on CPU the arrays that are filled here are the weights (no second copy).

    Raises CheckpointError naming all tensors that are missing, have no place in the model or a wrong shape.
    """
    leaves, treedef = weight_leaves(model_module, config)
    sources = _match(checkpoint, model_module.LEAVES, config, leaves)
    shardings = leaf_shardings(sharding, leaves, treedef)

    def load(name: str, leaf_sharding: Any) -> Any:
        source, leaf = sources[name], model_module.LEAVES[name.rpartition(".")[2]]
        wanted = np.dtype(np.float32) if len(source.shape) == 1 else np.dtype(dtype)
        host = _read_as(source, wanted).reshape(leaves[name].shape)
        if checkpoint.kind == "huggingface":  # gguf.py does the same to the blocks of its tensors
            if leaf.from_hf is not None:
                host = leaf.from_hf(host)
            if checkpoint.kind in leaf.interleaved:
                host = host[:, halves_of_pairs(config.head_dim, config.ropes[0].dim)]
        # Wait for the copy to an accelerator, or host buffers of many tensors would be alive at once.
        return jax.block_until_ready(transform(name, jax.device_put(host, leaf_sharding), source))

    with ThreadPoolExecutor(THREADS) as pool:
        arrays = list(pool.map(load, leaves, shardings))
    return jax.tree.unflatten(treedef, arrays)


def weights_from_tree(tree: Mapping[str, Any], model_module: ModelModule, config: Any) -> Any:
    """The weights tree of `model_module` from a nested dict (or list, tuple, flax tree) of our leaf names.

    `tree["layers"][0]["q_proj"]`, or the key "0" for the layer, is the leaf `layers.0.q_proj`. Arrays keep
    their dtype and device; shapes must be exactly those of the model.

    Raises CheckpointError naming every missing, superfluous or wrongly shaped leaf.
    """
    leaves, treedef = weight_leaves(model_module, config)
    given = dict(named_leaves(tree))
    problems = [f"{name} is missing" for name in leaves if name not in given]
    problems += [f"{name} is no leaf of the model" for name in given if name not in leaves]
    problems += [
        f"{name} has shape {list(given[name].shape)} instead of {list(leaf.shape)}"
        for name, leaf in leaves.items()
        if name in given and tuple(given[name].shape) != leaf.shape
    ]
    if problems:
        raise CheckpointError(f"the given weights tree does not fit the config: {'; '.join(problems)}")
    return jax.tree.unflatten(treedef, [given[name] for name in leaves])


@lru_cache(maxsize=4)  # tracing a model's init takes 0.1 s, and a start asks more than once
def weight_leaves(model_module: ModelModule, config: Any) -> tuple[dict[str, jax.ShapeDtypeStruct], Any]:
    """Leaf paths such as "layers.0.q_proj" with their shapes, in tree order, and the tree's structure."""
    shapes = jax.eval_shape(lambda: model_module.init(config, jax.random.key(0)))
    return dict(named_leaves(shapes)), jax.tree.structure(shapes)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """(dotted path, leaf) of a pytree, in its order."""
    return [
        (jax.tree_util.keystr(path, simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]
    ]


def leaf_sources(checkpoint: Checkpoint, model_module: ModelModule, config: Any) -> dict[str, TensorSource]:
    """The tensor of each leaf, by leaf name; CheckpointError as `load_weights`."""
    return _match(checkpoint, model_module.LEAVES, config, weight_leaves(model_module, config)[0])


def halves_of_pairs(head_dim: int, turned: int) -> np.ndarray:
    """Which of a head's numbers stand where, i64[head_dim]: pairs that lie side by side become halves (rope.py).

    turned: so many of the first numbers are in pairs.
    """
    return np.r_[0:turned:2, 1:turned:2, turned:head_dim]


def _match(
    checkpoint: Checkpoint, table: Leaves, config: Any, leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, TensorSource]:
    """The tensor of each leaf; CheckpointError with all that is missing, left over or wrongly shaped."""
    unused = {name for name in checkpoint.tensors if not IGNORED_TENSORS.search(name)}
    missing, wrong, sources = [], [], {}
    for path, struct in leaves.items():
        leaf, layer = table[path.rpartition(".")[2]], re.match(r"layers\.(\d+)", path)
        name = leaf.hf.replace("{layer}", layer[1] if layer else "")
        if name not in checkpoint.tensors:
            missing.append(name)
            continue
        unused.discard(name)
        source = checkpoint.tensors[name]
        if leaf.beside:
            rows = [math.prod(leaf.sizes(config, letters)) for letters in leaf.beside]
            if source.shape[:1] != (sum(rows),):
                wrong.append(
                    f"{name} is {list(source.shape)} in the file, the config asks for {sum(rows)} rows"
                )
                continue
            start = sum(rows[: leaf.place])
            source = source.part(start, start + rows[leaf.place])
        if not _merges_to(struct.shape, source.shape):
            wrong.append(
                f"{name} is {list(source.shape)} in the file, the config asks for {list(struct.shape)}"
            )
        elif not _is_floating(source.dtype):
            wrong.append(f"{name} is {source.dtype} in the file; only floating point weights can be loaded")
        sources[path] = source
    problems = []
    if missing:
        problems.append(f"it lacks {listed(list(dict.fromkeys(missing)))}")
    if unused:
        problems.append(f"the model has no place for {listed(sorted(unused))}")
    if wrong:
        problems.append(listed(list(dict.fromkeys(wrong)), separator="; "))
    if problems:
        raise CheckpointError(
            f"{checkpoint.path} does not fit its config: {'; '.join(problems)}. Nothing was loaded"
        )
    return sources


def _merges_to(leaf_shape: tuple[int, ...], file_shape: tuple[int, ...]) -> bool:
    """Whether `file_shape` is `leaf_shape` with neighbours merged: [N, H, D] -> [N*H, D], never [D, N*H]."""
    axes = list(leaf_shape)
    for size in file_shape:
        merged = 1
        while axes and merged < size:
            merged *= axes.pop(0)
        if merged != size:
            return False
    return bool(file_shape) and all(size == 1 for size in axes)


def _is_floating(dtype: np.dtype) -> bool:
    return jax.numpy.issubdtype(dtype, np.floating)


def _read_as(source: TensorSource, dtype: np.dtype) -> np.ndarray:
    """The tensor in `dtype`, in memory that jax can take over without copying it on CPU."""
    out = _aligned_empty(source.shape, dtype)
    for part, rows in source.chunks():
        out[part] = rows
    return out


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    # XLA:CPU aliases a numpy array only when it starts at a multiple of 64 bytes; numpy promises 16.
    nbytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


def leaf_shardings(sharding: Any, leaves: Mapping[str, Any], treedef: Any) -> list[Any]:
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return [sharding] * len(leaves)
    return treedef.flatten_up_to(sharding)

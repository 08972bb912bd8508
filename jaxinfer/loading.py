"""From the name of a model to what an engine is built from, and which options there are not."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import jax
import jax.numpy as jnp

from jaxinfer import checkpoints, defaults, models, quantization, smoothing
from jaxinfer.checkpoints import fetch
from jaxinfer.checkpoints.loading import TensorSource, Transform, leaf_sources, named_leaves, weight_leaves
from jaxinfer.pallas_kernels.quantized_matmul.tuning import w8a8_products
from jaxinfer.pallas_kernels.ragged_paged_attention import IMPLEMENTATIONS
from jaxinfer.request import SamplingParams
from jaxinfer.sampling.sample import LogprobsMode
from jaxinfer.text.prompts import default_sampling_params
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

# Options of vLLM that have another name here, or that cannot act.
RENAMED_OPTIONS = {
    "block_size": "use page_size",
    "num_gpu_blocks_override": "use num_pages",
    "kv_cache_dtype": "quantized pages are not built yet; pages have the dtype of the model",
    "tensor_parallel_size": "sharding is not built yet; leave it out",
    "pipeline_parallel_size": "sharding is not built yet; leave it out",
    "quantization": "use quantize",
    "enforce_eager": "every step is a compiled program; leave it out",
    "swap_space": "a preempted sequence is computed again; leave it out",
    "cpu_offload_gb": "weights and pages stay on one device; leave it out",
    "disable_log_stats": "use stats()",
    "enable_chunked_prefill": "prefill is always chunked; max_num_batched_tokens bounds a chunk",
    "num_scheduler_steps": "use decode_steps",
    "trust_remote_code": "code that comes with a checkpoint is never run",
}


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raises TypeError for options that do not exist here, with what to do instead where they are vLLM's."""
    for name, value in options.items():
        if name == "trust_remote_code" and not value:
            continue
        reason = RENAMED_OPTIONS.get(name, "there is no such option")
        raise TypeError(f"LLM({name}={value!r}): {reason}")


def check_names(logprobs_mode: str, implementation: str, matmul_precision: str | None) -> None:
    """Raises ValueError for a value of these options of `LLM` that does not exist."""
    if logprobs_mode not in get_args(LogprobsMode):
        raise ValueError(
            f"logprobs_mode={logprobs_mode!r} must be one of {', '.join(get_args(LogprobsMode))}"
        )
    implementations = ("auto", *IMPLEMENTATIONS)
    if implementation not in implementations:
        raise ValueError(f"implementation={implementation!r} must be one of {', '.join(implementations)}")
    try:
        jax.default_matmul_precision(matmul_precision)
    except ValueError:
        raise ValueError(
            f"matmul_precision={matmul_precision!r} is not known to JAX; give default, high, highest or None"
        ) from None


@dataclass(frozen=True)
class FoundModel:
    """Everything about a model but its weights, which `load_weights()` reads."""

    module: ModuleType
    config: Any
    load_weights: Callable[..., Any]  # (transform=...) as that of checkpoints.load_weights
    weights_loaded: bool  # whether they are on the device already
    tokenizer: Tokenizer | None
    end_token_ids: frozenset[int]
    name: str  # pages are shared under equal names only
    sampling_defaults: SamplingParams = field(default_factory=SamplingParams)
    in_form: Callable[[Any], Any] = lambda weights: weights  # weights as published -> in the form that runs
    sources: Mapping[str, TensorSource] = field(default_factory=dict)  # by leaf; of a model that is read
    # Tree of jax.ShapeDtypeStruct of the weights that are to be read, in the form that runs; None: known when read.
    shapes: Any = None


def find_model(
    model: str | Path,
    revision: str | None,
    token: str | bool | None,
    dtype: str,
    device: jax.Device,
    tokenizer: Tokenizer | None,
    generation_config: str,
) -> FoundModel:
    """Finds, fetches and opens a model; arguments as those of `LLM`, where `tokenizer` replaces the model's own.

    Raises:
      FetchError, CheckpointError, ValueError: as `LLM`.
    """
    dtype = defaults.dtype(dtype, device)
    path = fetch.resolve(model, revision, token)
    checkpoint = checkpoints.open_checkpoint(path)
    module = models.for_config(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config, dtype=dtype)
    tokenizer = tokenizer or load_tokenizer(path, checkpoint.metadata)
    leaves, structure = weight_leaves(module, config)
    file = checkpoint.generation_config if generation_config == "auto" else None
    return FoundModel(
        module=module,
        config=config,
        load_weights=partial(checkpoints.load_weights, checkpoint, module, config, jnp.dtype(config.dtype)),
        weights_loaded=False,
        tokenizer=tokenizer,
        end_token_ids=frozenset(checkpoint.end_token_ids) | tokenizer.eos_token_ids,
        name=str(path),
        sampling_defaults=default_sampling_params(file),
        sources=leaf_sources(checkpoint, module, config),
        shapes=jax.tree.unflatten(structure, leaves.values()),
    )


def given_model(
    config: Any, weights: Any, module: ModuleType | None, tokenizer: Tokenizer | None
) -> FoundModel:
    """A model whose weights the user has: a `Weights` tree, or nested dicts (such as a Flax tree) of its leaves.

    Raises:
      TypeError: no model file has this kind of config.
      CheckpointError: leaves are missing, superfluous or of another shape.
    """
    module = module or models.module_of(config)
    if isinstance(weights, Mapping):
        weights = checkpoints.weights_from_tree(weights, module, config)
    return FoundModel(
        module=module,
        config=config,
        load_weights=partial(_transformed, weights),
        weights_loaded=True,
        tokenizer=tokenizer,
        end_token_ids=frozenset() if tokenizer is None else tokenizer.eos_token_ids,
        name="weights given as a tree",
    )


def _transformed(weights: Any, transform: Transform = lambda name, leaf, source: leaf) -> Any:
    leaves = [transform(name, leaf, None) for name, leaf in named_leaves(weights)]
    return jax.tree.unflatten(jax.tree.structure(weights), leaves)


def _num_bytes(shapes: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))


def quantized(
    found: FoundModel, quantize: str | None, device: defaults.Device
) -> tuple[FoundModel, int | None]:
    """The model with its matrices in another form (a name of `quantization.FORMS`), and the bytes of its weights then.

    Returns:
      `found` itself and None without a form.

    Raises:
      ValueError: there is no such form, or the model's dtype has none.
    """
    if quantize is None:
        return found, None
    if quantize not in quantization.FORMS:
        raise ValueError(f"quantize={quantize!r} must be one of {', '.join(quantization.FORMS)}, or None")
    if found.config.dtype == "float16":
        raise ValueError(f"quantize={quantize!r} works with dtype float32 or bfloat16, not float16")
    products = w8a8_products(device.device_kind)
    smooth = device.platform == "cpu" and hasattr(found.module, "SMOOTHED")
    logger.info(
        "weights: %s, products in %s on %s, channels of activations %s",
        quantize, products, device.device_kind, "smoothed" if smooth else "as they are",
    )  # fmt: skip
    axes = found.module.logical_axes(found.config)
    by_name = dict(named_leaves(axes, is_leaf=quantization.is_axes))

    def transform(name: str, leaf: jax.Array, source: Any) -> Any:
        return quantization.quantize_leaf(by_name[name], leaf, products)

    def in_form(weights: Any) -> Any:
        if smooth:
            return smoothing.quantize(found.module, found.config, weights, products)
        return quantization.quantize(weights, axes, products)

    def shapes() -> Any:
        weights = found.module.init(found.config, jax.random.key(0))
        if smooth:
            return smoothing.apply(found.module, found.config, weights, products, {})
        return quantization.quantize(weights, axes, products)

    # On an accelerator the leaves are quantized as they come: all of them beside each other may not fit.
    load_weights = partial(found.load_weights, transform=transform)
    changed = replace(
        found,
        load_weights=(lambda: in_form(found.load_weights())) if smooth else load_weights,
        name=f"{found.name}, {quantize}",
        in_form=in_form,
        shapes=jax.eval_shape(shapes),
    )
    return changed, _num_bytes(changed.shapes)


def with_packed(
    found: FoundModel, few_rows: str, device: defaults.Device, plain: bool
) -> tuple[FoundModel, int | None]:
    """The model with codes beside the matrices that its file has in blocks (quantization.PackedMatrix).

    Args:
      few_rows: as of `LLM`.
      plain: whether nothing else changes the matrices or how they are multiplied.

    Returns:
      the model, and the bytes of its weights then; `found` itself and None where few rows read the matrices.

    Raises:
      ValueError: few_rows does not exist, or is "packed" where that cannot be.
    """
    if few_rows not in quantization.FEW_ROWS:
        raise ValueError(f"few_rows={few_rows!r} must be one of {', '.join(quantization.FEW_ROWS)}")
    blocks = {name: source.blocks for name, source in found.sources.items() if source.blocks is not None}
    choice = defaults.few_rows(few_rows, device, plain, bool(blocks))
    logger.info("products of few rows: %s, since %s", choice.value, choice.reason)
    if choice.value == "full":
        return found, None

    def transform(name: str, leaf: jax.Array, source: TensorSource | None) -> Any:
        if source is None or source.read_blocks is None:
            return leaf
        blocks = source.read_blocks()
        # numpy's views: they are put in order on the way to the device, and nothing is traced or compiled.
        return jax.device_put(quantization.pack(leaf, blocks.codes, blocks.scale, blocks.offset))

    def refuse(weights: Any) -> Any:
        raise ValueError(
            "these weights have no blocks of codes, which few_rows='packed' reads: give LLM few_rows='full' to go on "
            "with other weights"
        )

    pack = jax.jit(quantization.pack)  # layers of equal shapes are traced once
    leaves = [
        jax.eval_shape(pack, leaf, blocks[name].codes, blocks[name].scale, blocks[name].offset)
        if name in blocks
        else leaf
        for name, leaf in named_leaves(found.shapes)
    ]
    shapes = jax.tree.unflatten(jax.tree.structure(found.shapes), leaves)
    changed = replace(
        found, load_weights=partial(found.load_weights, transform=transform), in_form=refuse, shapes=shapes
    )
    return changed, _num_bytes(shapes)

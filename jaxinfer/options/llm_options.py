"""The options of an engine, each said once: name, type, default, range and what it does.

`LLM`, the commands, `jaxinfer compile` and `jaxinfer plan` take their options, defaults and help from these fields.
Nothing here imports jax: help is printed before the seconds that this takes.
"""

import dataclasses
import difflib
import inspect
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from jaxinfer.scheduler import SchedulerConfig

if TYPE_CHECKING:
    from jaxinfer.programs.buckets import Buckets
    from jaxinfer.sampling.sample import LogitsProcessor

# Options of vLLM that have another name here, or that cannot act.
FOREIGN = {
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
# Of these at most one is given.
POOL_SIZES = ("num_pages", "kv_cache_memory_bytes", "gpu_memory_utilization")


def option(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    command: Any = False,
    shapes: bool = False,
    metavar: str | None = None,
    secret: bool = False,
) -> Any:
    """A field of LLMOptions.

    Args:
      doc: what it does, with its unit; the first sentence is the help of commands.
      minimum, maximum: of numbers, themselves included.
      command: whether command lines have it; or the type that it has there, where that is another.
      shapes: whether it decides which programs there are, or what is in them.
      metavar: what stands for the value in the help of commands.
      secret: never printed.
    """
    metadata = {"doc": doc, "minimum": minimum, "maximum": maximum}
    metadata |= {"command": command, "shapes": shapes, "metavar": metavar}
    return dataclasses.field(default=default, repr=not secret, metadata=metadata)


@dataclass(frozen=True)
class LLMOptions:
    """What can be said to `LLM` beside the model; see `documentation`.

    Raises:
      ValueError: a value is out of range or none of the choices. (Checks that need the model or the device: `resolve`.)
    """

    revision: str | None = option(None, "Branch, tag or commit of a model of the hub.", command=True)
    token: str | bool | None = option(
        None,
        "For a hub model that is not public; default: the stored one. False: none.",
        command=True,
        secret=True,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto",
        "Of weights and activations.",
        command=True,
        shapes=True,
    )
    quantize: Literal["w8a8"] | None = option(
        None,
        "Weights and activations in int8. w8a8: matrices of layers in int8 with a scale per output, activations in "
        "int8 with a scale per token. On a CPU the channels of activations are made alike first, from tokens that the "
        "model draws (which takes all weights in `dtype` for a while), and the matrices of K and V stay in `dtype`.",
        command=True,
        shapes=True,
    )
    few_rows: Literal["auto", "full", "packed"] = option(
        "auto",
        "What few rows read: matrices, or a file's codes. How up to four rows are multiplied on a CPU: full, by the "
        "matrices in `dtype` as any number; packed, by the 4 or 8 bit codes of a GGUF file, which lie beside the "
        "matrices then: the file's values exactly, float32 sums; auto, by what was measured for this kind of CPU. "
        "`update_weights` needs full.",
        command=True,
        shapes=True,
    )
    max_model_len: int | None = option(
        None,
        "Prompt and output tokens of one sequence together; default: the model's own maximum.",
        minimum=1,
        command=True,
        shapes=True,
    )
    max_num_seqs: int = option(64, "Rows that run at the same time.", minimum=1, command=True, shapes=True)
    max_num_batched_tokens: int = option(
        512, "Tokens of one step; bounds a chunk of the prompt.", minimum=1, command=True, shapes=True
    )
    max_num_partial_prefills: int = option(
        SchedulerConfig.max_num_partial_prefills,
        "Prompts that may be under way in chunks at the same time.",
        minimum=1,
    )
    num_pages: int | None = option(
        None,
        "Pages of the KV cache. At most one of num_pages, kv_cache_memory_bytes and gpu_memory_utilization is given.",
        minimum=2,
        command=True,
        shapes=True,
    )
    kv_cache_memory_bytes: int | None = option(
        None, "Bytes of the KV cache, instead of pages.", minimum=1, command=True, shapes=True
    )
    gpu_memory_utilization: float | None = option(
        None,
        "Share of the memory, over 0 to 1, instead of pages. On an accelerator for weights, pages and a step together.",
        maximum=1.0,
        command=True,
        shapes=True,
    )
    page_size: int | Literal["auto"] = option(
        "auto", "Tokens per page.", minimum=1, command=True, shapes=True
    )
    seed: int = option(
        0, "Of requests that name none: the i-th request of this LLM draws from hash64(seed, i)."
    )
    enable_prefix_caching: bool = option(True, "Whether equal beginnings share pages.", command=True)
    implementation: Literal["auto", "reference", "xla", "cpu", "tpu", "gpu", "gpu_xla"] = option(
        "auto",
        "The kernels that write and read pages.",
        command=True,
        shapes=True,
    )
    matmul_precision: str | None = option(
        None,
        "Of products in float32; one of JAX's names. Default: float32 means float32 on every device.",
        command=Literal["default", "high", "highest"],
        shapes=True,
    )
    decode_steps: int = option(
        SchedulerConfig.decode_steps,
        "Tokens per row that one decode program may draw before the host looks.",
        minimum=1,
        command=True,
        shapes=True,
    )
    batch_invariant: bool = option(
        False,
        "Same bits whatever runs beside a request; slower. A request gets the same bits, ids and logprobs, however "
        "its prompt is cut into chunks, from cached pages or not, after a preemption, with any decode_steps, in every "
        "process on one kind of CPU and one version of jax. A device or implementation for which this is not proven "
        "is refused.",
        command=True,
        shapes=True,
    )
    strict_compile: bool = option(False, "Raise if a program is compiled after `warmup()`.")
    background_compile: bool = option(
        True,
        "Compile on another thread: on a CPU, while weights are read, the programs of a first short prompt; behind "
        "the first token, what `warmup()` would. A process that ends meanwhile waits for the program under way.",
    )
    logprobs_mode: Literal["raw", "processed"] = option(
        "raw",
        "Log-probabilities before or after filters. raw: log-softmax of the model's logits; processed: after all "
        "filters; of output tokens. Those of prompt tokens are always raw.",
        command=True,
        shapes=True,
    )
    logits_processors: Sequence["LogitsProcessor"] = option(
        (), "Functions of logits, traced into the step; see sampling/logits_processors.py."
    )
    logits_processor_args: Mapping[str, Any] | None = option(
        None, "What requests may hand to them in `extra_args`: key -> default value."
    )
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "Whose sampling defaults count. auto: a request without SamplingParams takes those of the model's "
        "generation_config.json (`default_sampling_params`); none: it takes `SamplingParams()`. Parameters that a "
        "request gives are never mixed with the file's.",
    )
    compilation_cache_dir: str | Path | None = option(
        "auto", "Folder of compiled programs, or none.", command=True, metavar="FOLDER"
    )
    programs: str | Path | None = option(
        None,
        "Start from what `jaxinfer compile --save` left here, with its options. They are loaded instead of compiled; "
        "options that are not given are those that they were compiled for. The folder holds machine code: only load "
        "one that you trust. Where its compiler could not serialize them, programs are compiled through the persistent "
        "cache in that folder instead of `compilation_cache_dir`, and the log says so.",
        command=True,
        metavar="FOLDER",
    )
    buckets: "Buckets | None" = option(
        None, "Shapes of programs instead of the default ones (programs/buckets.py)."
    )

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            _check(field, getattr(self, field.name))
        self.scheduler(self.max_model_len or 1)
        given = [f"{name}={getattr(self, name)}" for name in POOL_SIZES if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} both set the size of the KV cache; give one of them")
        if self.programs is not None and self.logits_processors:
            raise ValueError(
                "programs=... has none with logits_processors: functions are not saved; leave one out"
            )

    @staticmethod
    def from_keywords(options: Mapping[str, Any]) -> "LLMOptions":
        """From keyword arguments of `LLM`.

        Raises:
          TypeError: there is no such option; the message says what to do instead where it is vLLM's.
          ValueError: see LLMOptions.
        """
        options = dict(options)
        if not options.get("trust_remote_code", True):  # of what never happens here
            del options["trust_remote_code"]
        for name in options.keys() - set(NAMES):
            near = difflib.get_close_matches(name, NAMES, 1)
            reason = FOREIGN.get(name) or "there is no such option" + (
                f"; did you mean {near[0]}?" if near else ""
            )
            raise TypeError(f"LLM({name}={options[name]!r}): {reason}")
        return LLMOptions(**options)

    def scheduler(self, max_model_len: int, max_multi_step_rows: int | None = None) -> SchedulerConfig:
        """The scheduler's part of the options. Raises ValueError if they do not go together."""
        return SchedulerConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=max_model_len,
            max_num_partial_prefills=self.max_num_partial_prefills,
            decode_steps=self.decode_steps,
            max_multi_step_rows=max_multi_step_rows,
        )


NAMES = tuple(field.name for field in dataclasses.fields(LLMOptions))
SHAPES = tuple(field.name for field in dataclasses.fields(LLMOptions) if field.metadata["shapes"])
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(LLMOptions)}


def kinds(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The members of the type of a field of LLMOptions."""
    return get_args(field.type) if get_origin(field.type) in (Union, UnionType) else (field.type,)


def choices(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """The values that a field of LLMOptions has by name, None among them where it may be None."""
    values: list[Any] = []
    for kind in kinds(field):
        values += get_args(kind) if get_origin(kind) is Literal else [None] if kind is NoneType else []
    return tuple(values)


def number(field: dataclasses.Field[Any]) -> type | None:
    """int or float, where a field of LLMOptions may have any in its range; else None."""
    return next((kind for kind in kinds(field) if kind in (int, float)), None)


def _check(field: dataclasses.Field[Any], value: Any) -> None:
    named, kind = choices(field), number(field)
    if kind is None:
        if any(get_origin(member) is Literal for member in kinds(field)) and value not in named:
            raise ValueError(f"{field.name}={value!r} must be one of {_listed(named)}")
        return
    if any(value is choice or value == choice for choice in named):
        return
    if isinstance(value, bool) or not isinstance(value, Integral if kind is int else Real):
        names = f", or {_listed(named)}" if named else ""
        raise ValueError(
            f"{field.name}={value!r} must be {'an integer' if kind is int else 'a number'}{names}"
        )
    low, high = field.metadata["minimum"], field.metadata["maximum"]
    if low is not None and value < low:
        raise ValueError(f"{field.name}={value} must be at least {low}")
    if high is not None and value > high:
        raise ValueError(f"{field.name}={value} must be at most {high:g}")


def _listed(values: tuple[Any, ...]) -> str:
    names = ", ".join(str(value) for value in values if value is not None)
    return f"{names}, or None" if names and None in values else names or "None"


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of a function with `**options`, the fields of LLMOptions in their place."""
    own = inspect.signature(function)
    named = [p for p in own.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    fields = [
        inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type
        )
        for field in dataclasses.fields(LLMOptions)
    ]
    return own.replace(parameters=[*named, *fields])


def documentation(indent: str = "") -> str:
    """What each option does, as the Args section of a docstring has it."""
    lines = []
    for field in dataclasses.fields(LLMOptions):
        allowed = choices(field)
        text = f"{field.name}: {field.metadata['doc']}"
        if number(field) is None and len(allowed) > 1:
            text += f" One of {_listed(allowed)}."
        lines += textwrap.wrap(
            text, 116, initial_indent=indent, subsequent_indent=indent + "  ", break_on_hyphens=False
        )
    return "\n".join(lines)

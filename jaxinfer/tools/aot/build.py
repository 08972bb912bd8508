"""From a model and options of `LLM` to the programs that an engine would run on a chip that is not here.

Every decision is the engine's own (defaults, planner, step); only the device is a description.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import jax

from jaxinfer import defaults, models
from jaxinfer import kv_cache as kv
from jaxinfer.checkpoints.loading import weight_leaves
from jaxinfer.kv_cache import KVCacheSpec
from jaxinfer.loading import given_model, quantized
from jaxinfer.programs.buckets import Buckets, Program
from jaxinfer.programs.compile import Programs, example_arguments
from jaxinfer.sampling import sample
from jaxinfer.sampling.sample import SamplingBatch
from jaxinfer.scheduler import SchedulerConfig
from jaxinfer.tools import planner
from jaxinfer.tools.aot.options import DEFAULTS
from jaxinfer.tools.planner.shape import read_config


@dataclass(frozen=True)
class AbsentDevice:
    """What a device would say of itself: enough for every default that the engine takes from it."""

    platform: str  # cpu | gpu | tpu
    device_kind: str
    memory_bytes: int  # that a process can use
    compute_capability: str = ""  # of a GPU

    def memory_stats(self) -> dict[str, int]:
        return {"bytes_limit": self.memory_bytes, "bytes_in_use": 0}


@dataclass(frozen=True)
class Build:
    """A model with settings: what is needed to compile any of its programs."""

    module: ModuleType
    config: Any
    spec: KVCacheSpec
    kernels: defaults.Choice
    buckets: Buckets
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    weights: Any  # shapes
    quantize: str | None
    plan_problem: str | None  # why the engine would refuse these settings before it compiles anything
    matmul_precision: str | None
    compiler_options: dict[str, Any]

    @property
    def llm_options(self) -> dict[str, Any]:
        """Keyword arguments with which `LLM` builds these very programs."""
        return {
            "dtype": self.config.dtype,
            "quantize": self.quantize,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "num_pages": self.spec.num_pages,
            "page_size": self.spec.page_size,
            "implementation": self.spec.implementation,
            "matmul_precision": self.matmul_precision,
            "decode_steps": self.buckets.decode_steps,
        }

    @property
    def weights_bytes(self) -> int:
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.weights))

    def programs(self) -> dict[str, Program]:
        """All programs of the engine's warm-up, by name."""
        return {str(program): program for program in self.buckets.programs()}

    def compiler(self) -> Programs:
        """The engine's own way of compiling a program."""
        return Programs(
            self.module,
            self.config,
            matmul_precision=self.matmul_precision,
            compiler_options=self.compiler_options,
        )

    def state(self) -> tuple[Any, kv.KVCache, sample.RowState]:
        """Shapes of weights, cache and row state."""
        cache = jax.eval_shape(partial(kv.init, self.spec))
        rows = jax.eval_shape(partial(sample.init_row_state, self.max_num_seqs, self.max_model_len))
        return self.weights, cache, rows

    def arguments(self, program: Program, sharding: jax.sharding.Sharding | None) -> tuple:
        """Shapes of the arguments of a program, placed by `sharding`; None leaves them to the default device."""
        sampling_batch = None
        if program.kind != "score" and program.variant != "greedy":
            sampling_batch = SamplingBatch.from_rows([], program.num_rows, self.config.vocab_size)
        return placed(example_arguments(program, self.config, *self.state(), sampling_batch), sharding)


def placed(tree: Any, sharding: jax.sharding.Sharding | None) -> Any:
    """The shapes of a tree of arrays or shapes, with a sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def build(model: str, options: Mapping[str, Any], device: AbsentDevice) -> Build:
    """Decides what an engine on `device` would decide; `options` are keyword arguments of `LLM`.

    Where the engine would refuse, the pool is as small as one full sequence of `max_model_len` needs, and
    `plan_problem` has its sentence: the compiler is asked all the same.

    Raises:
      ValueError, TypeError: an option is out of range or not one of DEFAULTS.
      FetchError, CheckpointError: the model cannot be found or read.
    """
    unknown = sorted(set(options) - set(DEFAULTS))
    if unknown:
        raise TypeError(f"{unknown[0]} is no option of compile; there are {', '.join(DEFAULTS)}")
    o = {**DEFAULTS, **options}
    hf = read_config(model)
    module = models.for_config(hf)
    config = module.Config.from_hf(hf, dtype=defaults.dtype(o["dtype"], device))
    longest = config.max_position_embeddings
    max_model_len = longest if o["max_model_len"] is None else o["max_model_len"]
    if max_model_len > longest:
        raise ValueError(
            f"max_model_len={max_model_len} is over the model's own maximum of {longest} positions"
        )
    leaves, structure = weight_leaves(module, config)
    weights = jax.tree.unflatten(structure, leaves.values())
    found, weights_bytes = quantized(given_model(config, weights, module, None), o["quantize"], device)
    if o["quantize"] is not None:
        weights = found.shapes
    buckets = Buckets.default(
        o["max_num_seqs"], o["max_num_batched_tokens"], o["decode_steps"], device.platform
    )
    scheduler = SchedulerConfig(
        max_num_seqs=o["max_num_seqs"],
        max_num_batched_tokens=o["max_num_batched_tokens"],
        max_model_len=max_model_len,
        decode_steps=o["decode_steps"],
        max_multi_step_rows=buckets.max_multi_step_rows,
    )
    buckets.check(scheduler)
    spec, kernels = planner.cache_spec(
        config,
        device,
        max_model_len=max_model_len,
        page_size=o["page_size"],
        implementation=o["implementation"],
    )
    problem = None
    try:
        plan = planner.check(
            module,
            config,
            device,
            spec,
            max_model_len=o["max_model_len"],
            max_num_seqs=o["max_num_seqs"],
            max_num_batched_tokens=o["max_num_batched_tokens"],
            num_pages=o["num_pages"],
            kv_cache_memory_bytes=o["kv_cache_memory_bytes"],
            gpu_memory_utilization=o["gpu_memory_utilization"],
            weights_bytes=weights_bytes,
        )
        num_pages = plan.num_pages
    except planner.PlanError as error:
        problem = str(error)
        num_pages = o["num_pages"] or 1 + kv.pages_needed(max_model_len, spec.page_size)
    return Build(
        module=module,
        config=config,
        spec=replace(spec, num_pages=num_pages),
        kernels=kernels,
        buckets=buckets,
        max_model_len=max_model_len,
        max_num_seqs=o["max_num_seqs"],
        max_num_batched_tokens=o["max_num_batched_tokens"],
        weights=weights,
        quantize=o["quantize"],
        plan_problem=problem,
        matmul_precision=defaults.matmul_precision(o["matmul_precision"], config.dtype),
        compiler_options=defaults.compiler_options(device),
    )

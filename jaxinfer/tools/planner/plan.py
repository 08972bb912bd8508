"""All that `jaxinfer plan` says, as data."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jaxinfer.options import defaults
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.tools.planner import hardware as facts
from jaxinfer.tools.planner import roofline, shape
from jaxinfer.tools.planner.memory import Load, Memory, default_page_size, plan_memory
from jaxinfer.tools.planner.roofline import (
    AttentionKind,
    Bound,
    EndToEnd,
    Lever,
    OperatorGroup,
    Row,
    Setting,
)

DEFAULT_CONTEXT = 4096  # at most; less if the model's own maximum is
DEFAULT_OUTPUT = 256  # at most; half of the context if that is less


@dataclass(frozen=True)
class RequestKind:
    """One part of a request mix, with bounds for each request of it."""

    share: float
    prompt_tokens: int
    bound: EndToEnd


@dataclass(frozen=True)
class Plan:
    setting: Setting
    load: Load
    memory: Memory
    prompt_tokens: int
    output_tokens: int
    prefill_groups: list[OperatorGroup]  # the whole prompt of one sequence, as one step
    prefill_bound: Bound
    ttft_s: float  # lower bound: the prompt in chunks, nothing else running
    decode_groups: list[OperatorGroup]
    decode_bound: Bound  # its time is the lower bound for TPOT
    compute_bound_batch: int | None
    levers: list[Lever]
    attention: list[AttentionKind]
    mix: list[RequestKind]

    @property
    def tokens_per_second_per_user(self) -> float:
        """Upper bound."""
        return 1 / self.decode_bound.time_s

    @property
    def tokens_per_second(self) -> float:
        """Upper bound, of the whole batch."""
        return self.load.batch / self.decode_bound.time_s

    def to_json(self) -> dict[str, Any]:
        """Plain values; bytes are integers, times are seconds."""
        setting, memory = self.setting, self.memory
        return {
            "model": setting.shape.name,
            "num_params": setting.shape.num_params,
            "dtype": setting.shape.dtype,
            "quantize": setting.quantize,
            "kv_cache_dtype": setting.kv_dtype,
            "chips": setting.chips,
            "num_devices": setting.num_devices,
            **asdict(self.load),
            **asdict(memory),
            "fits": memory.fits,
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "ttft_lower_bound_s": self.ttft_s,
            "tpot_lower_bound_s": self.decode_bound.time_s,
            "tokens_per_second_per_user_upper_bound": self.tokens_per_second_per_user,
            "tokens_per_second_upper_bound": self.tokens_per_second,
            "compute_bound_batch": self.compute_bound_batch,
            "prefill": _phase(self.prefill_groups, self.prefill_bound),
            "decode": _phase(self.decode_groups, self.decode_bound),
            "levers": [asdict(lever) for lever in self.levers],
            "attention": [asdict(kind) for kind in self.attention],
            "mix": [
                {"share": kind.share, "prompt_tokens": kind.prompt_tokens, **end_to_end_json(kind.bound)}
                for kind in self.mix
            ],
            "hardware": asdict(setting.hardware),
        }


def make_plan(
    model: str | Path,
    *,
    hardware: str = "auto",
    chips: int = 1,
    context: int | None = None,
    batch: int = 1,
    dtype: str = "auto",
    quantize: str | None = None,
    kv_cache_dtype: str = "auto",
    page_size: int | None = None,
    max_num_batched_tokens: int = LLMOptions.max_num_batched_tokens,
    utilization: float | None = None,
    output_tokens: int | None = None,
    mix: list[tuple[int, int, float]] | None = None,
    gqa_heads: int | None = None,
    acceptance: float = 0.7,
    temporaries_bytes: int | None = None,
) -> Plan:
    """Plans a model (see `shape.load`) on hardware (see `hardware.load`).

    Args:
      context: prompt and output tokens of each sequence; None takes the model's maximum, at most 4,096.
      dtype, kv_cache_dtype: "auto" is what the engine takes on this platform, and for pages that of the model.
      output_tokens: part of the context that is output.
      mix: (prompt tokens, output tokens, share) of each kind of request.
      gqa_heads: KV heads of the middle entry of the comparison of attention kinds.
      acceptance: of draft tokens, for the lever "drafts".
      temporaries_bytes: read from a compiled program; None estimates them.

    Raises:
      ValueError: an argument cannot be; the message says which and why.
    """
    device = facts.load(hardware)
    dtype = LLMOptions.from_keywords({"dtype": dtype}).dtype
    model_shape = shape.load(model, defaults.dtype(dtype, device.platform).value)
    setting = Setting(
        model_shape,
        device,
        chips,
        model_shape.dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
        quantize,
    )
    if context is None:
        context = min(DEFAULT_CONTEXT, model_shape.max_position_embeddings)
    output = min(DEFAULT_OUTPUT, context // 2) if output_tokens is None else output_tokens
    if not 0 < output < context:
        raise ValueError(f"output_tokens={output} must be at least 1 and less than context={context}")
    options = {} if utilization is None else {"utilization": utilization}
    load = Load(
        batch,
        context,
        default_page_size(device, context) if page_size is None else page_size,
        max_num_batched_tokens,
        **options,
    )
    prompt = context - output
    decode_rows = [Row(1, context)] * batch
    kinds = mix if mix else [(prompt, output, 1.0)]
    return Plan(
        setting=setting,
        load=load,
        memory=plan_memory(setting, load, temporaries_bytes),
        prompt_tokens=prompt,
        output_tokens=output,
        prefill_groups=roofline.operator_groups(setting, [Row(prompt, prompt)]),
        prefill_bound=roofline.bound(setting, [Row(prompt, prompt)]),
        ttft_s=roofline.prefill_time(setting, prompt, max_num_batched_tokens),
        decode_groups=roofline.operator_groups(setting, decode_rows),
        decode_bound=roofline.bound(setting, decode_rows),
        compute_bound_batch=roofline.compute_bound_batch(setting, context),
        levers=roofline.levers(setting, batch, context, acceptance=acceptance),
        attention=roofline.compare_attention(setting, batch, context, gqa_heads),
        mix=[_request_kind(setting, load, *kind) for kind in kinds],
    )


def _request_kind(setting: Setting, load: Load, prompt: int, output: int, share: float) -> RequestKind:
    ttft = roofline.prefill_time(setting, prompt, load.max_num_batched_tokens)
    tpot = roofline.decode_bound(setting, load.batch, prompt + output // 2).time_s  # half way
    return RequestKind(share, prompt, EndToEnd(ttft, tpot, output))


def end_to_end_json(bound: EndToEnd) -> dict[str, float]:
    return {
        "output_tokens": bound.num_tokens,
        "ttft_s": bound.ttft_s,
        "tpot_s": bound.tpot_s,
        "tokens_per_second": bound.tokens_per_second,
        "total_s": bound.total_s,
        "ttft_plus_n_over_tps_s": bound.circulated_s,
    }


def _phase(groups: list[OperatorGroup], bound: Bound) -> dict[str, Any]:
    return {
        "groups": [
            asdict(group) | {"bytes": group.bytes, "flops_per_byte": group.intensity} for group in groups
        ],
        "flops": bound.flops,
        "bytes": bound.bytes,
        "flops_per_byte": bound.intensity,
        "compute_s": bound.compute_s,
        "memory_s": bound.memory_s,
        "interconnect_s": bound.interconnect_s,
        "lower_bound_s": bound.time_s,
        "binds": bound.binds,
    }

"""FLOPs and bytes of a step, and from them the shortest time it can take.

Counted are the bytes that have to move: every weight that the step reads, K and V of the resident tokens,
K and V written. Activations are left out, since fused kernels can keep them on the chip: so the times are
lower bounds. A step takes at least max(FLOPs / peak, bytes / bandwidth), plus what chips send each other.
(Williams, Waterman and Patterson, "Roofline", 2009.)
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxinfer.kv_cache import ml_dtypes_itemsize
from jaxinfer.metrics import Work
from jaxinfer.tools.planner.hardware import Hardware
from jaxinfer.tools.planner.shape import ModelShape, kv_bytes_per_token_and_layer


class Row(NamedTuple):
    """One sequence in a step."""

    num_tokens: int  # query tokens
    kv_len: int  # resident tokens, this step's included
    samples: bool = True  # its last token goes through the head


@dataclass(frozen=True)
class OperatorGroup:
    name: str  # projections | attention | mlp | head | embedding, norms
    flops: int
    weight_bytes: int
    kv_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte moved."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclass(frozen=True)
class Bound:
    """The shortest time of a step on one device (all devices work alike).

    Compute and memory overlap. What chips send does not: each all-reduce waits for the product before it, and
    the next product waits for it.
    """

    compute_s: float
    memory_s: float
    interconnect_s: float
    flops: int  # of all devices
    bytes: int

    @property
    def time_s(self) -> float:
        return max(self.compute_s, self.memory_s) + self.interconnect_s

    @property
    def binds(self) -> str:
        """What the time is spent on: compute | memory | interconnect."""
        if self.interconnect_s > max(self.compute_s, self.memory_s):
            return "interconnect"
        return "compute" if self.compute_s > self.memory_s else "memory"

    @property
    def intensity(self) -> float:
        return self.flops / self.bytes


@dataclass(frozen=True)
class Setting:
    """A model on hardware: what the roofline is drawn for."""

    shape: ModelShape
    hardware: Hardware
    chips: int = 1
    kv_dtype: str = "bfloat16"
    quantize: str | None = None  # of projections and MLPs; they are widened in the kernel, so compute stays

    def __post_init__(self) -> None:
        if self.chips < 1:
            raise ValueError(f"chips={self.chips} must be at least 1")
        if self.num_devices > self.shape.num_q_heads:
            raise ValueError(
                f"{self.chips} chips are {self.num_devices} devices, and the model has {self.shape.num_q_heads} query "
                "heads to split over them; use fewer chips"
            )
        if self.chips > 1 and self.hardware.interconnect_bandwidth is None:
            raise ValueError(f"no interconnect is known for {self.hardware.title}; chips must be 1")
        self.hardware.peak(self.shape.dtype)

    @property
    def num_devices(self) -> int:
        """JAX devices: a tpu7x chip is two."""
        return self.chips * self.hardware.devices_per_chip

    @property
    def kv_copies(self) -> float:
        """Devices x the share of K and V that each holds: above 1 when heads cannot be split further."""
        per_device = -(-self.shape.num_kv_heads // self.num_devices)
        return self.num_devices * per_device / self.shape.num_kv_heads


def attended(num_tokens: int, kv_len: int) -> int:
    """Sum over the last `num_tokens` of `kv_len` positions of how many positions each attends to (causal)."""
    return num_tokens * (kv_len - num_tokens) + num_tokens * (num_tokens + 1) // 2


def operator_groups(setting: Setting, rows: Iterable[Row]) -> list[OperatorGroup]:
    """FLOPs and bytes of one step over `rows`, of all devices together."""
    return _groups(setting.shape, setting.kv_dtype, setting.quantize, setting.kv_copies, list(rows))


def _groups(
    shape: ModelShape, kv_dtype: str, quantize: str | None, kv_copies: float, rows: list[Row]
) -> list[OperatorGroup]:
    num_tokens = sum(row.num_tokens for row in rows)
    num_samples = sum(row.samples for row in rows)
    weight_bytes = {
        group: shape.weights_bytes(group, quantize) for group in ("projections", "mlp", "embedding", "head")
    }
    head_params = shape.params("embedding" if shape.tied else "head")
    attended_pairs = shape.num_layers * sum(attended(row.num_tokens, row.kv_len) for row in rows)
    resident = shape.num_layers * sum(row.kv_len for row in rows)
    kv_item = kv_bytes_per_token_and_layer(shape.num_kv_heads, shape.head_dim, kv_dtype)
    written = num_tokens * shape.num_layers
    return [
        OperatorGroup(
            "projections", 2 * num_tokens * shape.params("projections"), weight_bytes["projections"], 0
        ),
        OperatorGroup(
            "attention",
            4
            * shape.num_q_heads
            * shape.head_dim
            * attended_pairs,  # q.k and p.v, a multiply and an add each
            0,
            round(kv_item * (resident + written) * kv_copies),
        ),
        OperatorGroup("mlp", 2 * num_tokens * shape.params("mlp"), weight_bytes["mlp"], 0),
        OperatorGroup(
            "head",
            2 * num_samples * head_params,
            weight_bytes["embedding" if shape.tied else "head"] if num_samples else 0,
            0,
        ),
        OperatorGroup(
            "embedding, norms",
            0,
            num_tokens * shape.embed_dim * ml_dtypes_itemsize(shape.dtype) + shape.weights_bytes("norms"),
            0,
        ),
    ]


def bound(setting: Setting, rows: Iterable[Row]) -> Bound:
    """The shortest time of one step over `rows`."""
    rows = list(rows)
    groups = operator_groups(setting, rows)
    flops, moved = sum(group.flops for group in groups), sum(group.bytes for group in groups)
    devices, hardware = setting.num_devices, setting.hardware
    return Bound(
        compute_s=flops / devices / hardware.peak(setting.shape.dtype),
        memory_s=moved / devices / hardware.memory_bandwidth,
        interconnect_s=interconnect_time(setting, sum(row.num_tokens for row in rows)),
        flops=flops,
        bytes=moved,
    )


def interconnect_time(setting: Setting, num_tokens: int) -> float:
    """Seconds of the two all-reduces per layer of tensor parallelism, each sending 2 (n - 1) / n of its array.

    The link between the two devices of one tpu7x chip is not published and counts as free on a single chip.
    """
    if setting.chips == 1 or setting.hardware.interconnect_bandwidth is None:
        return 0.0
    shape, n = setting.shape, setting.num_devices
    sent = (
        2
        * shape.num_layers
        * num_tokens
        * shape.embed_dim
        * ml_dtypes_itemsize(shape.dtype)
        * 2
        * (n - 1)
        / n
    )
    return sent / (setting.hardware.interconnect_bandwidth / 2)  # one direction


@dataclass(frozen=True)
class StepCost:
    """FLOPs and bytes that steps need at the least: the sums above, which are linear in what a step holds."""

    flops_per_token: int
    flops_per_sample: int  # the head
    flops_per_pair: int  # of a query token and a token that it attends to
    bytes_per_forward: int  # all weights but an embedding table that is not the head
    bytes_per_resident: int  # K and V of one token, read
    bytes_per_token: int  # K and V written, and the token's embedding

    def flops(self, work: Work) -> int:
        return (
            self.flops_per_token * work.num_tokens
            + self.flops_per_sample * work.num_samples
            + self.flops_per_pair * work.num_pairs
        )

    def bytes(self, work: Work) -> int:
        return (
            self.bytes_per_forward * work.num_forwards
            + self.bytes_per_resident * work.num_resident
            + self.bytes_per_token * work.num_tokens
        )


def step_cost(
    shape: ModelShape,
    kv_dtype: str,
    quantize: str | None = None,
    kv_copies: float = 1.0,
    bytes_per_forward: int | None = None,
) -> StepCost:
    """The coefficients for a model, as differences of the sums above, so that there is one set of formulas.

    bytes_per_forward: of weights in a form of their own; None takes the shape's, with `quantize`.
    """

    def sums(*rows: Row) -> tuple[int, int]:
        groups = _groups(shape, kv_dtype, quantize, kv_copies, list(rows))
        return sum(group.flops for group in groups), sum(group.bytes for group in groups)

    idle, idle_bytes = sums(Row(0, 0))  # the head of one row, and all weights
    _, resident_bytes = sums(Row(0, 1))
    base, base_bytes = sums(Row(0, 1, samples=False))
    token, token_bytes = sums(Row(1, 1, samples=False))
    per_pair = 4 * shape.num_layers * shape.num_q_heads * shape.head_dim
    return StepCost(
        flops_per_token=token - base - per_pair,
        flops_per_sample=idle,
        flops_per_pair=per_pair,
        bytes_per_forward=idle_bytes if bytes_per_forward is None else bytes_per_forward,
        bytes_per_resident=resident_bytes - idle_bytes,
        bytes_per_token=token_bytes - base_bytes,
    )


def decode_bound(setting: Setting, batch: int, context: int) -> Bound:
    """One decode step of `batch` rows with `context` resident tokens each."""
    return bound(setting, [Row(1, context)] * batch)


def prefill_time(setting: Setting, prompt: int, max_num_batched_tokens: int) -> float:
    """The shortest time from the start of a prompt's first chunk to its first token: a bound for TTFT."""
    total, done = 0.0, 0
    while done < prompt:
        chunk = min(max_num_batched_tokens, prompt - done)
        done += chunk
        total += bound(setting, [Row(chunk, done, samples=done == prompt)]).time_s
    return total


def compute_bound_batch(setting: Setting, context: int) -> int | None:
    """The smallest batch at which a decode step computes longer than it reads; None: at this context none does.

    What chips send each other adds to both and is left out.

    Both sides are linear in the batch: flops = batch x f, bytes = w + batch x k. Past the batch at which
    weights no longer matter, the K and V of each row cost memory time of their own.
    """
    one, two = (decode_bound(setting, batch, context) for batch in (1, 2))
    compute_slope = two.compute_s - one.compute_s
    memory_slope = two.memory_s - one.memory_s
    weights_s = one.memory_s - memory_slope
    if compute_slope <= memory_slope:
        return None
    batch = max(1, int(weights_s / (compute_slope - memory_slope)))
    while (step := decode_bound(setting, batch, context)).compute_s <= step.memory_s:
        batch += 1
    return batch


# Levers


@dataclass(frozen=True)
class Lever:
    name: str
    tpot_s: float
    tokens_per_second: float  # of all rows together
    kv_bytes_per_sequence: int
    note: str = ""


def levers(
    setting: Setting, batch: int, context: int, *, acceptance: float = 0.7, num_drafts: int = 4
) -> list[Lever]:
    """What each change alone would make of the decode bound; the first entry is the setting as it is.

    acceptance: the probability that a draft token is accepted; `num_drafts` are verified in each step, and
    making them costs nothing here (n-gram drafts). Tokens per step by Leviathan et al., 2023, equation 1.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance={acceptance} must be in [0, 1]")
    shape, hardware = setting.shape, setting.hardware

    def lever(name: str, changed: Setting, rows: int = batch, note: str = "") -> Lever:
        step = decode_bound(changed, rows, context).time_s
        kv = round(changed.shape.kv_bytes(changed.kv_dtype, context) * changed.kv_copies)
        return Lever(name, step, rows / step, kv, note)

    found = [lever("as it is", setting)]
    for bits in ("int8", "int4"):
        if setting.quantize != bits:
            found.append(lever(f"{bits} weights", replace(setting, quantize=bits)))
    for bits in ("int8", "int4"):
        if setting.kv_dtype != bits:
            found.append(lever(f"{bits} KV cache", replace(setting, kv_dtype=bits)))
    for factor in sorted({4, shape.num_q_heads}):
        heads = shape.num_q_heads // factor
        if shape.num_q_heads % factor == 0 and heads < shape.num_kv_heads:
            name = "MQA" if heads == 1 else "GQA"
            fewer = replace(setting, shape=shape.with_kv_heads(heads))
            found.append(
                lever(f"{name}, {heads} KV heads", fewer, note="another model: it has to be trained so")
            )
    for factor in (2, 4):
        found.append(lever(f"batch {batch * factor}", setting, batch * factor))
    tokens = sum(acceptance**i for i in range(num_drafts + 1))
    verify = bound(setting, [Row(num_drafts + 1, context)] * batch).time_s
    found.append(
        Lever(
            f"{num_drafts} drafts, {acceptance:.0%} accepted",
            verify / tokens,
            batch * tokens / verify,
            found[0].kv_bytes_per_sequence,
            f"{tokens:.2f} tokens per step; drafts cost nothing here",
        )
    )
    for factor in (2, 4):
        chips = setting.chips * factor
        if (
            hardware.interconnect_bandwidth is not None
            and chips * hardware.devices_per_chip <= shape.num_q_heads
        ):
            found.append(lever(f"{chips} chips", replace(setting, chips=chips)))
    return found


@dataclass(frozen=True)
class AttentionKind:
    name: str  # MHA | GQA | MQA, "(this model)" at its own
    num_kv_heads: int
    kv_bytes_per_token: int
    kv_bytes_per_sequence: int
    saving: float  # against MHA
    tpot_s: float  # decode bound


def compare_attention(
    setting: Setting, batch: int, context: int, gqa_heads: int | None = None
) -> list[AttentionKind]:
    """The model with as many KV heads as query heads (MHA), with groups (GQA) and with one (MQA).

    gqa_heads: KV heads of the middle one; None takes the model's own if it has groups, else a quarter.
    """
    shape = setting.shape
    if gqa_heads is None:
        own = 1 < shape.num_kv_heads < shape.num_q_heads
        gqa_heads = shape.num_kv_heads if own else max(1, shape.num_q_heads // 4)
    kinds = {"MHA": shape.num_q_heads, "GQA": gqa_heads, "MQA": 1}
    full = shape.with_kv_heads(shape.num_q_heads).kv_bytes(setting.kv_dtype, context)
    found = []
    for name, heads in kinds.items():
        changed = replace(setting, shape=shape.with_kv_heads(heads))
        total = changed.shape.kv_bytes(setting.kv_dtype, context)
        found.append(
            AttentionKind(
                name + (" (this model)" if heads == shape.num_kv_heads else ""),
                heads,
                changed.shape.kv_bytes_per_token(setting.kv_dtype),
                total,
                1 - total / full,
                decode_bound(changed, batch, context).time_s,
            )
        )
    return found


# End to end


@dataclass(frozen=True)
class EndToEnd:
    """Latency of one request of `num_tokens` output tokens."""

    ttft_s: float
    tpot_s: float
    num_tokens: int

    @property
    def total_s(self) -> float:
        """TTFT + (n - 1) x TPOT: the first token is there when the TTFT is over."""
        return self.ttft_s + (self.num_tokens - 1) * self.tpot_s

    @property
    def circulated_s(self) -> float:
        """TTFT + n / TPS, as texts in circulation add it: one TPOT too much."""
        return self.ttft_s + self.num_tokens * self.tpot_s

    @property
    def tokens_per_second(self) -> float:
        """In decode."""
        return 1 / self.tpot_s

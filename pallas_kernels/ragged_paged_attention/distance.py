"""Distance to the limit, on paper: what the kernels move and compute by their own schedules over the least possible.

    python -m jaxinfer.pallas_kernels.ragged_paged_attention.bench --distance

Llama-3-8B in bfloat16, at pages of PAGE_SIZE tokens, on one v6e by the TPU kernel and on one H200 by the GPU kernels.
Decode is one token of every row, prefill every row whole. Counted, not measured: speed is proven by nothing here.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels.ragged_paged_attention import gpu_costs, gpu_decode, gpu_prefill, tpu, tpu_costs

BATCHES = (1, 16, 64, 256)
CONTEXTS = (1024, 8192, 32768)  # mean tokens of a row
NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
PAGE_SIZE = {"v6e": 128, "h200": 16}
MAX_Q_LEN = 2048  # of the TPU kernel's prefill program; a longer row is what several calls of it compute


type Cost = tpu_costs.Cost | gpu_costs.Cost


class Distance(NamedTuple):
    """Ratios to the least possible, at least 1."""

    decode_bytes: float
    decode_flops: float
    prefill_bytes: float
    prefill_flops: float


def lengths(batch: int, context: int) -> list[int]:
    """Tokens of each row: U(0.5 context, 1.5 context), seed 0."""
    return [int(n) for n in np.random.default_rng(0).uniform(0.5 * context, 1.5 * context, batch)]


def distance(chip: str, batch: int, context: int) -> Distance:
    """Of a chip, a key of PAGE_SIZE."""
    kv_lens, ones = lengths(batch, context), [1] * batch
    page_size, group = PAGE_SIZE[chip], NUM_Q_HEADS // NUM_KV_HEADS
    pairs: list[tuple[Cost, Cost]]  # of decode and prefill: what the kernel needs, the least
    if chip == "v6e":
        q = jax.ShapeDtypeStruct((1, NUM_Q_HEADS, HEAD_DIM), jnp.bfloat16)
        kv_pages = jax.ShapeDtypeStruct((1, NUM_KV_HEADS, page_size, 2 * HEAD_DIM), jnp.bfloat16)
        decode = tpu.static_of(q, kv_pages, is_decode=True, max_q_len=1)
        prefill = tpu.static_of(q, kv_pages, is_decode=False, max_q_len=MAX_Q_LEN)
        pairs = [
            (tpu_costs.count(decode, ones, kv_lens), tpu_costs.least(decode, ones, kv_lens)),
            (tpu_costs.count(prefill, kv_lens, kv_lens), tpu_costs.least(prefill, kv_lens, kv_lens)),
        ]
    else:
        pages_per_row = -(-3 * context // 2 // page_size)
        shape = (NUM_KV_HEADS, group, HEAD_DIM, page_size)
        rows = gpu_decode.make_schedule(batch, pages_per_row, *shape, 1, 2, gpu_prefill.COMPUTE_CAPABILITY)
        tiles = gpu_prefill.make_schedule(sum(kv_lens), batch, *shape, 2)
        heads = (NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM)
        pairs = [
            (gpu_costs.decode(rows, ones, kv_lens), gpu_costs.least(*heads, ones, kv_lens)),
            (gpu_costs.prefill(tiles, kv_lens, kv_lens), gpu_costs.least(*heads, kv_lens, kv_lens)),
        ]
    return Distance(
        *(ratio for cost, least in pairs for ratio in (cost.bytes / least.bytes, cost.flops / least.flops))
    )


def table() -> str:
    """All of them, a line each, in Markdown."""
    lines = [
        "| chip | batch | mean context | decode bytes | decode FLOPs | prefill bytes | prefill FLOPs |",
        "|---|---|---|---|---|---|---|",
    ]
    for chip in PAGE_SIZE:
        for batch in BATCHES:
            for context in CONTEXTS:
                ratios = " | ".join(f"{ratio:.3f}" for ratio in distance(chip, batch, context))
                lines.append(f"| {chip} | {batch} | {context:,} | {ratios} |")
    return "\n".join(lines)

"""Block sizes by a rule from shapes, and what a chip's matrix unit takes.

The rules rest on counted bytes and FLOPs, not on measurements: nothing here has run on a TPU or a GPU yet. A device
kind whose measurements disagree gets a table here, before the rule.
"""

from typing import Any

import jax
from jax.experimental import pallas as pl

from jaxinfer.pallas_kernels.quantized_matmul import gpu_schedule, tpu_schedule
from jaxinfer.pallas_kernels.quantized_matmul.tpu_schedule import LANES

# Chips whose matrix unit has no int8 products, by jax's device_kind: Ironwood's has bfloat16 and float8. Its compiler
# takes an int8 product all the same and has to emulate it.
WITHOUT_INT8_PRODUCTS = ("TPU7x", "TPU v7x")
# Depth of the matrix unit in inputs, where it is not LANES.
MATRIX_DEPTH = {"TPU v6 lite": 256, "TPU7x": 256, "TPU v7x": 256}

TPU_FEW_ROWS = 64  # up to so many rows the sums are scaled: 4 groups of 32 make 256 rows of a chunk
TPU_WEIGHT_BYTES = (
    2 << 20
)  # of one block of weights: hides a copy's start, and its two buffers are 4 of 64 MiB
TPU_FEW_ROWS_BLOCK_F = 4096  # x is read again for so many outputs: 2 x 64 / 4096 of int8 weights' bytes
TPU_MANY_ROWS_BLOCK = (512, 512)  # rows and outputs of a block: 256 FLOPs for each byte of bfloat16 x
TPU_MANY_ROWS_BLOCK_D = 1024  # as many widened weights as vector memory holds beside the blocks

GPU_SMS = 132  # of an H100 or H200: one block on each
GPU_SMEM_BYTES = 220 * 1024  # of the 227 KiB that one block may have on Hopper; barriers take the rest
GPU_MAX_BLOCK_T = 128  # tokens: 64 accumulators per thread, beside as many widened weights
GPU_SUMS_SHARE = 16  # sums of splits, written and read again, may take 1 / 16 of the weights' bytes


def w8a8_products(device_kind: str) -> str:
    """The `w8a8` of quantized_matmul for a chip, by jax's device_kind: "int8", or "bfloat16" where it has no such."""
    return "bfloat16" if device_kind in WITHOUT_INT8_PRODUCTS else "int8"


def tpu_blocks(
    num_tokens: int,
    out_dim: int,
    in_dim: int,
    group: int,
    x_dtype: Any,
    weight_dtype: Any,
    device_kind: str | None = None,
) -> tpu_schedule.Blocks:
    """Blocks of the TPU kernel. group is D where there is one scale per output."""
    few = num_tokens <= TPU_FEW_ROWS
    sublanes = 8 * 32 // jax.dtypes.itemsize_bits(x_dtype)  # a tile of x
    max_t, max_f = (TPU_FEW_ROWS, TPU_FEW_ROWS_BLOCK_F) if few else TPU_MANY_ROWS_BLOCK
    block_t = min(pl.cdiv(num_tokens, sublanes) * sublanes, max_t)
    block_f = pl.cdiv(pl.cdiv(out_dim, pl.cdiv(out_dim, max_f)), LANES) * LANES  # even parts of F
    tile_f = next(size for size in (512, 384, 256, LANES) if block_f % size == 0)
    # Whole lanes; of scales, which lie in sublanes, whole tiles. All of D is always whole.
    step_d = LANES if group == in_dim else 8 * group
    max_d = TPU_MANY_ROWS_BLOCK_D
    if few:
        max_d = max(TPU_WEIGHT_BYTES * 8 // (block_f * jax.dtypes.itemsize_bits(weight_dtype)), step_d)
    block_d = max((size for size in range(step_d, max_d + 1, step_d) if in_dim % size == 0), default=in_dim)
    return tpu_schedule.Blocks(block_t, block_f, block_d, tile_f, MATRIX_DEPTH.get(device_kind or "", LANES))


def gpu_blocks(
    num_tokens: int, out_dim: int, in_dim: int, x_dtype: Any, weight_dtype: Any
) -> gpu_schedule.Blocks:
    """Blocks of the GPU kernel."""
    weight_bits, x_bits = jax.dtypes.itemsize_bits(weight_dtype), jax.dtypes.itemsize_bits(x_dtype)
    block_d = gpu_schedule.CHUNK * 8 // weight_bits
    block_t = 8
    while block_t < min(num_tokens, GPU_MAX_BLOCK_T):
        block_t *= 2
    stage_bytes = block_d * (gpu_schedule.BLOCK_F * weight_bits + block_t * x_bits) // 8
    sum_bytes = gpu_schedule.BLOCK_F * block_t * 4  # of a tile that leaves
    num_stages = min((GPU_SMEM_BYTES - sum_bytes) // stage_bytes, 8)
    steps_t, steps_d = pl.cdiv(num_tokens, block_t), pl.cdiv(in_dim, block_d)
    tiles = steps_t * pl.cdiv(out_dim, gpu_schedule.BLOCK_F)
    # A split writes, and the pass that adds them reads, 8 bytes per token and output.
    most_splits = in_dim * weight_bits // 8 // GPU_SUMS_SHARE // (8 * num_tokens)
    num_splits = max(min(GPU_SMS // tiles, most_splits, steps_d), 1)
    num_splits = pl.cdiv(steps_d, pl.cdiv(steps_d, num_splits))  # those that get a step
    return gpu_schedule.Blocks(block_t, block_d, num_stages, num_splits)

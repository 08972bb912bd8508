"""Pallas Mosaic GPU, compute capability 8.0 and newer: rows of K|V go to their slots, in place.

Padded tokens (null page) are not written at all. Quantizing, and the scales (one f32 per head and token), are plain JAX
before and beside the kernel: they touch T rows.

Block schedule from 9.0 on: one block per BLOCK_T tokens. One TMA load brings their rows to shared memory, then each
live token leaves in one store of [K, 2H] (one short run per head) to its slot. On 8.x: one block per token, whose
threads load the row into registers and store it.
"""

import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels import mosaic_gpu
from jaxinfer.pallas_kernels.kv_append.reference import quantize
from jaxinfer.pallas_kernels.mosaic_gpu import MAX_TMA_BOX, TMA_ALIGNMENT

# Tokens per block. Eight rows of 4 KiB (Llama-3-8B, bf16) are in flight; 256 decode rows make 32 blocks.
BLOCK_T = 8
FIRST_CAPABILITY = (8, 0)
WARPGROUP = 128  # threads
VECTOR_BYTES = 8  # that one thread moves at once
ELSE = "use implementation='xla' or 'gpu_xla'"


def kv_append(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, K, page_size, 2H]
    kv_scales: jax.Array | None,  # f32[num_pages, K, 2, page_size]
    slot_mapping: jax.Array,  # i32[T]
    *,
    compute_capability: tuple[int, int],
) -> tuple[jax.Array, jax.Array | None]:
    """See the package's docstring. compute_capability is that of the GPU that the program is compiled for.

    Raises:
        NotImplementedError: `refusal` has a reason.
    """
    reason = refusal(kv_pages, compute_capability)
    if reason is not None:
        raise NotImplementedError(f"kv_append implementation 'gpu': {reason}")
    page_size = kv_pages.shape[2]
    if kv_scales is None:
        rows = jnp.concatenate([k, v], axis=-1).astype(kv_pages.dtype)  # [T, K, 2H]
    else:
        k, k_scales = quantize(k, kv_pages.dtype)  # [T, K, H], f32[T, K]
        v, v_scales = quantize(v, kv_pages.dtype)
        rows = jnp.concatenate([k, v], axis=-1)
        pages, offsets = jnp.divmod(slot_mapping, page_size)
        kv_scales = kv_scales.at[pages, :, :, offsets].set(jnp.stack([k_scales, v_scales], axis=-1))
    by_tma = compute_capability >= mosaic_gpu.FIRST_WITH_TMA
    write = _write_by_tma if by_tma else _write_by_threads
    return write(rows, kv_pages, slot_mapping), kv_scales


def refusal(kv_pages: jax.Array, compute_capability: tuple[int, int]) -> str | None:
    """Why this combination has no GPU kernel and what would work, or None."""
    _, num_kv_heads, _, width = kv_pages.shape
    if compute_capability < FIRST_CAPABILITY:
        return "compute capability {}.{} is older than 8.0: {}".format(*compute_capability, ELSE)
    if kv_pages.dtype == jnp.int4:
        return f"int4 pages have no kernel: use int8 or float8_e4m3fn pages, or {ELSE}"
    if compute_capability < mosaic_gpu.FIRST_WITH_TMA and num_kv_heads * width % WARPGROUP:
        return (
            f"{num_kv_heads} kv heads of head_dim {width // 2} are no equal parts for {WARPGROUP} threads, as which"
            " compute capability {}.{} stores them: {}".format(*compute_capability, ELSE)
        )
    return None


@jax.jit
def _write_by_threads(rows: jax.Array, kv_pages: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """As _write_by_tma."""
    num_tokens, num_kv_heads, width = rows.shape
    page_size = kv_pages.shape[2]
    if num_tokens == 0:
        return kv_pages
    vec_size = math.gcd(num_kv_heads * width // WARPGROUP, VECTOR_BYTES // rows.dtype.itemsize)
    layout = plgpu.Layout.WG_STRIDED((num_kv_heads, width), vec_size=vec_size)

    def kv_append_token(rows_ref, slot_ref, pages_ref):
        token = lax.axis_index("token")
        slot = slot_ref[token]

        @pl.when(slot >= page_size)
        def _store():
            page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
            row = plgpu.load(rows_ref.at[token], layout=layout)
            mosaic_gpu.store(pages_ref.at[page, :, offset], row)

    pages_ref = jax.new_ref(kv_pages)
    mosaic_gpu.kernel(
        kv_append_token,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * rows.nbytes),
        grid=(num_tokens,),
        grid_names=("token",),
    )(rows, slot_mapping, pages_ref)
    return jax.freeze(pages_ref)


@jax.jit
def _write_by_tma(rows: jax.Array, kv_pages: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Puts rows[t] [K, 2H] into slot slot_mapping[t] of kv_pages, in place when kv_pages is donated."""
    num_tokens, num_kv_heads, width = rows.shape
    page_size = kv_pages.shape[2]
    if num_tokens == 0:
        return kv_pages
    # Each row must begin on TMA_ALIGNMENT in shared memory: one head too many is loaded where it would not.
    row_heads = num_kv_heads
    while row_heads * width * rows.dtype.itemsize % TMA_ALIGNMENT:
        row_heads += 1
    rows = jnp.pad(rows, ((0, 0), (0, row_heads - num_kv_heads), (0, 0)))
    boxes = [(start, min(MAX_TMA_BOX, width - start)) for start in range(0, width, MAX_TMA_BOX)]  # of lanes

    def kv_append_block(rows_ref, slot_ref, pages_ref, *scratch):
        *box_smem, barrier = scratch  # one [BLOCK_T, row_heads, size] buffer per box
        first = lax.axis_index("block") * BLOCK_T
        for (start, size), smem in zip(boxes, box_smem, strict=True):
            plgpu.copy_gmem_to_smem(rows_ref.at[pl.ds(first, BLOCK_T), :, pl.ds(start, size)], smem, barrier)
        plgpu.barrier_wait(barrier)
        for i in range(BLOCK_T):
            token = first + i
            slot = slot_ref[jnp.minimum(token, num_tokens - 1)]

            @pl.when((token < num_tokens) & (slot >= page_size))
            def _store(i=i, slot=slot):
                page, offset = lax.div(slot, page_size), lax.rem(slot, page_size)
                for (start, size), smem in zip(boxes, box_smem, strict=True):
                    plgpu.copy_smem_to_gmem(
                        smem.at[i, pl.ds(0, num_kv_heads)],
                        pages_ref.at[page, :, offset, pl.ds(start, size)],
                        commit_group=False,
                    )

        plgpu.commit_smem_to_gmem_group()
        plgpu.wait_smem_to_gmem(0)

    pages_ref = jax.new_ref(kv_pages)
    mosaic_gpu.kernel(
        kv_append_block,
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * rows.nbytes),
        grid=(pl.cdiv(num_tokens, BLOCK_T),),
        grid_names=("block",),
        scratch_types=[
            *(plgpu.SMEM((BLOCK_T, row_heads, size), rows.dtype) for _, size in boxes),
            plgpu.Barrier(num_arrivals=len(boxes)),
        ],
    )(rows, slot_mapping, pages_ref)
    return jax.freeze(pages_ref)

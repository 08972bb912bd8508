"""Memory that a step needs beside weights, cache and row state: read from a compiled program, or estimated."""

from typing import TYPE_CHECKING, Any

from jaxinfer.kv_cache import ml_dtypes_itemsize
from jaxinfer.pallas_kernels.ragged_paged_attention import xla
from jaxinfer.programs.buckets import Buckets, Program
from jaxinfer.tools.planner.shape import ModelShape

if TYPE_CHECKING:
    from jaxinfer.options.resolve import Resolved


def estimate(shape: ModelShape, *, num_tokens: int, num_rows: int, platform: str) -> int:
    """Bytes of the arrays of one step that are alive together, by hand: an estimate, see docs/planner.md.

    Either a layer's MLP (its input, gate and up) or its attention (q, k, v, and the output in float32) for all
    tokens, or the float32 logits with their copy for sampling, is the largest. XLA:CPU also copies the matrix
    of a product into another layout, and attention copies pages, a chunk of them at a time.

    Args:
      num_tokens, num_rows: of the largest step.
      platform: cpu | gpu | tpu.
    """
    item = ml_dtypes_itemsize(shape.dtype)
    mlp_dim = max((leaf.num_outputs for leaf in shape.leaves if leaf.group == "mlp"), default=0)
    heads = shape.num_q_heads * shape.head_dim
    kv_heads = 2 * shape.num_kv_heads * shape.head_dim
    stream = 2 * num_tokens * shape.embed_dim * item
    mlp = 2 * num_tokens * mlp_dim * item
    attention = num_tokens * (2 * heads * item + kv_heads * item + heads * 4)
    logits = 2 * num_rows * shape.vocab_size * 4
    copied = 0
    if platform == "cpu":
        copied = max(leaf.nbytes for leaf in shape.leaves if leaf.group in ("projections", "mlp"))
        attention += min(xla.CHUNK_TOKENS, xla.ROW_TOKENS * num_rows) * kv_heads * item
    return stream + copied + max(mlp, attention, logits)


def compiled(resolved: "Resolved") -> int:
    """Bytes of temporaries of the engine's largest programs, compiled here from shapes alone.

    Nothing of the model's size is allocated; compiling takes seconds to minutes.
    """
    programs, needed = resolved.compiler(), 0
    for program in _largest(resolved.buckets):
        executable: Any = programs.get(program)
        needed = max(needed, executable.memory_analysis().temp_size_in_bytes)
    return needed


def _largest(buckets: Buckets) -> list[Program]:
    """The prefill and the decode programs of most tokens and rows."""
    programs = buckets.programs()
    prefill = max((p for p in programs if p.kind == "prefill"), key=lambda p: (p.num_tokens, p.num_rows))
    decode = max((p for p in programs if p.kind == "decode"), key=lambda p: (p.num_rows, p.num_steps))
    return [prefill, decode]

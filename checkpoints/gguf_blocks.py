"""The blocks of GGUF's Q4_0, Q4_1 and Q8_0 as arrays: 32 codes with a scale, and for Q4_1 an offset.

Format: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h (block_q4_0, block_q4_1, block_q8_0). All rows
of a tensor at once; the `gguf` package takes them 16 at a time, which was half of the time of a start.
"""

from dataclasses import dataclass, replace
from typing import Any

import gguf
import jax
import numpy as np

from jaxinfer.checkpoints.files import CheckpointError

BLOCK = 32
HALF = BLOCK // 2

_TYPES = gguf.GGMLQuantizationType
# type -> shape of one block's codes, their dtype, whether there are offsets
FORMS = {
    _TYPES.Q4_0: (HALF, np.dtype(np.uint8), True),
    _TYPES.Q4_1: (HALF, np.dtype(np.uint8), True),
    _TYPES.Q8_0: (BLOCK, np.dtype(np.int8), False),
}
Q4_0_ZERO = 8  # the code of the value 0


@dataclass(frozen=True)
class Blocks:
    """A matrix of [rows, 32 G], value = scale * code + offset.

    codes: int8 [rows, G, 32]; or uint8 [rows, G, 16], the codes of inputs i and i + 16 in the low and high half of
    a byte. scale: float16 [rows, G]. offset: float16 [rows, G], or None.
    """

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None
    zero: int = 0  # the code of the value 0, where offset is -zero * scale

    def values(self) -> np.ndarray:
        """float32 [rows, 32 G], bit for bit what the `gguf` package makes of it (`zero` off before scaling)."""
        rows, groups = self.scale.shape
        scale = self.scale.astype(np.float32)[..., None]
        values: np.ndarray = np.empty((rows, groups, BLOCK), np.float32)
        if self.codes.dtype == np.int8:
            values[...] = self.codes
        else:
            values[..., :HALF] = self.codes & 0x0F
            values[..., HALF:] = self.codes >> 4
        if self.zero:
            values -= self.zero
        values *= scale
        if self.offset is not None and not self.zero:
            values += self.offset.astype(np.float32)[..., None]
        return values.reshape(rows, groups * BLOCK)

    def take(self, rows: np.ndarray) -> "Blocks":
        """The blocks of these rows, in their order."""
        offset = None if self.offset is None else self.offset[rows]
        return replace(self, codes=self.codes[rows], scale=self.scale[rows], offset=offset)

    def part(self, start: int, stop: int) -> "Blocks":
        """These rows, or the shapes of these rows."""
        codes, scale, offset = (_rows(a, start, stop) for a in (self.codes, self.scale, self.offset))
        return replace(self, codes=codes, scale=scale, offset=offset)


def _rows(array: Any, start: int, stop: int) -> Any:
    """Rows of an array, or of a `jax.ShapeDtypeStruct`."""
    if isinstance(array, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((stop - start, *array.shape[1:]), array.dtype)
    return None if array is None else array[start:stop]


def shapes(shape: tuple[int, int], kind: gguf.GGMLQuantizationType) -> Blocks:
    """Blocks of a tensor of this shape with a `jax.ShapeDtypeStruct` for each array."""
    width, dtype, has_offset = FORMS[kind]
    groups = shape[0], shape[1] // BLOCK
    scale: Any = jax.ShapeDtypeStruct(groups, np.float16)
    codes: Any = jax.ShapeDtypeStruct((*groups, width), dtype)
    return Blocks(codes, scale, scale if has_offset else None)


def split(raw: np.ndarray, kind: gguf.GGMLQuantizationType) -> Blocks:
    """The blocks in bytes uint8 [rows, bytes per row] of a tensor of one of FORMS."""
    size = gguf.GGML_QUANT_SIZES[kind][1]
    blocks = raw.reshape(raw.shape[0], -1, size)  # [rows, G, bytes]
    head = 4 if kind == _TYPES.Q4_1 else 2
    floats: np.ndarray = np.ascontiguousarray(blocks[..., :head]).view(np.float16)  # [rows, G, 1 or 2]
    codes: np.ndarray = np.ascontiguousarray(blocks[..., head:])
    scale: np.ndarray = floats[..., 0]
    offset: np.ndarray | None = None
    if kind == _TYPES.Q8_0:
        codes = codes.view(np.int8)
    elif kind == _TYPES.Q4_1:
        offset = floats[..., 1]
    else:  # exact: a product by a power of two
        offset = scale * np.float16(-Q4_0_ZERO)
        if not np.isfinite(offset).all():
            raise CheckpointError(
                f"a block of {kind.name} has a scale of {np.abs(scale).max()}, and more than 8188 is not supported"
            )
    return Blocks(codes, scale, offset, Q4_0_ZERO if kind == _TYPES.Q4_0 else 0)

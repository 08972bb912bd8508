"""Products of few rows with blocks of codes, against numpy in float64; the codes and values are drawn here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.pallas_kernels.quantized_matmul import cpu_blocks, quantized_matmul
from jaxinfer.pallas_kernels.quantized_matmul.cpu_blocks import MAX_ROWS, BlockedMatrix

GROUPS, OUTPUTS = 3, 40  # 96 inputs; outputs in tiles of 8


def drawn(bits, has_offset, rng, outputs=OUTPUTS):
    low, high = (0, 16) if bits == 4 else (-128, 128)
    codes = rng.integers(low, high, (outputs, GROUPS, 32))
    scale = rng.normal(size=(outputs, GROUPS)).astype(np.float16)
    offset = rng.normal(size=(outputs, GROUPS)).astype(np.float16) if has_offset else None
    stored = codes.astype(np.int8)
    if bits == 4:
        stored = (codes[..., :16] | codes[..., 16:] << 4).astype(np.uint8)
    value = codes * scale.astype(np.float64)[..., None]
    if offset is not None:
        value = value + offset.astype(np.float64)[..., None]
    tiles = cpu_blocks.in_tiles(jnp.asarray(stored))
    return (
        value.reshape(outputs, -1),
        tiles,
        jnp.asarray(scale.T),
        None if offset is None else jnp.asarray(offset.T),
    )


def error_bound(x, value, scale, offset, bits):
    """Of float32 sums of D terms and their products, in any order: (D + 8) eps over the absolute values."""
    largest = 15 if bits == 4 else 128
    terms = np.abs(x).reshape(len(x), GROUPS, 32).sum(-1) @ (largest * np.abs(np.asarray(scale, np.float64)))
    if offset is not None:
        terms = terms + np.abs(x).reshape(len(x), GROUPS, 32).sum(-1) @ np.abs(np.asarray(offset, np.float64))
    return (x.shape[1] + 8) * np.finfo(np.float32).eps * terms


@pytest.mark.parametrize("num_tokens", [1, 2, 4])
@pytest.mark.parametrize(("bits", "has_offset"), [(4, True), (4, False), (8, False), (8, True)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_exact_and_sums_are_float32(bits, has_offset, num_tokens, dtype):
    # Bugs: halves of a byte swapped, a block's scale on its neighbour, an offset once per token and not per sum.
    rng = np.random.default_rng(num_tokens)
    value, tiles, scale, offset = drawn(bits, has_offset, rng)
    x = jnp.asarray(rng.normal(size=(num_tokens, 32 * GROUPS)), dtype)
    found = jax.jit(cpu_blocks.few_rows_matmul)(x, tiles, scale, offset)
    exact = np.asarray(x, np.float64)
    assert found.dtype == jnp.float32 and found.shape == (num_tokens, OUTPUTS)
    error = np.abs(np.asarray(found, np.float64) - exact @ value.T)
    assert (error <= error_bound(exact, value, scale, offset, bits)).all()


def test_each_code_and_input_counts_once():
    # One input at a time picks one column: every code of every tile stands where it belongs.
    value, tiles, scale, offset = drawn(4, True, np.random.default_rng(0))
    for i in range(32 * GROUPS):
        x = np.zeros((1, 32 * GROUPS), np.float32)
        x[0, i] = 2.0
        found = cpu_blocks.few_rows_matmul(jnp.asarray(x), tiles, scale, offset)
        np.testing.assert_allclose(found[0], 2.0 * value[:, i], rtol=1e-6, atol=1e-6 * np.abs(value).max())


def test_weights_stay_packed_inside_a_loop():
    # Bug: XLA takes the widening out of a loop over steps and keeps the whole matrix in float32.
    _, tiles, scale, _ = drawn(8, False, np.random.default_rng(0))
    x = jnp.ones((1, 32 * GROUPS))

    def steps(x, tiles, scale):
        def body(x, _):
            out = cpu_blocks.few_rows_matmul(x, tiles, scale)
            return x + out.sum(), None

        return jax.lax.scan(body, x, length=8)[0]

    compiled = jax.jit(steps).lower(x, tiles, scale).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tiles.size * 4


def test_a_widened_matrix_is_never_in_memory():
    # Bug: XLA:CPU gives the sum over a block to its kernels (up to eight axes), and widens all codes to memory first.
    _, tiles, scale, offset = drawn(4, True, np.random.default_rng(0), outputs=4096)
    compiled = (
        jax.jit(cpu_blocks.few_rows_matmul).lower(jnp.ones((1, 32 * GROUPS)), tiles, scale, offset).compile()
    )
    assert (
        compiled.memory_analysis().temp_size_in_bytes < 2 * 4 * GROUPS * 4096
    )  # one float32 per block and output


@pytest.mark.parametrize("outputs", [1, 24, 64, 96])
def test_any_number_of_outputs_falls_into_tiles(outputs):
    value, tiles, scale, offset = drawn(4, True, np.random.default_rng(outputs), outputs)
    x = np.random.default_rng(0).normal(size=(1, 32 * GROUPS)).astype(np.float32)
    found = cpu_blocks.few_rows_matmul(jnp.asarray(x), tiles, scale, offset)
    np.testing.assert_allclose(found, x.astype(np.float64) @ value.T, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("tiles", "x", "says"),
    [
        (jnp.zeros((2, 1, 32, 8), jnp.uint8), (1, 64), "tiles are uint8"),
        (jnp.zeros((2, 1, 16, 8), jnp.int8), (1, 64), "tiles are int8"),
        (jnp.zeros((2, 1, 32, 8), jnp.int8), (1, 96), "x is"),
        (jnp.zeros((3, 1, 32, 8), jnp.int8), (1, 96), "scale is"),
    ],
)
def test_what_does_not_fit_is_refused(tiles, x, says):
    with pytest.raises(ValueError, match=says):
        cpu_blocks.few_rows_matmul(jnp.zeros(x), tiles, jnp.zeros((2, 8), jnp.float16))


@pytest.mark.parametrize("num_tokens", [1, MAX_ROWS, MAX_ROWS + 1])
def test_few_rows_read_the_codes_and_many_the_matrix(num_tokens):
    """The matrix beside the codes is another one here: a result says which of them was read."""
    value, tiles, scale, offset = drawn(4, True, np.random.default_rng(0))
    other = np.random.default_rng(1).normal(size=value.shape)
    blocked = BlockedMatrix(jnp.asarray(other, jnp.float32), tiles)
    x = np.random.default_rng(2).normal(size=(num_tokens, value.shape[1])).astype(np.float32)
    got = quantized_matmul(jnp.asarray(x), blocked, scale, offset, implementation="cpu")
    want = x.astype(np.float64) @ (other if num_tokens > MAX_ROWS else value).T
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"implementation": "xla"}, "implementation 'cpu' multiplies"),
        ({"w8a8": "int8"}, "with w8a8=None"),
        ({"x": jnp.zeros((2, 64))}, r"must be \[T, 96\]"),
    ],
)
def test_a_blocked_matrix_outside_the_contract_is_refused(change, says):
    value, tiles, scale, offset = drawn(4, True, np.random.default_rng(0))
    good = {"x": jnp.zeros((2, 96)), "scale": scale, "offset": offset, "implementation": "cpu"}
    with pytest.raises(ValueError, match=says):
        quantized_matmul(**(good | change), qvalue=BlockedMatrix(jnp.asarray(value), tiles))
    with pytest.raises(ValueError, match="another number of values"):
        quantized_matmul(**good, qvalue=BlockedMatrix(jnp.asarray(value[1:]), tiles))

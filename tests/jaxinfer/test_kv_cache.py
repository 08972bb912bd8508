"""The paged cache: sizes, slots, moving pages, and donation that really happens."""

import itertools
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer import kv_cache as kv
from jaxinfer.pallas_kernels import cpu_pages

SPEC = kv.KVCacheSpec(num_layers=2, num_kv_heads=3, head_dim=8, page_size=4, num_pages=6)


IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "cpu"])


def filled(spec, seed):
    rng = np.random.default_rng(seed)
    arrays = 1 if spec.one_array else spec.num_layers
    pages = tuple(jnp.asarray(rng.normal(size=spec.page_shape), jnp.float32) for _ in range(arrays))
    return kv.KVCache(pages=pages, scales=None, spec=spec)


def by_layer(cache):
    """The pages of each layer, [num_pages, ...]."""
    return np.concatenate(cache.pages).reshape(cache.spec.num_layers, -1, *cache.spec.page_shape[1:])


def test_bytes_are_those_of_the_arrays():
    for dtype, implementation in itertools.product(("float32", "bfloat16"), ("xla", "cpu")):
        spec = kv.KVCacheSpec(2, 3, 8, 4, 6, dtype, implementation)
        assert spec.total_bytes == sum(page.nbytes for page in kv.init(spec).pages)
        assert spec.num_usable_tokens == 20  # the null page holds none


RESIDENT_PAGES = """
import os
from functools import partial
from pathlib import Path
import jax
from jaxinfer import kv_cache as kv

def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

spec = kv.KVCacheSpec(2, num_kv_heads=4, head_dim=64, page_size=64, num_pages=1024, implementation="cpu")
init = jax.jit(partial(kv.init, spec))
write = jax.jit(lambda cache: cache.replace(pages=tuple(page.at[...].set(1) for page in cache.pages)))
before = resident_bytes()
cache = jax.block_until_ready(init())
made = resident_bytes() - before
written = jax.block_until_ready(write(cache))
print(sum(page.nbytes for page in cache.pages), spec.total_bytes, made, resident_bytes() - before)
assert all((page == 1).all() for page in written.pages)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="the system does not tell resident memory")
def test_pages_of_the_cpus_kernels_become_resident_as_they_are_written():
    # In a process of its own: one that ran other tests has freed memory at hand, which is resident already.
    run = subprocess.run([sys.executable, "-c", RESIDENT_PAGES], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    array_bytes, spec_bytes, made, written = map(int, run.stdout.split())
    assert array_bytes == spec_bytes == 256 << 20
    assert made < 64 << 20
    assert written > 256 << 20


def test_describe_says_pages_tokens_and_bytes():
    assert SPEC.describe() == "5 pages x 4 tokens = 20 tokens, 0.0 MiB of float32"


@pytest.mark.parametrize("field", ["num_layers", "num_kv_heads", "head_dim", "page_size"])
def test_sizes_below_one_are_refused_by_name(field):
    with pytest.raises(ValueError, match=f"{field}=0"):
        kv.KVCacheSpec(**{**SPEC.__dict__, field: 0})


def test_a_pool_beyond_32_bit_slots_is_refused():
    with pytest.raises(ValueError, match="32-bit"):
        kv.KVCacheSpec(1, 1, 8, page_size=2**16, num_pages=2**15)


def test_slots_equal_page_times_size_plus_offset():
    table = np.array([[5, 2, 0], [3, 0, 0]])
    rows, indices = np.array([0, 0, 0, 1]), np.array([0, 3, 4, 2])
    assert kv.slot_mapping(table, rows, indices, 4).tolist() == [20, 23, 8, 14]


@IMPLEMENTATIONS
def test_gather_returns_tokens_in_order(implementation):
    plain = filled(SPEC, 0)
    pages = np.asarray(plain.pages[1])
    cache = plain
    if implementation == "cpu":
        laid_out = jnp.concatenate([cpu_pages.from_contract(page) for page in plain.pages])
        cache = kv.KVCache((laid_out,), None, replace(SPEC, implementation="cpu"))
    assert all(page.shape == cache.spec.page_shape for page in cache.pages)
    k, v = kv.gather(cache, 1, jnp.array([4, 2, 0]), 6)
    for token in range(6):
        expected = pages[[4, 2][token // 4], :, token % 4]
        np.testing.assert_array_equal(k[token], expected[:, :8])
        np.testing.assert_array_equal(v[token], expected[:, 8:])


@IMPLEMENTATIONS
def test_copy_pages_moves_only_the_targets(implementation):
    cache = filled(replace(SPEC, implementation=implementation), 1)
    copied = kv.copy_pages(cache, jnp.array([1, 3, 0]), jnp.array([2, 5, 0]))
    for before, after in zip(by_layer(cache), by_layer(copied), strict=True):
        expected = np.array(before)
        expected[2], expected[5] = expected[1], expected[3]
        np.testing.assert_array_equal(after, expected)


@IMPLEMENTATIONS
def test_exported_pages_arrive_in_another_cache(implementation):
    source, target = (filled(replace(SPEC, implementation=implementation), seed) for seed in (2, 3))
    moved = kv.import_pages(target, kv.export_pages(source, jnp.array([4, 1])), jnp.array([2, 3]))
    for a, b, before in zip(by_layer(moved), by_layer(source), by_layer(target), strict=True):
        np.testing.assert_array_equal(a[2], b[4])
        np.testing.assert_array_equal(a[3], b[1])
        np.testing.assert_array_equal(a[1], before[1])


def test_import_from_another_shape_of_cache_is_refused():
    other = kv.KVCacheSpec(2, 3, 16, 4, 6)
    with pytest.raises(ValueError, match="cannot be imported"):
        kv.import_pages(
            filled(SPEC, 0), kv.export_pages(filled(other, 0), jnp.array([1, 2])), jnp.array([1, 2])
        )


def test_a_donated_cache_is_updated_in_place():
    cache = filled(SPEC, 4)
    run = jax.jit(kv.copy_pages, donate_argnums=0)
    compiled = run.lower(cache, jnp.array([1]), jnp.array([2])).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= SPEC.total_bytes
    assert analysis.temp_size_in_bytes < SPEC.total_bytes / 2
    run(cache, jnp.array([1]), jnp.array([2]))
    assert all(page.is_deleted() for page in cache.pages)

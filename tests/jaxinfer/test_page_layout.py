"""Pages whose layout has to be said: who needs it, and that the engine's programs keep what was said.

That the TPU's compiler then copies no pool is scripts/aot_kernels.py's part.
"""

from dataclasses import replace

import engines
import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jaxinfer import kv_cache as kv


@pytest.mark.parametrize("implementation", ["reference", "xla", "cpu", "gpu"])
def test_only_tpu_kernels_need_a_layout(implementation):
    spec = kv.KVCacheSpec(1, 8, 80, 128, 4, "bfloat16", implementation)
    assert kv.page_format(spec) is None


@pytest.mark.parametrize(
    ("head_dim", "asks"), [(64, False), (80, True), (96, True), (128, False), (192, False)]
)
def test_lanes_of_whole_registers_need_none(head_dim, asks):
    """2H of 128, 256, 384 lanes are whole registers of 128; 160 and 192 are not."""
    found = kv.page_format(kv.KVCacheSpec(1, 8, head_dim, 128, 4, "bfloat16", "tpu"))
    assert (found is not None) == asks
    if found is not None:
        assert found.layout.major_to_minor == (0, 1, 2, 3)


@pytest.mark.parametrize(("head_dim", "lanes"), [(64, 128), (80, 256), (96, 256), (128, 256)])
def test_bytes_for_tpu_kernels_are_those_of_whole_registers(head_dim, lanes):
    """As the TPU's compiler counts them: a pool of 512 pages of H 80 takes 536,870,912 bytes, not 335,544,320."""
    sizes = {"num_layers": 2, "num_kv_heads": 8, "page_size": 128, "num_pages": 512, "dtype": "bfloat16"}
    tpu, xla = (kv.KVCacheSpec(head_dim=head_dim, implementation=name, **sizes) for name in ("tpu", "xla"))
    assert tpu.total_bytes == 2 * 8 * 128 * 512 * lanes * 2
    assert xla.total_bytes == 2 * 8 * 128 * 512 * 2 * head_dim * 2


def test_every_program_keeps_the_layout_and_the_buffer(monkeypatch):
    """With one that no compiler takes by itself, after prefills, decodes of several steps, and page copies."""

    def transposed(spec, sharding=None):
        return Format(Layout((0, 1, 2, 4, 3)), sharding or SingleDeviceSharding(jax.devices()[0]))

    plain = engines.make_engine("llama_gqa")
    monkeypatch.setattr(kv, "page_format", transposed)
    engine = engines.make_engine("llama_gqa", buckets=replace(engines.BUCKETS))  # with programs of its own
    ids = list(range(3, 3 + 2 * engines.PAGE_SIZE))
    requests = [(ids, engines.greedy_params(9)), (ids[:5], engines.greedy_params(6))]
    pointers = {page.unsafe_buffer_pointer() for page in engine._cache.pages}
    outputs = engines.generate(engine, *requests)
    nowhere = (np.zeros(16, np.int32),)  # the null page over itself, of the one KV group
    engine._cache = engine.programs.helper(kv.copy_pages)(engine._cache, nowhere, nowhere)
    kinds = {(program.kind, program.num_steps) for program in engine.programs.compiled()}
    assert {("prefill", 1), ("decode", engines.STEPS)} <= kinds
    for page in engine._cache.pages:
        assert page.format.layout.major_to_minor == (0, 1, 2, 4, 3)
        assert page.unsafe_buffer_pointer() in pointers
    assert outputs == engines.generate(plain, *requests)

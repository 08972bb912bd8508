"""FLOPs, bytes and bounds, against counts made another way."""

import dataclasses

import numpy as np
import pytest
from planner_shapes import tiny_shape
from tiny_models import make_tiny

from jaxinfer.tools.planner import hardware, roofline
from jaxinfer.tools.planner.roofline import EndToEnd, Row, Setting

H100 = hardware.load("h100")


@pytest.mark.parametrize(("num_tokens", "kv_len"), [(0, 0), (1, 1), (1, 9), (4, 4), (4, 9), (9, 9)])
def test_attended_pairs_are_those_of_the_mask(num_tokens, kv_len):
    query, key = np.arange(kv_len - num_tokens, kv_len)[:, None], np.arange(kv_len)[None]
    assert roofline.attended(num_tokens, kv_len) == (key <= query).sum()


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mqa_tied", "qwen3_mqa_head_dim24"])
def test_flops_and_bytes_are_those_of_the_checkpoint_tensors(name):
    """Two rows, one of them a whole prompt of 7, counted from the tensors that a checkpoint has."""
    config, tensors = make_tiny(name)
    matrices = {key: value for key, value in tensors.items() if value.ndim == 2}
    head = matrices.get("lm_head.weight", matrices["model.embed_tokens.weight"])
    layers = {key: value for key, value in matrices.items() if ".layers." in key}
    tokens, samples = 1 + 7, 2
    heads, head_dim, depth = config["num_attention_heads"], config["head_dim"], config["num_hidden_layers"]
    pairs = 20 + 7 * 8 // 2
    flops = 2 * tokens * sum(m.size for m in layers.values()) + 2 * samples * head.size
    flops += 4 * depth * heads * head_dim * pairs
    moved = 2 * (sum(m.size for m in layers.values()) + head.size + tokens * config["hidden_size"])
    moved += sum(v.size * 4 for v in tensors.values() if v.ndim == 1)  # norms and biases are float32
    per_token = depth * 2 * config["num_key_value_heads"] * head_dim * 2
    moved += (20 + 7) * per_token + tokens * per_token  # read, and written
    found = roofline.bound(Setting(tiny_shape(name), H100), [Row(1, 20), Row(7, 7)])
    assert (found.flops, found.bytes) == (flops, moved)


def test_bounds_are_flops_and_bytes_over_the_chip():
    setting = Setting(tiny_shape(), H100)
    found = roofline.decode_bound(setting, 4, 100)
    assert found.compute_s == found.flops / 989.5e12
    assert found.memory_s == found.bytes / 3.35e12
    assert found.time_s == found.memory_s
    assert (found.binds, found.interconnect_s) == ("memory", 0)
    assert found.intensity == found.flops / found.bytes
    assert roofline.bound(setting, [Row(100_000, 100_000)]).binds == "compute"


def test_a_quantized_cache_moves_fewer_bytes_and_no_fewer_flops():
    setting = Setting(tiny_shape(), H100)
    small = dataclasses.replace(setting, kv_dtype="int8", quantize="int4")
    wide, narrow = (roofline.decode_bound(s, 4, 100) for s in (setting, small))
    assert narrow.bytes < wide.bytes
    assert narrow.flops == wide.flops


@pytest.mark.parametrize("context", [1, 60, 2000])
def test_the_batch_at_which_decode_turns_compute_bound(context):
    """By trying every batch."""
    setting = Setting(tiny_shape(), dataclasses.replace(H100, peaks={"bfloat16": 3.35e12 * 4}))
    found = roofline.compute_bound_batch(setting, context)
    tried = next(
        (b for b in range(1, 500) if roofline.decode_bound(setting, b, context).binds == "compute"), None
    )
    assert found == tried


def test_a_batch_bound_by_what_chips_send_is_not_yet_compute_bound():
    """On two chips with a slow link each small batch waits for the link, and reads longer than it computes."""
    slow = dataclasses.replace(H100, peaks={"bfloat16": 3.35e12 * 4}, interconnect_bandwidth=1e9)
    setting = Setting(tiny_shape(), slow, chips=2)
    steps = [roofline.decode_bound(setting, batch, 1) for batch in range(1, 100)]
    assert steps[0].binds == "interconnect"
    tried = next(batch for batch, step in enumerate(steps, 1) if step.compute_s > step.memory_s)
    assert roofline.compute_bound_batch(setting, 1) == tried > 1


def test_the_cases_above_hold_both_answers():
    setting = Setting(tiny_shape(), dataclasses.replace(H100, peaks={"bfloat16": 3.35e12 * 4}))
    found = [roofline.compute_bound_batch(setting, context) for context in (1, 60, 2000)]
    assert found[0] is not None and found[0] > 1
    assert found[-1] is None


def test_prefill_in_chunks_reads_the_weights_once_for_each():
    setting = Setting(tiny_shape(), H100)
    whole = roofline.bound(setting, [Row(64, 64)]).time_s
    chunks = [roofline.bound(setting, [Row(16, n, samples=n == 64)]).time_s for n in (16, 32, 48, 64)]
    assert roofline.prefill_time(setting, 64, 512) == whole
    assert roofline.prefill_time(setting, 64, 16) == pytest.approx(sum(chunks), rel=1e-12)
    assert sum(chunks) > whole


def test_chips_divide_the_work_and_pay_for_two_all_reduces_per_layer():
    setting = Setting(tiny_shape(), H100)
    one, two = (roofline.decode_bound(dataclasses.replace(setting, chips=n), 4, 100) for n in (1, 2))
    assert two.compute_s == one.compute_s / 2
    assert two.memory_s == one.memory_s / 2  # two KV heads: no copies
    sent = 2 * 2 * 4 * 64 * 2 * (2 * (2 - 1) / 2)  # per layer two, layers, tokens, embed_dim, bytes, ring
    assert two.interconnect_s == sent / 450e9
    with pytest.raises(ValueError, match="4 query heads"):
        dataclasses.replace(setting, chips=5)
    with pytest.raises(ValueError, match="chips must be 1"):
        Setting(tiny_shape(), dataclasses.replace(H100, interconnect_bandwidth=None), chips=2)


def test_a_tpu7x_chip_is_two_devices_with_half_of_everything():
    chip = hardware.load("tpu7x")
    setting = Setting(tiny_shape(), chip)
    assert setting.num_devices == 2
    found = roofline.decode_bound(setting, 4, 100)
    assert found.memory_s == pytest.approx(found.bytes / 7.38e12, rel=1e-12)
    assert chip.memory_bytes == 96 * 2**30
    assert found.interconnect_s == 0


def test_levers_change_what_they_name():
    setting = Setting(tiny_shape("llama_mha"), H100)
    levers = {lever.name: lever for lever in roofline.levers(setting, 4, 100, acceptance=0.5, num_drafts=3)}
    now = levers["as it is"]
    bound = roofline.decode_bound(setting, 4, 100).time_s
    assert (now.tpot_s, now.tokens_per_second) == (bound, 4 / bound)
    assert levers["int8 weights"].tpot_s < now.tpot_s
    assert levers["int4 weights"].tpot_s < levers["int8 weights"].tpot_s
    assert levers["int4 KV cache"].kv_bytes_per_sequence < levers["int8 KV cache"].kv_bytes_per_sequence
    assert levers["MQA, 1 KV heads"].kv_bytes_per_sequence == now.kv_bytes_per_sequence / 4
    assert levers["batch 8"].tokens_per_second == 8 / roofline.decode_bound(setting, 8, 100).time_s
    verify = roofline.bound(setting, [Row(4, 100)] * 4).time_s
    assert levers["3 drafts, 50% accepted"].tpot_s == verify / (1 + 0.5 + 0.25 + 0.125)
    assert levers["2 chips"].tpot_s < now.tpot_s


@pytest.mark.parametrize(
    ("ttft_ms", "rate", "tokens", "right", "circulated"),
    [(800, 8, 256, 32.675, 32.8), (300, 60, 256, 4.55, 4.5667), (150, 120, 256, 2.275, 2.2833)],
)
def test_end_to_end_counts_the_first_token_once(ttft_ms, rate, tokens, right, circulated):
    found = EndToEnd(ttft_ms / 1e3, 1 / rate, tokens)
    assert found.total_s == pytest.approx(right, rel=1e-12)
    assert found.circulated_s == pytest.approx(circulated, abs=5e-5)  # printed to four places

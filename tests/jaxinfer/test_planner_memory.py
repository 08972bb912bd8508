"""The planner's sizes: the field's table of KV caches, weights as loaded, and what fits."""

import dataclasses
import json

import huggingface_hub
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import HTTPError
from planner_shapes import llama_shape
from tiny_models import CONFIGS, make_tiny, write_gguf, write_hf

from jaxinfer import checkpoints, models
from jaxinfer.checkpoints import fetch
from jaxinfer.kv_cache import KVCacheSpec
from jaxinfer.tools.planner import hardware, make_plan, shape
from jaxinfer.tools.planner.memory import Load, plan_memory
from jaxinfer.tools.planner.roofline import Setting, compare_attention
from jaxinfer.tools.planner.shape import ModelShape

GIB = 2**30


@pytest.fixture(scope="module")
def seven_b():
    return llama_shape()


@pytest.fixture(scope="module")
def eighty_layers():
    return llama_shape(layers=80, heads=64, kv_heads=64, embed=8192, mlp=28672)


@pytest.mark.parametrize(("tokens", "gib"), [(2048, 1), (4096, 2), (8192, 4)])
def test_kv_cache_of_a_7b_model(seven_b, tokens, gib):
    assert seven_b.kv_bytes("float16", tokens) == gib * GIB


def test_ten_users_of_a_7b_model(seven_b):
    setting = Setting(seven_b, hardware.load("h200"), kv_dtype="float16")
    memory = plan_memory(setting, Load(batch=10, context=2048, page_size=64))
    assert memory.kv_bytes_total == 10 * GIB
    assert memory.pool_bytes == 10 * GIB + 64 * 524288  # and the null page


@pytest.mark.parametrize(("tokens", "gib"), [(2048, 1.5625), (4096, 3.125), (8192, 6.25)])
def test_kv_cache_of_a_13b_model(tokens, gib):
    thirteen_b = llama_shape(layers=40, heads=40, kv_heads=40, embed=5120, mlp=13824)
    assert thirteen_b.kv_bytes("float16", tokens) == gib * GIB


# Texts in circulation print 6.4, 12.8 and 25.6 GB for 64 heads, and 1.6 and 0.20 GB for 8 heads and 1 head at 4,096
# tokens: 1.28 times too much.
@pytest.mark.parametrize(
    ("kv_heads", "gib"),
    [(64, (5, 10, 20)), (8, (0.625, 1.25, 2.5)), (1, (0.078125, 0.15625, 0.3125))],
)
def test_kv_cache_of_80_layers(eighty_layers, kv_heads, gib):
    model = eighty_layers.with_kv_heads(kv_heads)
    assert [model.kv_bytes("float16", n) / GIB for n in (2048, 4096, 8192)] == list(gib)


def test_savings_of_grouped_and_multi_query_attention(eighty_layers):
    setting = Setting(eighty_layers, hardware.load("h200"), chips=4, kv_dtype="float16")
    kinds = {kind.num_kv_heads: kind for kind in compare_attention(setting, 1, 4096, gqa_heads=8)}
    assert kinds[64].saving == 0
    assert kinds[8].saving == 0.875
    assert round(kinds[1].saving, 3) == 0.984
    assert kinds[64].tpot_s > kinds[8].tpot_s > kinds[1].tpot_s


def test_llama_shaped_models_have_their_published_parameter_counts(seven_b):
    # Llama-7B has 6,738,415,616 parameters, Llama-3-8B 8,030,261,248.
    assert seven_b.num_params == 6_738_415_616
    assert llama_shape(kv_heads=8, mlp=14336, vocab=128256).num_params == 8_030_261_248


@pytest.mark.parametrize(
    ("dtype", "per_value"), [("float32", 4), ("bfloat16", 2), ("int8", 1), ("int4", 0.5)]
)
def test_bytes_of_a_token_in_every_form(dtype, per_value):
    scales = 2 * 8 * 4 if per_value < 2 else 0  # a float32 for each head's K and V
    assert shape.kv_bytes_per_token_and_layer(8, 128, dtype) == 2 * 8 * 128 * per_value + scales


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["llama_gqa", "llama_head_dim24", "qwen3_mqa_head_dim24"])
def test_a_page_is_as_large_as_the_cache_makes_it(name, dtype):
    config = models.for_config(CONFIGS[name]).Config.from_hf(CONFIGS[name])
    spec = KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 16, 9, dtype)
    model = ModelShape.from_config(models.module_of(config), config)
    assert model.kv_bytes_per_token(dtype) * 16 == spec.bytes_per_page


def test_a_model_with_windows_is_refused_and_not_planned_without_them(tmp_path):
    config = CONFIGS["llama_gqa"] | {"sliding_window": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="sliding_window=256"):
        shape.load(tmp_path, "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_weights_are_as_large_as_those_that_are_loaded(tmp_path, name, dtype):
    path = write_hf(tmp_path, *make_tiny(name))
    checkpoint = checkpoints.open_checkpoint(path)
    module = models.for_config(checkpoint.config)
    config = module.Config.from_hf(checkpoint.config, dtype=dtype)
    weights = checkpoints.load_weights(checkpoint, module, config, jnp.dtype(dtype))
    loaded = sum(leaf.nbytes for _, leaf in checkpoints.loading.named_leaves(weights))
    assert shape.load(path, dtype).weights_bytes() == loaded


def test_groups_are_all_of_the_weights(seven_b):
    groups = ("projections", "mlp", "embedding", "head", "norms")
    assert sum(seven_b.weights_bytes(group) for group in groups) == seven_b.weights_bytes()
    assert seven_b.params("projections") == 32 * 4 * 4096**2
    assert seven_b.params("mlp") == 32 * 3 * 4096 * 11008
    assert seven_b.params("head") == seven_b.params("embedding") == 32000 * 4096


def test_quantized_weights(seven_b):
    """Values of 8 or 4 bits, a float32 per output, or a scale and an offset per output and 128 inputs."""
    outputs = 32 * (4 * 4096 + 2 * 11008 + 4096)
    matrices = seven_b.params("projections") + seven_b.params("mlp")
    rest = seven_b.weights_bytes() - 2 * matrices
    assert seven_b.weights_bytes(quantize="int8") == rest + matrices + 4 * outputs
    assert seven_b.weights_bytes(quantize="int4") == rest + matrices // 2 + 2 * 4 * matrices // 128


def test_fewer_kv_heads_are_the_model_built_with_them(seven_b):
    grouped = llama_shape(kv_heads=8)
    assert seven_b.with_kv_heads(8).weights_bytes() == grouped.weights_bytes()
    assert seven_b.with_kv_heads(8).weights_bytes(quantize="int8") == grouped.weights_bytes(quantize="int8")
    with pytest.raises(ValueError, match="5 KV heads do not divide 32 query heads"):
        seven_b.with_kv_heads(5)


@pytest.fixture
def config_json(tmp_path):
    """A folder that has nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama_gqa"]))
    return tmp_path


def test_every_way_to_name_a_model_gives_the_same_plan(config_json):
    config, weights = make_tiny("llama_gqa")
    write_gguf(config_json / "tiny.gguf", config, weights, tensor_type="Q8_0")
    names = [config_json, config_json / "config.json", config_json / "tiny.gguf"]
    plans = [make_plan(name, hardware="h100", context=256, batch=2).to_json() for name in names]
    assert {**plans[0], "model": 0} == {**plans[1], "model": 0} == {**plans[2], "model": 0}


def test_a_catalog_name_is_its_file(config_json, monkeypatch):
    config, weights = make_tiny("llama_gqa")
    write_gguf(config_json / "tiny.gguf", config, weights)
    monkeypatch.setattr(fetch, "fetch", lambda name: config_json / "tiny.gguf")
    assert shape.load("smollm2-135m-instruct", "float32").embed_dim == config["hidden_size"]


@pytest.mark.parametrize("name", ["llama_gqa", "llama_mqa_tied"])
def test_weights_beside_a_config_say_whether_the_head_is_tied(tmp_path, name):
    """A config.json may leave it out: then the file decides, and without a file nothing is tied."""
    config, weights = make_tiny(name)
    tied = config.get("tie_word_embeddings", False)
    config = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
    assert shape.load(write_hf(tmp_path, config, weights), "float32").tied == tied
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "config.json").write_text(json.dumps(config))
    assert not shape.load(tmp_path / "alone", "float32").tied


def test_of_a_hub_model_only_the_config_is_fetched(config_json, monkeypatch):
    asked = []

    def download(name, file, local_files_only):
        asked.append((name, file, local_files_only))
        return str(config_json / file)

    def unreachable(api, name):
        raise HTTPError("no route")

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda api, name: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(fetch, "resolve", lambda model: pytest.fail("weights are fetched"))
    assert shape.load("org/tiny", "float32").embed_dim == CONFIGS["llama_gqa"]["hidden_size"]
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    shape.load("org/tiny", "float32")  # from the cache, at once
    assert asked == [("org/tiny", "config.json", False), ("org/tiny", "config.json", True)]


def test_a_hub_model_that_is_not_there_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(fetch.FetchError, match=r"no config\.json of 'org/tiny'.*give the path") as caught:
        shape.load("org/tiny", "float32")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", "{"), ("config.json", "[]"), ("config.json", "{}"), ("other.txt", "")]
)
def test_what_is_no_model_is_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises((ValueError, RuntimeError), match=r"model|JSON"):
        shape.load(tmp_path / name, "float32")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        shape.load(empty, "float32")


def test_json_has_integers_in_bytes(config_json):
    plan = json.loads(json.dumps(make_plan(config_json, hardware="v5e", context=256, batch=3).to_json()))
    for name in (
        "weights_bytes",
        "kv_bytes_per_token",
        "kv_bytes_per_sequence",
        "kv_bytes_total",
        "pool_bytes",
    ):
        assert type(plan[name]) is int
    assert plan["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 2  # layers, K and V, heads, head_dim, bfloat16
    assert plan["kv_bytes_per_sequence"] == 256 * plan["kv_bytes_per_token"]
    assert plan["kv_bytes_total"] == 3 * plan["kv_bytes_per_sequence"]
    parts = ("weights_bytes", "pool_bytes", "row_state_bytes", "temporaries_bytes")
    assert plan["total_bytes"] == sum(plan[part] for part in parts)
    assert plan["left_bytes"] == plan["usable_bytes"] - plan["total_bytes"]


def test_the_largest_batch_and_the_longest_context_fit_and_one_more_does_not():
    model = llama_shape(kv_heads=8, mlp=14336, vocab=128256, dtype="bfloat16")
    setting, load = Setting(model, hardware.load("h100")), Load(batch=4, context=8192, page_size=64)
    memory = plan_memory(setting, load)
    for field, most, step in (("batch", memory.largest_batch, 1), ("context", memory.longest_context, 64)):
        assert plan_memory(setting, dataclasses.replace(load, **{field: most})).fits
        assert not plan_memory(setting, dataclasses.replace(load, **{field: most + step})).fits


def test_a_model_that_does_not_fit_says_so(eighty_layers):
    memory = plan_memory(
        Setting(eighty_layers, hardware.load("a100")), Load(batch=1, context=128, page_size=128)
    )
    assert not memory.fits
    assert memory.largest_batch == memory.longest_context == 0


def test_kv_heads_are_copied_when_there_are_more_devices(eighty_layers):
    """8 KV heads over 16 devices: each holds one, so there are two copies of each."""
    model = eighty_layers.with_kv_heads(8)
    load = Load(batch=1, context=128, page_size=128)
    sizes = [
        plan_memory(Setting(model, hardware.load("h200"), chips=n), load).kv_bytes_per_token
        for n in (1, 8, 16)
    ]
    assert np.array_equal(sizes, [sizes[0], sizes[0], 2 * sizes[0]])

"""One decision for `LLM`, `compile` and `plan`: equal options name equal programs, and each choice has its reason."""

import dataclasses
import inspect
import json
from types import SimpleNamespace

import jax
import pytest
from tiny_models import CONFIGS, make_tiny, write_gguf, write_hf
from typer.testing import CliRunner

from jaxinfer import LLM, SamplingParams
from jaxinfer.cli import app
from jaxinfer.models import llama
from jaxinfer.options import llm_options
from jaxinfer.options.device_facts import DeviceFacts, facts_of
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.options.model_source import named_facts
from jaxinfer.options.resolve import resolve
from jaxinfer.pallas_kernels import kv_append, ragged_paged_attention
from jaxinfer.programs import compile_cache
from jaxinfer.tools.aot import build, child, targets
from jaxinfer.tools.planner import hardware
from jaxinfer.weights.quantization import Kernels
from jaxinfer.weights.weight_forms import ModelFacts

SIZES = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "max_model_len": 64, "num_pages": 12}
ONE_ROW = {"max_num_seqs": 1, "decode_steps": 1}
TOKENIZER = SimpleNamespace(eos_token_ids=frozenset())  # the files have none
GIB = 2**30
H100 = DeviceFacts("gpu", "NVIDIA H100 80GB HBM3", 80 * GIB, 0, (9, 0))

MODELS = {
    "a Hugging Face folder": ("hf", {}),
    "a GGUF file": ("gguf", {}),
    "w8a8": ("hf", {"quantize": "w8a8"}),
    "packed codes": ("gguf", {"few_rows": "packed"}),
    "batch-invariant": ("hf", {"batch_invariant": True}),
}


@pytest.fixture
def models(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", *make_tiny("llama_gqa"), tensor_type="Q4_1")
    return {"hf": write_hf(tmp_path / "hf", *make_tiny("llama_gqa")), "gguf": tmp_path / "tiny.gguf"}


@pytest.mark.parametrize("name", MODELS)
def test_llm_compile_and_plan_name_equal_programs(models, name):
    """`compile` knew no packed codes, so what it saved for a GGUF file was refused as of other settings."""
    kind, changes = MODELS[name]
    chosen = SIZES | changes
    with LLM(models[kind], tokenizer=TOKENIZER, background_compile=False, **chosen) as llm:
        engine = llm.engine
        ours = {str(p): engine.programs.identity(p) for p in engine.config.buckets.programs()}
        cpu = facts_of(jax.devices()[0])
        planned = resolve(LLMOptions(**chosen), named_facts(models[kind]), cpu)
        for theirs in (build.build(str(models[kind]), chosen, cpu), planned, llm.resolved):
            compiler = theirs.compiler()
            assert ours == {name: compiler.identity(p) for name, p in theirs.programs().items()}
        assert planned.lines()[:-2] == llm.resolved.lines()[:-2]  # but for the memory that is free


def test_options_of_a_resolved_engine_resolve_to_it_again(models):
    cpu = facts_of(jax.devices()[0])
    first = resolve(LLMOptions(max_num_seqs=2), named_facts(models["gguf"]), cpu)
    again = resolve(LLMOptions(**first.llm_options()), named_facts(models["gguf"]), cpu)
    fields = ("config", "form", "spec", "scheduler", "buckets", "matmul_precision", "compiler_options")
    assert all(getattr(first, name) == getattr(again, name) for name in fields)


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_what_compile_saves_is_what_an_engine_of_equal_options_loads(models, kind, tmp_path):
    path, folder = str(models[kind]), tmp_path / "programs"
    compile_cache.enable(None)  # as the compiler's process: what comes out of the cache cannot be saved again
    process = child.Child("cpu", "1")
    request = {"model": path, "options": SIZES | ONE_ROW}
    for program in process.describe(request)["programs"]:
        record = process.compile(request | {"program": program["name"], "save": str(folder)})
        assert record["result"] == "compiled", record
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
    given = {"programs": folder, "background_compile": False, "compilation_cache_dir": None}
    for chosen in (SIZES | ONE_ROW, {}):  # what is not given is taken from the folder
        with LLM(path, tokenizer=TOKENIZER, **chosen, **given) as llm:
            llm.warmup(use_tqdm=False)
            llm.generate([[5, 6, 7]], params)
            assert llm.stats().compile_seconds == 0
            assert llm.stats().num_programs == len(llm.resolved.programs())
    compile_cache.enable(compile_cache.default_folder())


def test_plan_compiles_the_engines_programs_on_this_machine(models, monkeypatch):
    """It said "variant any needs a SamplingBatch"."""
    cpu = dataclasses.replace(hardware.load("h100"), platform="cpu")
    monkeypatch.setattr(hardware, "cpu", lambda: cpu)
    words = ["plan", str(models["gguf"]), "--context=64", "--batch=2", "--compile", "--json"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["temporaries_source"] == "compiled" and facts["temporaries_bytes"] > 0
    result = CliRunner().invoke(app, [*words, "--quantize=int8"])
    assert result.exit_code == 2 and "leave out --quantize" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("device", "wide", "plain", "quantized"),
    [
        (DeviceFacts("tpu", "TPU v6 lite", 32 * GIB), False, "xla", "tpu"),
        (H100, True, "xla", "gpu"),
        (H100, False, "xla", "xla"),  # 24 inputs: the kernel wants whole runs of 64
        (DeviceFacts("gpu", "NVIDIA B200", 180 * GIB, 0, (10, 0)), True, "xla", "xla"),
        (DeviceFacts("cpu", "cpu", 32 * GIB), False, "cpu", "cpu"),
    ],
)
def test_each_weight_has_the_kernel_of_its_device(device, wide, plain, quantized):
    """quantized_matmul's TPU and GPU kernels were reached by no model."""
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
    hf = CONFIGS["llama_gqa"] | (sizes | {"intermediate_size": 192} if wide else {})
    model = ModelFacts(llama, llama.Config.from_hf(hf))
    found = resolve(LLMOptions(quantize="w8a8", num_pages=12, max_num_seqs=2), model, device)
    assert found.config.kernels == Kernels(matmul=plain, gated_mlp=plain)
    layer = found.weights().layers[0]
    names = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert {getattr(layer, name).implementation for name in names} == {quantized}
    choice = found.choices["products with quantized matrices"]
    assert choice.value == quantized and choice.reason


def test_a_kernel_of_part_of_the_engine_is_refused_at_once():
    """`cpu_invariant` attends, but does not append: the first step failed."""
    with pytest.raises(
        ValueError, match=r"implementation='cpu_invariant' must be one of auto, reference, xla, cpu"
    ):
        LLM("/no/such/model", implementation="cpu_invariant")


def test_every_named_implementation_writes_and_reads_pages():
    field = LLMOptions.__dataclass_fields__["implementation"]
    named = set(llm_options.choices(field)) - {"auto"}
    both = set(kv_append.IMPLEMENTATIONS) & set(ragged_paged_attention.IMPLEMENTATIONS)
    assert named == both


def test_plan_and_compile_know_the_same_chips():
    assert set(targets.TARGETS) == set(hardware.names())


def test_nothing_is_asked_of_a_device(tmp_path, monkeypatch):
    """From a folder with nothing but a config.json, for a chip that is absent."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama_gqa"] | {"head_dim": 64}))
    facts = named_facts(tmp_path)

    def refuse(*arguments):
        raise AssertionError("a device was asked")

    for name in ("devices", "local_devices", "default_backend"):
        monkeypatch.setattr(jax, name, refuse)
    resolved = resolve(LLMOptions(quantize="w8a8"), facts, H100)
    assert (resolved.spec.implementation, resolved.config.dtype) == ("gpu", "bfloat16")
    assert resolved.choices["attention"].reason == "the device is a GPU of compute capability 9.0"
    assert any(line.startswith("products in int8: int8, since") for line in resolved.lines())
    assert all(choice.reason for choice in resolved.choices.values())
    for name in ("dtype", "attention", "page size", "precision of products", "compiler options"):
        assert name in resolved.choices


# Options


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"max_num_seq": 4}, TypeError, r"LLM\(max_num_seq=4\): there is no such option; did you mean max_num_seqs\?"),
        ({"block_size": 16}, TypeError, "use page_size"),
        ({"trust_remote_code": True}, TypeError, "is never run"),
        ({"quantize": "int4"}, ValueError, "quantize='int4' must be one of w8a8, or None"),
        ({"page_size": "large"}, ValueError, "page_size='large' must be an integer, or auto"),
        ({"num_pages": 1}, ValueError, "num_pages=1 must be at least 2"),
        ({"max_num_seqs": 2.5}, ValueError, "max_num_seqs=2.5 must be an integer"),
        ({"max_num_seqs": True}, ValueError, "max_num_seqs=True must be an integer"),
        ({"num_pages": 5, "gpu_memory_utilization": 0.5}, ValueError, "both set the size of the KV cache"),
        ({"dtype": "int8"}, ValueError, "dtype='int8' must be one of auto, float32, bfloat16, float16"),
    ],
)  # fmt: skip
def test_options_that_cannot_be_say_what_can(given, error, message):
    with pytest.raises(error, match=message):
        LLMOptions.from_keywords(given)


def test_a_refusal_that_changes_nothing_is_none():
    assert LLMOptions.from_keywords({"trust_remote_code": False}) == LLMOptions()


def test_signature_and_help_of_llm_have_every_option():
    parameters = inspect.signature(LLM).parameters
    for field in dataclasses.fields(LLMOptions):
        assert parameters[field.name].default == field.default
        assert f"\n    {field.name}: " in (LLM.__doc__ or "")


def test_a_token_is_never_printed():
    assert "secret" not in repr(LLMOptions(token="secret"))

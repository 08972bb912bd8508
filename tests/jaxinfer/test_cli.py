"""The command line: what it writes where, its exit codes, and that no option is forgotten or without effect."""

import dataclasses
import inspect
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import planted
import pytest
import text_fixtures
from safetensors import safe_open
from tiny_models import make_tiny, write_gguf, write_hf
from typer.testing import CliRunner

import jaxinfer.llm
from jaxinfer.checkpoints import TensorSource, fetch
from jaxinfer.cli import COMMANDS, app, cache, options
from jaxinfer.outputs import CompletionOutput, RequestMetrics, RequestOutput
from jaxinfer.programs import compile_cache
from jaxinfer.sampling.params import SamplingParams

VOCAB = 320
OF_OTHER_COMMANDS = {"--save", "--programs"}  # of folders of programs: who writes them, and who reads them
RUN = [sys.executable, "-c", "from jaxinfer.cli import main; main()"]


def ids_of(tokenizer, text: str) -> list[int]:
    """One token per byte, in GPT-2's alphabet of bytes."""
    byte_level = {" ": "Ġ", "\n": "Ċ", "é": "Ã©"}
    return [tokenizer.token_to_id(char) for char in "".join(byte_level.get(c, c) for c in text)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A folder whose model answers a chat with "Dublin.", continues "?" with " Yes!", "@" with "é" and "(" with
    "()()..." for ever; `.table` has its logits."""
    tokenizer = text_fixtures.byte_level()
    end = tokenizer.token_to_id("<|im_end|>")
    table = planted.random_table(VOCAB, "cli")
    for text in ("\nDublin.", "? Yes!", "@é"):
        table = planted.plant_chain(table, [*ids_of(tokenizer, text), end])
    table = planted.plant_chain(table, ids_of(tokenizer, "()("))
    config, weights = planted.make_planted(table)
    folder = write_hf(tmp_path_factory.mktemp("cli") / "planted", config, weights)
    template = {"chat_template": text_fixtures.TEMPLATES["chatml"]}
    text_fixtures.save(folder, tokenizer, text_fixtures.BYTE_LEVEL_CONFIG | template)
    return SimpleNamespace(path=str(folder), table=table, tokenizer=tokenizer, config=config)


@pytest.fixture(autouse=True)
def untouched_logging():
    """A command sets up the logs of its process, which here is the one of all tests."""
    loggers = [logging.getLogger(name) for name in (None, "jaxinfer", "jax")]
    before = [(logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, (level, handlers) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:] = handlers


def invoke(*args: str, **settings):
    return CliRunner().invoke(app, [str(arg) for arg in args], **settings)


class FakeLLM:
    """Takes down how it is called, and answers "ok"."""

    last: "FakeLLM"
    failure_of_next: Exception | None = None

    def __init__(self, model, **engine_options):
        FakeLLM.last, self.engine_options, self.failure = self, engine_options, FakeLLM.failure_of_next
        self.device_choice = "fake"
        self.resolved = SimpleNamespace(choices={"attention": SimpleNamespace(value="xla", reason="none")})
        programs = type("Programs", (), {"compile_seconds": 0.0, "__len__": lambda self: 0})()
        self.engine = SimpleNamespace(programs=programs, spec=SimpleNamespace(page_size=4, num_pages=9))

    def stats(self):
        return SimpleNamespace(peak_pages_used=3, pages_total=7)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def stream(self, prompt, params):
        self.prompt, self.params = prompt, params
        if self.failure is not None:
            raise self.failure
        samples = [CompletionOutput(i, "ok", [7, 8], finish_reason="stop") for i in range(params.n)]
        metrics = RequestMetrics(0.0, 0.0, 2.0, 2.5, 2.5)
        yield RequestOutput("0", prompt, [1, 2, 3], None, samples, True, metrics)

    def stream_chat(self, messages, params):
        return self.stream(messages, params)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(jaxinfer.llm, "LLM", FakeLLM)
    return FakeLLM


# Options

SAMPLING_CASES = {
    "n": ("--n 3", 3),
    "presence_penalty": ("--presence-penalty 0.5", 0.5),
    "frequency_penalty": ("--frequency-penalty -1", -1.0),
    "repetition_penalty": ("--repetition-penalty 1.5", 1.5),
    "temperature": ("--temperature 0.25", 0.25),
    "top_p": ("--top-p 0.5", 0.5),
    "top_k": ("--top-k 4", 4),
    "min_p": ("--min-p 0.125", 0.125),
    "seed": ("--seed 18446744073709551615", 2**64 - 1),
    "stop": ("--stop a --stop b,c", ("a", "b,c")),
    "stop_token_ids": ("--stop-token-ids 5 --stop-token-ids 6", (5, 6)),
    "bad_words": ("--bad-words no --bad-words not", ("no", "not")),
    "logit_bias": ("--logit-bias 3=-1.5 --logit-bias 4=2", {3: -1.5, 4: 2.0}),
    "allowed_token_ids": ("--allowed-token-ids 1 --allowed-token-ids 2", (1, 2)),
    "include_stop_str_in_output": ("--include-stop-str-in-output", True),
    "ignore_eos": ("--ignore-eos", True),
    "min_tokens": ("--min-tokens 2", 2),
    "max_tokens": ("--max-tokens none", None),
    "logprobs": ("--logprobs 0", 0),
    "prompt_logprobs": ("--prompt-logprobs -1", -1),
    "logprob_token_ids": ("--logprob-token-ids 9", (9,)),
    "truncate_prompt_tokens": ("--truncate-prompt-tokens -1", -1),
    "skip_special_tokens": ("--no-skip-special-tokens", False),
    "detokenize": ("--no-detokenize", False),
    "extra_args": ('--extra-args {"a":[1]}', {"a": [1]}),
}


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(SamplingParams)])
def test_every_sampling_field_is_an_option(fake, name):
    """Whoever adds a field to SamplingParams has its option at once, and owes a case and a line of help."""
    args, expected = SAMPLING_CASES[name]
    result = invoke("generate", "-m", "x", "prompt", "--json", "--temperature", "0.75", *args.split(" "))
    assert result.exit_code == 0, result.stderr
    assert getattr(fake.last.params, name) == expected
    assert options.SAMPLING_HELP[name]
    others = {field.name for field in dataclasses.fields(SamplingParams)} - {
        name,
        "temperature",
        "max_tokens",
    }
    assert all(getattr(fake.last.params, other) == getattr(SamplingParams(), other) for other in others)


def test_defaults_are_greedy_and_a_whole_answer(fake):
    assert invoke("generate", "-m", "x", "prompt").exit_code == 0
    assert fake.last.params == SamplingParams(temperature=0.0, max_tokens=256)
    assert fake.last.prompt == "prompt"


ENGINE_CASES = {
    "revision": ("--revision v1", "v1"),
    "token": ("--token abc", "abc"),
    "dtype": ("--dtype bfloat16", "bfloat16"),
    "quantize": ("--quantize w8a8", "w8a8"),
    "few_rows": ("--few-rows full", "full"),
    "max_model_len": ("--max-model-len 64", 64),
    "max_num_seqs": ("--max-num-seqs 5", 5),
    "max_num_batched_tokens": ("--max-num-batched-tokens 32", 32),
    "num_pages": ("--num-pages 7", 7),
    "kv_cache_memory_bytes": ("--kv-cache-memory-bytes 4096", 4096),
    "gpu_memory_utilization": ("--gpu-memory-utilization 0.5", 0.5),
    "page_size": ("--page-size 16", 16),
    "enable_prefix_caching": ("--no-enable-prefix-caching", False),
    "implementation": ("--implementation reference", "reference"),
    "matmul_precision": ("--matmul-precision high", "high"),
    "decode_steps": ("--decode-steps 4", 4),
    "batch_invariant": ("--batch-invariant", True),
    "logprobs_mode": ("--logprobs-mode processed", "processed"),
    "compilation_cache_dir": ("--compilation-cache-dir none", None),
}
# Arguments of LLM without an option: objects of Python; and what cannot act on one prompt of one command.
NO_OPTION = {"self", "model", "config", "weights", "model_module", "tokenizer", "buckets"}
NO_OPTION |= {"logits_processors", "logits_processor_args"}
NO_OPTION |= {"seed", "max_num_partial_prefills", "strict_compile", "generation_config", "background_compile"}
NO_OPTION |= {"programs"}  # brings the options it was compiled with: test_aot.py


LLM_ARGUMENTS = inspect.signature(jaxinfer.llm.LLM.__init__).parameters


@pytest.mark.parametrize("name", [name for name in LLM_ARGUMENTS if name not in NO_OPTION])
def test_every_engine_option_reaches_the_engine(fake, name):
    args, expected = ENGINE_CASES[name]
    assert invoke("generate", "-m", "x", "prompt", *args.split(" ")).exit_code == 0
    assert fake.last.engine_options[name] == expected
    defaults = {"decode_steps": 1, "max_num_seqs": 1, "background_compile": False}
    assert {k: v for k, v in fake.last.engine_options.items() if k != name} == {
        k: v for k, v in defaults.items() if k != name
    }


def test_defaults_in_the_help_are_those_of_the_engine():
    for option in options.ENGINE:
        default = LLM_ARGUMENTS[option.name].default
        if default is not None and option.name not in ("decode_steps", "max_num_seqs"):
            assert f"[{default}]" in option.annotation.__metadata__[0].help


# Wrong usage: 2. Failure: 1. Interruption: 130.


@pytest.mark.parametrize(
    ("args", "says"),
    [
        ("generate -m x", "give a prompt"),
        ("generate -m x prompt --chat hello", "not both"),
        ("generate -m x prompt --system s", "--system goes with --chat"),
        ("generate -m x prompt --temperature -1", "temperature=-1.0 must be a number in [0, 100]"),
        ("generate -m x prompt --temperature nan", "temperature=nan"),
        ("generate -m x prompt --top-p 0.9", "give --temperature"),
        ("generate -m x prompt --logprobs 2", "add --json"),
        ("generate -m x prompt --logit-bias 3", "TOKEN_ID=NUMBER"),
        ("generate -m x prompt --extra-args {", "not JSON"),
        ("generate -m x prompt --max-tokens many", "many"),
        ("generate -m x prompt --dtype int3", "int3"),
        ("generate -m x prompt --num-pages 1", "--num-pages"),
        ("generate -m x prompt --no-such-option", "--no-such-option"),
        ("generate prompt", "--model"),
        ("chat -m x --n 2", "--n"),
        ("chat -m x --logprobs 1", "--logprobs"),
        ("cache --yes", "--clear"),
        ("nonsense", "nonsense"),
    ],
)
def test_wrong_usage(fake, args, says):
    result = invoke(*args.split(" "))
    assert result.exit_code == 2
    assert says in result.stderr and "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_failure_is_one_sentence():
    result = invoke("generate", "-m", "no/such/model", "prompt")
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: no model 'no/such/model'.*\n", result.stderr)
    assert result.stdout == ""


def test_debug_shows_the_traceback():
    result = invoke("generate", "-m", "no/such/model", "prompt", "--debug")
    assert result.exit_code == 1
    assert "Traceback" in result.stderr and "FetchError" in result.stderr


def test_a_fault_of_ours_names_its_type(fake, monkeypatch):
    monkeypatch.setattr(fake, "failure_of_next", KeyError("rows"))
    result = invoke("generate", "-m", "x", "prompt")
    assert result.exit_code == 1
    assert result.stderr == "Error: KeyError: 'rows'; --debug shows where\n"


def test_logs_are_quiet_but_for_our_warnings(fake, monkeypatch):
    def stream(self, prompt, params):
        for name in ("jax._src.compiler", "jaxinfer.step", "absl"):
            logging.getLogger(name).info("%s informs", name)
            logging.getLogger(name).warning("%s warns", name)
        yield from original(self, prompt, params)

    original = fake.stream
    monkeypatch.setattr(fake, "stream", stream)
    lines = invoke("generate", "-m", "x", "prompt").stderr.splitlines()
    assert [line for line in lines if "warns" in line or "informs" in line] == [
        "WARNING: jaxinfer.step warns",
        "WARNING: absl warns",
    ]
    assert "jaxinfer.step informs" in invoke("generate", "-m", "x", "prompt", "--debug").stderr


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "cache"])
def test_help_names_only_options_that_the_command_has(name):
    """`batch --help` spoke of --json, which it has not."""
    text = invoke(name, "--help").stdout
    has = set(re.findall(r"^ +(?:-\w, )?(--[a-z][a-z-]+)(?:, -\w)?", text, re.M))
    assert "--debug" in has
    # A switch that is on at first is listed by its other name.
    named = {word.replace("--no-", "--") for word in re.findall(r"--[a-z][a-z-]+", text)}
    assert named <= {word.replace("--no-", "--") for word in has} | OF_OTHER_COMMANDS


def test_what_is_shown_with_json_alone_says_so_where_there_is_json():
    helps = {name: " ".join(invoke(name, "--help").stdout.split()) for name in ("generate", "batch", "bench")}
    notes = {name: text.count("needs --json") for name, text in helps.items()}
    assert notes == {"generate": 3, "batch": 0, "bench": 0}


def test_help_needs_no_jax():
    """--help and wrong usage answer before the seconds that importing jax takes."""
    code = """
import sys
from jaxinfer.cli import COMMANDS, app
for args in (["--help"], *([name, "-h"] for name in COMMANDS), ["generate"]):
    try:
        app(args)
    except SystemExit as exit:
        print(exit.code)
print([name for name in ("jax", "numpy", "jinja2", "huggingface_hub") if name in sys.modules])
"""
    environment = os.environ | {"COLUMNS": "50"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    lines = result.stdout.splitlines()
    assert lines[-1] == "[]", result.stderr
    assert lines[-2] == "2" and lines.count("0") == 1 + len(COMMANDS)
    too_long = [line for line in lines if len(line) > 50 and not line.startswith(("  --", "Usage"))]
    assert not too_long  # only names of options, which cannot be broken, stick out of a narrow terminal
    assert "--frequency-penalty" in result.stdout and "\x1b" not in result.stdout


# generate


def test_generate_writes_text_and_what_it_took(model):
    result = invoke("generate", "-m", model.path, "a" * 58 + "?")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == " Yes!\n"
    lines = [line for line in result.stderr.splitlines() if not line.startswith("WARNING: compiling ")]
    block = dict(re.split(r"  +", line, maxsplit=1) for line in lines)
    assert block["device"].startswith("cpu")
    assert block["attention"] == "cpu: the device is a CPU"
    assert block["tokens"] == "59 prompt + 6 output"  # the end token is one
    # The answer fills one page; the step that was in flight when its end was read had taken the next.
    assert block["KV pages"] == "2 of 32 used, 64 tokens each"
    assert re.fullmatch(r"2 compiled in \d+\.\d\d s", block["programs"])
    assert re.match(r"\d+\.\d{3} s", block["TTFT"])
    assert re.fullmatch(r"\d+\.\d ms \(\d+\.\d tok/s\)", block["TPOT"])
    assert "\x1b" not in result.output


def test_generate_chat_uses_the_template(model):
    """Only after the template's "assistant\\n" does the model say this."""
    result = invoke("generate", "-m", model.path, "--chat", "Capital?", "--system", "Be brief.")
    assert (result.exit_code, result.stdout) == (0, "Dublin.\n")
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nCapital?<|im_end|>\n<|im_start|>assistant\n"
    assert f"{len(model.tokenizer.encode(text).ids)} prompt + 8 output" in result.stderr


def test_generate_reads_standard_input(model):
    """A file's last newline is not part of the prompt: after it the model would say something else."""
    result = invoke("generate", "-m", model.path, "-", input="Is it?\n")
    assert (result.exit_code, result.stdout) == (0, " Yes!\n")
    bad = invoke("generate", "-m", model.path, "-", input=b"ab\xff")
    assert bad.exit_code == 1
    assert bad.stderr == "Error: standard input is not UTF-8 text: byte 2 is wrong\n"


def test_generate_never_writes_half_a_character(model):
    """After its first token there is no text yet; that must not be taken for an output without text."""
    assert invoke("generate", "-m", model.path, "@").stdout == "é\n"
    ids = [*ids_of(model.tokenizer, "é"), model.tokenizer.token_to_id("<|im_end|>")]
    result = invoke("generate", "-m", model.path, "@", "--no-detokenize")
    assert result.stdout == " ".join(map(str, ids)) + "\n"


def test_generate_json(model):
    result = invoke("generate", "-m", model.path, "Is it?", "--json", "--logprobs", "2")
    assert result.exit_code == 0, result.stderr
    (record,) = [json.loads(line) for line in result.stdout.splitlines()]
    ids = ids_of(model.tokenizer, " Yes!")
    end = model.tokenizer.token_to_id("<|im_end|>")
    expected = planted.next_logprobs(model.table, ids_of(model.tokenizer, "?")[0])
    assert record["index"] == 0
    assert record["text"] == " Yes!" and record["token_ids"] == [*ids, end]
    assert record["prompt"] == "Is it?" and record["finish_reason"] == "stop"
    first = record["logprobs"][0]
    assert set(first) == {str(token) for token in np.argsort(-expected)[:2]}
    for token, entry in first.items():
        assert abs(entry["logprob"] - expected[int(token)]) <= 1e-4
    assert record["metrics"]["ttft_s"] > 0


def test_json_has_no_infinities(fake, monkeypatch):
    """Python would write -Infinity, which no other JSON reader takes."""
    monkeypatch.setattr(
        fake,
        "stream",
        lambda self, prompt, params: iter(
            [RequestOutput("0", "p", [1], None, [CompletionOutput(0, "ok", [7], float("-inf"))], True)]
        ),
    )
    result = invoke("generate", "-m", "x", "p", "--json")
    record = json.loads(result.stdout, parse_constant=lambda name: pytest.fail(name))
    assert record["cumulative_logprob"] is None


def test_samples_are_numbered(fake):
    result = invoke("generate", "-m", "x", "p", "--n", "2", "--json")
    assert [json.loads(line)["index"] for line in result.stdout.splitlines()] == [0, 1]
    assert invoke("generate", "-m", "x", "p", "--n", "2").stdout == "[0] ok\n[1] ok\n"
    assert fake.last.engine_options["max_num_seqs"] == 2


def test_an_aborted_request_is_a_failure(fake, monkeypatch):
    aborted = RequestOutput("0", "p", [1], None, [CompletionOutput(0, "o", [7], finish_reason="abort")], True)
    monkeypatch.setattr(fake, "stream", lambda self, prompt, params: iter([aborted]))
    result = invoke("generate", "-m", "x", "p")
    assert result.exit_code == 1 and "aborted" in result.stderr


def endless(model, *args):
    """`generate` in a process of its own that would write "()()..." 2,000 tokens long."""
    command = [*RUN, "generate", "-m", model.path, "(", "--max-tokens", "none", *args]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ctrl_c(model):
    process = endless(model)
    assert process.stdout.read(2) == b")("
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.decode().splitlines() == ["Interrupted."]


@pytest.mark.parametrize("seconds", [0.1, 0.2, 0.3, 0.6])
def test_ctrl_c_while_the_command_is_being_imported(seconds):
    """One line, or Python's own end before it has read a line of ours; never a traceback of imports."""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxinfer", "generate", "-m", "nothing", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert b"jaxinfer" not in stderr or stderr.startswith(b"Error: "), stderr


def test_a_closed_pipe_ends_it_without_a_traceback(model):
    process = endless(model)
    assert process.stdout.read(1) == b")"
    process.stdout.close()
    stderr = process.stderr.read().decode()
    assert process.wait(timeout=60) == 1
    assert "Traceback" not in stderr and "Exception" not in stderr


# chat


def test_chat_keeps_the_conversation(model):
    def prompt_tokens(*messages):
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
        return len(model.tokenizer.encode(text + "<|im_start|>assistant\n").ids)

    lines = ["Hi", "", "Where to?", "/system Be brief.", " /etc", "/reset", "Hi", "/quit", "never read"]
    result = invoke("chat", "-m", model.path, input="\n".join(lines) + "\n")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "Dublin.\n" * 4
    hi, where, etc, answer = ("user", "Hi"), ("user", "Where to?"), ("user", "/etc"), ("assistant", "Dublin.")
    system = ("system", "Be brief.")
    found = [int(count) for count in re.findall(r"^\[(\d+) prompt \+ 8 output", result.stderr, re.M)]
    assert found == [
        prompt_tokens(hi),
        prompt_tokens(hi, answer, where),
        prompt_tokens(system, hi, answer, where, answer, etc),
        prompt_tokens(system, hi),
    ]


def test_chat_goes_on_after_a_turn_that_cannot_run(model):
    """It is left out of the conversation, and the exit code tells."""
    lines = ["x" * 2048, "Hi", "/nonsense"]
    result = invoke("chat", "-m", model.path, input="\n".join(lines))
    assert result.exit_code == 1
    assert result.stdout == "Dublin.\n"
    errors = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(errors) == 2 and "2048" in errors[0] and "/nonsense" in errors[1]


# info


def test_info_of_a_folder(model, monkeypatch):
    def refuse(self):
        raise AssertionError("info read a tensor")

    monkeypatch.setattr(TensorSource, "read", refuse)
    monkeypatch.setattr(TensorSource, "chunks", refuse)
    result = invoke("info", model.path, "--json")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    with safe_open(f"{model.path}/model.safetensors", "numpy") as file:
        sizes = [file.get_tensor(name).size for name in file.keys()]  # noqa: SIM118
    assert facts["num_parameters"] == sum(sizes) and facts["bytes"] == 4 * sum(sizes)
    assert facts["tensors"] == {
        "float32": {"num_tensors": len(sizes), "num_parameters": sum(sizes), "bytes": 4 * sum(sizes)}
    }
    # 1 layer x (K and V) x 2 heads x 16 values
    assert facts["kv_bytes_per_token"] == {"float32": 64 * 4, "bfloat16": 64 * 2}
    assert facts["config"]["num_kv_heads"] == 2 and facts["refused"] is None
    assert facts["chat_templates"]["default"] == text_fixtures.TEMPLATES["chatml"]
    assert facts["end_tokens"][str(model.tokenizer.token_to_id("<|im_end|>"))] == "<|im_end|>"


def test_info_of_a_gguf_file_names_its_types(tmp_path):
    config, weights = make_tiny("llama_gqa")
    write_gguf(tmp_path / "tiny.gguf", config, weights, tensor_type="Q8_0")
    result = invoke("info", tmp_path / "tiny.gguf", "--json")
    assert result.exit_code == 0, result.stderr
    tensors = json.loads(result.stdout)["tensors"]
    matrices = [w.size for w in weights.values() if w.ndim > 1]
    vectors = [w.size for w in weights.values() if w.ndim == 1]
    # a block of Q8_0: 32 values in 34 bytes
    assert tensors == {
        "Q8_0": {
            "num_tensors": len(matrices),
            "num_parameters": sum(matrices),
            "bytes": sum(matrices) // 32 * 34,
        },
        "F32": {"num_tensors": len(vectors), "num_parameters": sum(vectors), "bytes": 4 * sum(vectors)},
    }
    assert "none: " in invoke("info", tmp_path / "tiny.gguf").stdout  # it has no tokenizer, and says so


def test_info_says_what_cannot_run(model, tmp_path):
    config, weights = planted.make_planted(model.table)
    folder = write_hf(tmp_path / "other", config | {"model_type": "mamba"}, weights)
    result = invoke("info", folder)
    assert result.exit_code == 0
    assert re.search(r"^runs here +no: .*'mamba'", result.stdout, re.M)


def test_info_in_a_pipe_and_a_narrow_terminal(model, monkeypatch):
    """Values are never cut or wrapped, and styles are for terminals only; NO_COLOR leaves no colour."""
    monkeypatch.setenv("COLUMNS", "20")
    plain = invoke("info", model.path).stdout
    assert re.search(f"^path +{re.escape(model.path)}$", plain, re.M)
    assert "\x1b" not in plain
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    styled = invoke("info", model.path).stdout
    assert "\x1b[1m" in styled and not re.search(r"\x1b\[[0-9;]*[349][0-7]m", styled)


# fetch and cache


@pytest.fixture
def cache_root(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path / name)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / name))
    for file, size in {
        "models/a/a.gguf": 3_000_000,
        "compiled/v1/x": 1_500_000,
        "compiled/v2/y": 500_000,
    }.items():
        path = tmp_path / "jaxinfer" / file
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(size))
    return tmp_path / "jaxinfer"


def test_cache_sizes(cache_root):
    lines = [line.strip() for line in invoke("cache").stdout.splitlines()]
    assert lines == [
        f"models    3.0 MB in 1 files, {cache_root / 'models'}",
        "3.0 MB in 1 files, a",
        f"compiled  2.0 MB in 2 files, {cache_root / 'compiled'}",
        "1.5 MB in 1 files, v1",
        "0.5 MB in 1 files, v2",
    ]


@pytest.mark.parametrize(
    ("what", "left"), [("compiled", {"models"}), ("models", {"compiled"}), ("all", set())]
)
def test_cache_clear(cache_root, what, left):
    refused = invoke("cache", "--clear", what, input="n\n")
    assert refused.exit_code == 1
    assert {path.name for path in cache_root.iterdir()} == {"models", "compiled"}
    assert invoke("cache", "--clear", what, "--yes").exit_code == 0
    assert {path.name for path in cache_root.iterdir()} == left
    assert invoke("cache").exit_code == 0
    assert invoke("cache", "--clear", what).exit_code == 0  # nothing there: nothing to ask


def test_cache_knows_the_folders_that_are_used(cache_root, monkeypatch):
    assert compile_cache.default_folder().parent == cache.folder("compiled")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    result = invoke("fetch", next(iter(fetch.catalog())))
    assert result.exit_code == 1
    assert re.fullmatch(r"Error: not enough disk space .*\n", result.stderr)
    assert str(cache.folder("models")) in result.stderr


def test_version_says_ours_and_that_of_jax():
    result = invoke("--version")
    assert result.exit_code == 0
    assert re.fullmatch(r"jaxinfer \d+\.\d+\.\d+ \(jax \S+, jaxlib \S+\)\n", result.stdout)


def test_fetch_without_a_name_lists_the_catalog(cache_root):
    result = invoke("fetch")
    assert result.exit_code == 0
    names = [line.split()[0] for line in result.stdout.splitlines()]
    assert names == list(fetch.catalog()) and "Apache-2.0" in result.stdout
    assert result.stdout.count("not fetched yet") == len(names)
    assert invoke("fetch", "--revision", "main").exit_code == 2


def test_fetch_prints_the_path(model):
    result = invoke("fetch", model.path)
    assert (result.exit_code, result.stdout, result.stderr) == (0, f"{model.path}\n", "")

"""`jaxinfer compile`: its search, its messages and its arguments, without a compiler; and saved programs on CPU.

The real compilers are asked by `make test-aot-smoke`.
"""

import inspect
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest
import text_fixtures
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import CONFIGS, make_tiny, write_hf

from jaxinfer import SamplingParams
from jaxinfer.llm import LLM
from jaxinfer.options.device_facts import DeviceFacts, facts_of
from jaxinfer.programs import compile_cache, saved_programs
from jaxinfer.tools.aot import build, child, compiler, hlo, report, run, search, targets

GIB = 2**30


@settings(deadline=None)
@given(
    st.integers(2, 400), st.integers(0, 400), st.integers(1, 50), st.floats(0.3, 3), st.integers(-500, 500)
)
def test_largest_fit_is_exact_whatever_it_guesses(limit, beyond, unit, wrong_by, guess):
    """`limit` pages fit and not one more, however wrong the expected growth and the first try are."""
    high, tried = limit + beyond + 1, []

    def excess(n):
        assert 2 <= n < high
        tried.append(n)
        return (n - limit) * unit if n > limit else -(limit - n) * unit

    assert search.largest_fit(excess, 2, high, max(1, int(unit * wrong_by)), guess) == limit
    assert len(tried) == len(set(tried)), "asked twice"


def test_largest_fit_takes_few_tries_where_memory_grows_as_expected():
    tried = []

    def excess(n):
        tried.append(n)
        return (n - 700) * 16

    assert search.largest_fit(excess, 2, 1000, 16, guess=1000 - 299) == 700
    assert len(tried) == 2


@settings(deadline=None)
@given(st.integers(50, 100_000), st.integers(1, 100_000), st.integers(-300, 300))
def test_largest_fit_takes_few_tries_where_the_compiler_rounds_what_is_missing(limit, beyond, reserved):
    """The TPU compiler says "15.76G of 15.75G": of pages of 128 KiB it hides 80. One at a time took minutes.

    `reserved` pages are more, or fewer, than what a program that fits seems to leave.
    """
    page, rounded, tried = 128 << 10, (1 << 30) / 100, []

    def excess(n):
        tried.append(n)
        over = (n - limit) * page
        return max(1, int(round(over / rounded) * rounded)) if n > limit else min(0, over + reserved * page)

    assert search.largest_fit(excess, 2, limit + beyond, page, limit + beyond // 2) == limit
    assert len(tried) <= 25


def test_nothing_fits():
    assert search.largest_fit(lambda n: 5, 2, 100, 1) == 1


class FakeCompiler:
    """A device of 100 GiB: 60 of weights, one for each page, and one for each 32 tokens of a step."""

    weights, usable = 60 * GIB, 100 * GIB

    def __init__(self, model="m", target="v5e", topology=None):
        self.asked = []

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def describe(self, options):
        resolved = {"num_pages": 80, "page_size": 128, "max_model_len": 8192, "max_num_seqs": 64,
                    "max_num_batched_tokens": 512, "decode_steps": 8, "dtype": "bfloat16"}  # fmt: skip
        resolved |= {key: value for key, value in options.items() if value is not None}
        programs = [
            {"name": "prefill", "kind": "prefill", "variant": "greedy", "num_rows": 1, "num_steps": 1,
             "num_tokens": resolved["max_num_batched_tokens"]},
            {"name": "decode", "kind": "decode", "variant": "greedy", "num_rows": 1, "num_steps": 1,
             "num_tokens": 32},
        ]  # fmt: skip
        return {"options": resolved, "programs": programs, "bytes_per_page": GIB, "plan_problem": None,
                "device_kind": "fake", "usable_bytes": self.usable, "usable_from": "test",
                "weights_bytes": self.weights,
                "pool_bytes": resolved["num_pages"] * GIB, "versions": {"jax": "0"},
                "choices": {"attention": {"value": "tpu", "reason": "test"}}}  # fmt: skip

    def compile(self, options, name, save=None):
        described = self.describe(options)
        self.asked.append((described["options"]["num_pages"], name))
        (program,) = (p for p in described["programs"] if p["name"] == name)
        needed = self.weights + GIB * (described["options"]["num_pages"] + program["num_tokens"] // 32)
        if needed > self.usable:
            return {
                "program": name,
                "result": "too large",
                "needed_bytes": needed,
                "usable_bytes": self.usable,
            }
        return {"program": name, "result": "compiled", "seconds": 1.0, "total_bytes": needed,
                "usable_bytes": self.usable,
                "argument_bytes": needed, "temp_bytes": 0, "alias_bytes": 0, "output_bytes": 0,
                "memory_share": needed / self.usable, "cache_aliased": True, "page_copies": [],
                "collectives": {}}  # fmt: skip


def compile_fake(monkeypatch, compiler=FakeCompiler, **arguments):
    lines = []
    monkeypatch.setattr(run, "Compiler", compiler)
    return run.compile_model("m", "v5e", say=lines.append, **arguments), "\n".join(lines)


def test_what_is_too_large_is_said_with_the_largest_that_fits(monkeypatch):
    """80 pages and 16 for the tokens are 156 GiB of 100; 24 pages (3 KiB of tokens) are what is left."""
    result, said = compile_fake(monkeypatch)
    assert not result["ok"]
    assert "prefill needs 156.00 GiB, 56.00 GiB more than the 100.00 GiB of the device" in result["error"]
    assert result["nearest"] == {"num_pages": 24, "page_size": 128, "max_model_len": 23 * 128}
    assert "--num-pages 24 --page-size 128 --max-model-len 2944" in result["error"]
    assert "needs 156.00 GiB of 100.00 GiB: 56.00 GiB too much" in said


def test_smaller_steps_are_tried_when_no_pool_fits(monkeypatch):
    class Heavy(FakeCompiler):
        weights = 93 * GIB  # 512 tokens take 16: not even two pages fit; 128 take 4 and leave three

    result, _ = compile_fake(monkeypatch, Heavy)
    assert result["nearest"]["max_num_batched_tokens"] == 128
    assert result["nearest"]["num_pages"] == 3 and result["nearest"]["decode_steps"] == 1


def test_one_step_at_a_time_is_tried_before_smaller_steps(monkeypatch):
    """Where only the loop over steps is too large, all pages stay."""

    class Loops(FakeCompiler):
        weights = 40 * GIB

        def compile(self, options, name, save=None):
            loop = (
                10**6 * GIB
                if self.describe(options)["options"]["decode_steps"] > 1 and name == "decode"
                else 0
            )
            record = super().compile(options, name)
            return record | {"result": "too large", "needed_bytes": loop} if loop else record

    result, _ = compile_fake(monkeypatch, Loops, options={"num_pages": 30})
    assert result["nearest"] == {
        "num_pages": 30, "page_size": 128, "max_model_len": 29 * 128, "decode_steps": 1,
    }  # fmt: skip


@pytest.mark.parametrize(("asked", "pages"), [(None, 52), (4, 4)])
def test_a_pool_that_nobody_asked_for_does_not_bound_the_search(monkeypatch, asked, pages):
    """Where a plan had no room, the pool is one sequence's: with one step at a time more than that fits."""

    class NoRoom(FakeCompiler):
        weights = 32 * GIB  # and 16 for the tokens of a prefill: 52 pages

        def describe(self, options):
            return super().describe({"num_pages": 3} | {k: v for k, v in options.items() if v is not None})

        def compile(self, options, name, save=None):
            if self.describe(options)["options"]["decode_steps"] > 1:
                return {
                    "program": name,
                    "result": "too large",
                    "needed_bytes": 10**6 * GIB,
                    "usable_bytes": GIB,
                }
            return super().compile(options, name)

    result, _ = compile_fake(monkeypatch, NoRoom, options={} if asked is None else {"num_pages": asked})
    assert result["nearest"]["num_pages"] == pages and result["nearest"]["decode_steps"] == 1


def test_weights_alone_are_too_large(monkeypatch):
    class Hopeless(FakeCompiler):
        weights = 120 * GIB

    result, _ = compile_fake(monkeypatch, Hopeless)
    assert result["nearest"] is None and "nothing fits" in result["error"]


def test_what_fits_is_ok(monkeypatch):
    result, said = compile_fake(monkeypatch, options={"num_pages": 10})
    assert result["ok"] and result["error"] is None and result["nearest"] is None
    assert "cache aliased, no copy of pages, collectives none" in said


@pytest.mark.parametrize(
    ("flaw", "words"),
    [({"page_copies": ["copy.1"]}, "1 COPIES OF PAGES"), ({"cache_aliased": False}, "cache NOT ALIASED")],
)
def test_a_pool_that_does_not_stay_in_place_is_a_failure(monkeypatch, flaw, words):
    class Copies(FakeCompiler):
        def compile(self, options, name, save=None):
            return super().compile(options, name) | flaw

    result, _ = compile_fake(monkeypatch, Copies, options={"num_pages": 10})
    assert not result["ok"] and words in result["error"]


def test_other_failures_are_not_searched(monkeypatch):
    class Rejects(FakeCompiler):
        def compile(self, options, name, save=None):
            return {"program": name, "result": "rejected", "why": "no such layout"}

    result, _ = compile_fake(monkeypatch, Rejects)
    assert "2 of 2 programs failed, the first prefill: no such layout" in result["error"]
    assert result["nearest"] is None


@pytest.mark.parametrize("name", ["tensor_parallel_size", "kv_cache_dtype"])
def test_what_is_not_built_is_refused_by_name(name):
    with pytest.raises(NotImplementedError, match=f"{name}='x'.*not built yet"):
        run.compile_model("m", "v5e", unbuilt={name: "x"})


def test_a_missing_compiler_is_said_with_the_pip_line(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    for platform, extra in (("tpu", "aot-tpu"), ("gpu", "aot-gpu")):
        with pytest.raises(targets.MissingCompiler, match=rf"pip install 'jaxinfer\[{extra}\]'"):
            targets.check_compiler(platform)
    targets.check_compiler("cpu")


@pytest.mark.parametrize(
    ("target", "given", "expected"),
    [("v5e", None, "1x1"), ("v5e", "2x2", "2x2"), ("v5p", "2x2", "2x2x1"), ("tpu7x", "2x2x1", "2x2x1")],
)
def test_topologies(target, given, expected):
    assert targets.topology(targets.find(target), given) == expected


@pytest.mark.parametrize(
    ("target", "given"), [("v5e", "2x2x1"), ("v5e", "2x"), ("v5e", "0x1"), ("h200", "2x2")]
)
def test_topologies_that_do_not_exist(target, given):
    with pytest.raises(ValueError, match=f"topology='{given}'"):
        targets.topology(targets.find(target), given)


def test_a_compiler_that_is_killed_is_said_with_the_signal():
    """The last line on stderr alone was taken for the reason."""
    with compiler.Compiler("m", "cpu") as process:
        process._start()
        (Path(process._scratch.name) / "stderr").write_text("a log line")
        process._process.kill()
        record = process.compile({}, "prefill")
    assert record["result"] == "rejected"
    assert "was ended by SIGKILL (as the system does where memory runs out)" in record["why"]


COMMAND = [sys.executable, "-c", "from jaxinfer.cli import main; main()", "compile"]


def compile_command(*arguments, timeout=120):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "v9"), "target='v9' is not known; known are v5e"),
        (
            ("--target", "v5e", "--tensor-parallel-size", "2"),
            "tensor_parallel_size=2: sharding is not built yet",
        ),
    ],
)
def test_json_has_the_error_too(tmp_path, arguments, words):
    """A script that reads the JSON found nothing there when the command failed before it compiled."""
    done = compile_command(str(tmp_path), *arguments, "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == 1 and not answer["ok"] and words in answer["error"]
    assert words in done.stderr and len(done.stderr.splitlines()) == 1


def test_ctrl_c_ends_the_compiler_too(tiny):
    """One line, exit code 130, and no process left."""
    with subprocess.Popen(
        [*COMMAND, tiny, "--target", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None and started.stdout.readline()  # the child has answered
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        os.killpg(started.pid, signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 130 and errors.strip() == "Interrupted."
    assert children and not any(Path(f"/proc/{child}").exists() for child in children)


V5E = DeviceFacts("tpu", "TPU v5 lite", 16 * GIB)
CPU = facts_of(jax.devices("cpu")[0])
OPTIONS = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 32,
    "max_model_len": 128,
    "num_pages": 20,
}
AT_ONCE = {"background_compile": False}  # compile only what is asked for


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_hf(tmp_path_factory.mktemp("tiny"), *make_tiny("llama_gqa"))
    text_fixtures.save(folder, text_fixtures.byte_level(), text_fixtures.BYTE_LEVEL_CONFIG)
    return str(folder)


def test_programs_and_arguments_are_those_of_the_engine(tiny):
    found = build.build(tiny, OPTIONS, CPU)
    with LLM(tiny, **OPTIONS, **AT_ONCE) as llm:
        engine = llm.engine
        assert list(found.programs().values()) == engine.config.buckets.programs()
        assert found.spec == engine.spec and found.matmul_precision == llm.resolved.matmul_precision
        for program in found.programs().values():
            ours, theirs = found.compiler().shapes.of(program), engine.programs.shapes.of(program)
            assert jax.tree.structure(ours) == jax.tree.structure(theirs)
            shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (ours, theirs)]
            assert shapes[0] == shapes[1]


def test_an_absent_chip_gets_its_own_defaults(tmp_path):
    """From a folder with nothing but a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama_gqa"] | {"head_dim": 64}))
    found = build.build(str(tmp_path), {}, V5E)
    assert (found.spec.implementation, found.spec.dtype, found.spec.page_size) == ("tpu", "bfloat16", 128)
    h200 = build.build(str(tmp_path), {}, DeviceFacts("gpu", "NVIDIA H200", 100 * GIB, 0, (9, 0)))
    assert (h200.spec.implementation, h200.spec.page_size) == ("gpu", 64)
    b200 = build.build(str(tmp_path), {}, DeviceFacts("gpu", "NVIDIA B200", 100 * GIB, 0, (10, 0)))
    assert (b200.spec.implementation, b200.spec.compute_capability) == ("gpu_xla", (10, 0))


def test_a_plan_that_the_engine_refuses_is_kept_as_a_sentence(tiny):
    found = build.build(tiny, {"max_model_len": 512}, DeviceFacts("tpu", "TPU v5 lite", 2**20))
    assert "does not fit" in (found.plan_problem or "")
    assert found.spec.num_pages == 1 + 512 // 128  # one whole sequence, for the compiler to judge


def test_quantized_weights_have_the_shapes_that_the_engine_loads(tiny):
    found = build.build(tiny, OPTIONS | {"quantize": "w8a8"}, CPU)
    with LLM(tiny, **OPTIONS, **AT_ONCE, quantize="w8a8") as llm:
        ours, theirs = found.weights(), llm.engine.weights
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        shapes = [[(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (ours, theirs)]
        assert shapes[0] == shapes[1]
        assert found.plan.weights_bytes == llm.plan.weights_bytes


def test_unknown_options_are_refused(tiny):
    with pytest.raises(TypeError, match=r"block_size=16.*use page_size"):
        build.build(tiny, {"block_size": 16}, V5E)
    with pytest.raises(TypeError, match="seed changes no program"):
        build.build(tiny, {"seed": 1}, V5E)


PROMPT = [5, 6, 7, 8]
START = """
import json, logging, sys
import jax
from jaxinfer import LLM, SamplingParams
from jaxinfer.programs import saved_programs
compiled = []
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
jax.monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **other: compiled.append(other.get("fun_name")) if "backend_compile" in name else None
)
model, folder, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
options = saved_programs.options(folder)
with LLM(model, **options, programs=folder, compilation_cache_dir=None, strict_compile=True) as llm:
    llm.warmup(use_tqdm=False)
    (output,) = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    print(json.dumps({"ids": output.outputs[0].token_ids, "programs": llm.stats().num_programs,
                      "seconds": llm.stats().compile_seconds, "compiled": compiled}))
"""


@pytest.fixture(scope="module")
def saved(tiny, tmp_path_factory):
    """A folder of programs of the tiny model for this CPU, by the command."""
    folder = tmp_path_factory.mktemp("programs")
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in OPTIONS.items()]
    saving = ("--decode-steps=4", "--save", str(folder), "--json")
    done = compile_command(tiny, "--target", "cpu", *flags, *saving, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, json.loads(done.stdout)


def test_an_engine_starts_from_saved_programs_without_compiling(tiny, saved):
    folder, result = saved
    done = subprocess.run(
        [sys.executable, "-c", START, tiny, str(folder), json.dumps(PROMPT)],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with LLM(tiny, **saved_programs.options(folder), **AT_ONCE) as llm:
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        (output,) = llm.generate([PROMPT], params)
    assert found["ids"] == list(output.outputs[0].token_ids)
    assert found["programs"] == len(result["programs"])
    assert not {"run_steps", "score", "copy_pages", "set_row"} & set(found["compiled"]), found["compiled"]
    assert found["seconds"] == 0


def test_every_saved_program_keeps_the_cache_in_place(saved):
    _, result = saved
    assert result["ok"] and all(program["cache_aliased"] for program in result["programs"])


def test_saved_programs_of_other_settings_are_refused(tiny, saved):
    folder, _ = saved
    options = saved_programs.options(folder) | {"num_pages": 30}
    with pytest.raises(ValueError, match=r"other settings; they were .*num_pages=20"):
        LLM(tiny, **options, **AT_ONCE, programs=folder)


def test_saved_programs_for_another_chip_or_source_are_refused(tiny, saved, tmp_path):
    folder, _ = saved
    manifest = json.loads((folder / saved_programs.MANIFEST).read_text())
    for name in ("device", "source of jaxinfer"):
        changed = manifest | {"facts": manifest["facts"] | {name: "another"}}
        (tmp_path / saved_programs.MANIFEST).write_text(json.dumps(changed))
        with pytest.raises(ValueError, match=f"compiled for {name} 'another'"):
            LLM(tiny, programs=tmp_path)
    with pytest.raises(ValueError, match=r"has no programs.json: make one with `jaxinfer compile --save"):
        LLM(tiny, programs=tmp_path / "empty")


def test_a_damaged_executable_is_refused(tiny, saved, tmp_path):
    folder, _ = saved
    for path in folder.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data if path.suffix == ".json" else data[:-1])
    with LLM(tiny, **saved_programs.options(folder), **AT_ONCE, programs=tmp_path) as llm:  # noqa: SIM117
        with pytest.raises(ValueError, match="is damaged"):
            llm.warmup(use_tqdm=False)


def copied(folder, target):
    """A copy of a folder of programs, and its manifest."""
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return json.loads((target / saved_programs.MANIFEST).read_text())


@pytest.mark.parametrize("file", ["../x.bin", "/etc/passwd", "..", "", 7, None, "a\0b"])
def test_a_manifest_that_names_a_path_is_refused(saved, tmp_path, file):
    manifest = copied(saved[0], tmp_path)
    next(iter(manifest["programs"].values()))["file"] = file
    (tmp_path / saved_programs.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"programs.json cannot be read: program .* names .*no file in this"):
        saved_programs.SavedPrograms(tmp_path, jax.devices()[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: [],
        lambda manifest: manifest | {"programs": []},
        lambda manifest: manifest | {"programs": {"p": 1}},
        lambda manifest: manifest | {"programs": {"p": {"identity": "", "file": "a", "arguments": [-1]}}},
        lambda manifest: manifest | {"programs": {"p": {"identity": "", "cached": "../x"}}},
    ],
)
def test_a_manifest_of_another_kind_is_refused(saved, tmp_path, change):
    manifest = copied(saved[0], tmp_path)
    (tmp_path / saved_programs.MANIFEST).write_text(json.dumps(change(manifest)))
    with pytest.raises(ValueError, match=r"programs.json cannot be read: "):
        saved_programs.SavedPrograms(tmp_path, jax.devices()[0])


def test_programs_that_others_could_have_written_are_refused(tiny, saved, tmp_path):
    (tmp_path / "programs").mkdir()
    folder = tmp_path / "programs"
    manifest = copied(saved[0], folder)
    name, entry = next(iter(manifest["programs"].items()))
    file = folder / entry["file"]
    device = jax.devices()[0]
    for path in (folder, folder / saved_programs.MANIFEST, tmp_path):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        with pytest.raises(ValueError, match=rf"others can write to {path}.*chmod o-w.* run as you"):
            saved_programs.SavedPrograms(folder, device)
        path.chmod(mode)
    programs = saved_programs.SavedPrograms(folder, device)
    file.chmod(0o666)
    with pytest.raises(ValueError, match="others can write to"):
        programs.load(name, entry["identity"], lambda: None, ())
    file.rename(tmp_path / "outside")
    file.symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="is a link out of its folder"):
        programs.load(name, entry["identity"], lambda: None, ())


def test_programs_of_another_user_are_refused(saved, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if saved[0].stat().st_uid == 0:
        saved_programs.SavedPrograms(saved[0], jax.devices()[0])  # root can do all it wants
    else:
        with pytest.raises(ValueError, match=r"belongs to user \d+, not to you \(12345\)"):
            saved_programs.SavedPrograms(saved[0], jax.devices()[0])


def test_a_folder_takes_programs_of_one_setting_only(saved):
    folder, _ = saved
    manifest = json.loads((folder / saved_programs.MANIFEST).read_text())
    other = saved_programs.Folder(folder, manifest["facts"], manifest["model"], options={})
    for step in (other.check, lambda: other.add("p", "id", b"x", [0])):
        with pytest.raises(ValueError, match="holds programs of other options"):
            step()


@pytest.fixture
def cannot_serialize(monkeypatch):
    """A compiler that takes programs but has no bytes for them; the persistent cache, which has, is JAX's own."""

    def refuse(executable):
        raise saved_programs.Unserializable("this compiler has no serialization")

    monkeypatch.setattr(saved_programs, "serialize", refuse)
    yield
    compile_cache.enable(compile_cache.default_folder())


def save_here(tiny, folder, *names):
    """The records of programs of the tiny model, asked of the compiler's process in this one."""
    process = child.Child("cpu", "1")
    request = {"model": tiny, "options": OPTIONS | {"decode_steps": 1}, "save": str(folder)}
    return [process.compile(request | {"program": name}) for name in names]


def test_where_programs_cannot_be_serialized_the_persistent_cache_is_warmed_and_an_engine_starts_from_it(
    tiny, tmp_path, cannot_serialize, caplog
):
    records = save_here(tiny, tmp_path, "prefill[32,1] any", "decode[1,1] any")
    assert not any(map(report.failed, records))
    for record in records:
        said = "\n".join(report.program_lines(record))
        assert "no executable is saved (this compiler has no serialization)" in said
        assert "the persistent cache in the folder is warmed" in said
    assert not list(tmp_path.glob("*.bin"))
    # The second engine is asked with an empty cache of its own: what it does not compile came with the folder.
    hits = []
    jax.monitoring.register_event_listener(lambda name, **_: hits.append("cache_hits" in name))
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    options = saved_programs.options(tmp_path)
    with LLM(tiny, **options, **AT_ONCE, programs=tmp_path, compilation_cache_dir=None) as llm:
        (output,) = llm.generate([PROMPT], params)
        assert sum(hits) >= len(llm.engine.programs) == 2
    with LLM(tiny, **options, **AT_ONCE) as llm:
        (expected,) = llm.generate([PROMPT], params)
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert (
        "are no executables, since their compiler could not serialize them (this compiler has" in caplog.text
    )
    assert f"through the persistent cache in {tmp_path / 'cache'}" in caplog.text


def test_saving_again_where_the_cache_is_warm_says_the_same(tiny, tmp_path, cannot_serialize):
    first = save_here(tiny, tmp_path, "decode[1,1] any")
    again = save_here(tiny, tmp_path, "decode[1,1] any")
    assert [r["saved_bytes"] for r in first] == [r["saved_bytes"] for r in again]


def test_what_neither_a_file_nor_the_cache_keeps_is_a_failure(tiny, tmp_path, cannot_serialize):
    """A folder for the cache that cannot be made."""
    tmp_path.joinpath(saved_programs.CACHE).write_text("")
    (record,) = save_here(tiny, tmp_path, "decode[1,1] any")
    assert report.failed(record)
    assert "has no serialization; and the persistent cache does not keep it" in record["not_saved"]


def test_serialize_says_why_it_cannot():
    class Fails:
        def serialize(self):
            raise RuntimeError("UNIMPLEMENTED: not on this platform\nstack")

    for executable, why in ((Fails(), "UNIMPLEMENTED: not on this platform$"), (object(), "no attribute")):
        with pytest.raises(saved_programs.Unserializable, match=why):
            saved_programs.serialize(executable)


def test_a_folder_holds_executables_and_the_manifest_alone(saved):
    """No pickle beside XLA's own bytes, and nobody here who could read one."""
    folder, _ = saved
    manifest = json.loads((folder / saved_programs.MANIFEST).read_text())
    files = {entry["file"] for entry in manifest["programs"].values()}
    assert {path.name for path in folder.iterdir()} == files | {saved_programs.MANIFEST}
    assert "import pickle" not in inspect.getsource(saved_programs)


# Lines as XLA:TPU and XLA:GPU write them, shortened.
HLO = """HloModule jit_run_steps, is_scheduled=true, input_output_alias={ {1}: (2, {}, may-alias) }

%fused_computation (param_0: bf16[9,2,4,8]) -> bf16[9,2,4,8] {
  %param_0 = bf16[9,2,4,8]{3,2,1,0:T(8,128)(2,1)} parameter(0)
  ROOT %copy.7 = bf16[9,2,4,8]{2,3,1,0:T(8,128)(2,1)} copy(%param_0)
}

%condition (state: (s32[], bf16[9,2,4,8])) -> pred[] {
  %constant.1 = s32[]{:T(128)} constant(8), backend_config={"flag_configs":[]}
  %state = (s32[]{:T(128)}, bf16[9,2,4,8]{3,2,1,0:T(8,128)(2,1)}) parameter(0)
  %counter = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %lt = pred[]{:T(512)} compare(%counter, %constant.1), direction=LT, metadata={op_name="jit(run_steps)/while"}
}

%body (state.1: (s32[], bf16[9,2,4,8])) -> (s32[], bf16[9,2,4,8]) {
  %state.1 = (s32[]{:T(128)}, bf16[9,2,4,8]{3,2,1,0:T(8,128)(2,1)}) parameter(0)
  %fusion.1 = f32[4,8]{1,0} fusion(%state.1), kind=kLoop, calls=%fused_computation, backend_config={"estimated_cycles":"100"}
  %small = f32[4]{0} copy(%fusion.1), backend_config={"estimated_cycles":"9223372036854775807"}
  %attend.3 = bf16[4,8]{1,0} custom-call(%state.1), custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUzvUg==","cost_estimate":{"flops":"1000","transcendentals":"1","bytes_accessed":"64"}}}
  %append = bf16[9,2,4,8]{3,2,1,0} custom-call(%state.1), custom_call_target="tpu_custom_call", output_to_operand_aliasing={{}: (1, {})}, backend_config={"custom_call_config":{"body":"TUzv"}}
  ROOT %tuple = (s32[], bf16[9,2,4,8]{3,2,1,0}) tuple(%counter, %append)
}

%open_condition (s: f32[]) -> pred[] {
  %limit = f32[] parameter(0)
  ROOT %gt = pred[] compare(%limit, %limit), direction=GT
}

ENTRY %main.39 (weights: bf16[8], pages: bf16[9,2,4,8]) -> (s32[2], bf16[9,2,4,8]) {
  %weights = bf16[8]{0} parameter(0)
  %while.3 = (s32[]{:T(128)}, /*index=1*/bf16[9,2,4,8]{3,2,1,0}) while(%weights), condition=%condition, body=%body, metadata={op_name="jit(run_steps)/while"}
  %while.4 = f32[] while(%weights), condition=%open_condition, body=%fused_computation
  %all-reduce-start.1 = f32[8]{0} all-reduce-start(%weights), to_apply=%add, backend_config={"estimated_cycles":"7"}
  %all-reduce-done.1 = f32[8]{0} all-reduce-done(%all-reduce-start.1)
  %copy-start.2 = (bf16[9,2,4,8]{3,2,1,0:T(8,128)}, bf16[9,2,4,8]{3,2,1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%weights)
  %copy-start.5 = (bf16[9,2,4,8]{3,2,1,0:T(8,128)}, bf16[9,2,4,8]{3,2,1,0:T(8,128)S(1)}, u32[]{:S(2)}) copy-start(%weights)
  ROOT %out = (s32[2]{0}, bf16[9,2,4,8]{3,2,1,0}) tuple(%weights)
}
"""  # noqa: E501


def test_copies_of_pages_are_found_inside_fusions_and_beside_other_copies():
    """A small copy is none of pages; one in a fused computation, and the start of an asynchronous one, are."""
    program = hlo.parse(HLO)
    assert program.entry == "main.39"
    assert hlo.copies(program, "bf16[9,2,4,8]") == ["copy.7", "copy-start.2"]
    assert hlo.copies(program, "bf16[9,2,4]") == []
    assert hlo.moves(program, "bf16[9,2,4,8]") == [
        "copy-start.5"
    ]  # into VMEM: the compiler's choice, no second pool


def test_an_asynchronous_collective_counts_once():
    assert hlo.collectives(hlo.parse(HLO)) == {"all-reduce": 1}


def test_cycles_count_as_often_as_loops_run_and_drop_placeholders():
    """Eight iterations of 100 cycles and one of 7; the placeholder and the loop without an end are counted apart."""
    assert hlo.cycles(hlo.parse(HLO)) == hlo.Cycles(
        estimated=807, without=8, kernel_flops=8000, kernel_bytes=512, kernels_without=8, loops_without=1
    )


def test_calls_of_kernels_are_counted_by_name():
    """As XLA:TPU and XLA:GPU write them, shortened; neither cuBLAS nor a fusion is a kernel of ours."""
    tpu = r"""ENTRY %main (x: s8[64,576]) -> bf16[64,192] {
  %q.1 = bf16[64,192]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={kernel_metadata={}}, metadata={op_name="jit(run_steps)/jit(layer)/jit(_call)/quantized_matmul/pallas_call" stack_frame_id=1}, backend_config={"custom_call_config":{"body":"TUzv"}}
  %q.2 = bf16[64,192]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(run_steps)/quantized_matmul/pallas_call"}
  ROOT %fusion.1 = bf16[64,192]{1,0} fusion(%q.1), metadata={op_name="jit(run_steps)/quantized_matmul/pallas_call"}
}
"""  # noqa: E501
    gpu = r"""ENTRY %main (x: s8[64,576]) -> bf16[64,192] {
  %m.1 = bf16[64,192]{1,0} custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(_write_by_tma)/kv_append_block/mpmd_map" stack_frame_id=1}, backend_config={kernel_hash = "H"}
  ROOT %gemm = bf16[64,192]{1,0} custom-call(%x), custom_call_target="__cublas$gemm", metadata={op_name="jit(run_steps)/dot_general"}
}
"""  # noqa: E501
    assert hlo.kernel_calls(hlo.parse(tpu)) == {"quantized_matmul": 2}
    assert hlo.kernel_calls(hlo.parse(gpu)) == {"kv_append_block": 1}
    found = report.findings(
        {"page_copies": [], "cache_aliased": True, "collectives": {}, "kernel_calls": {"quantized_matmul": 2}}
    )
    assert "calls of kernels: quantized_matmul x2" in found


# Two layers' calls of one kernel and one of another, as XLA:GPU writes them, shortened.
GPU_HLO = r"""HloModule jit_run_steps

ENTRY %main (q: bf16[4,8]) -> bf16[4,8] {
  %q = bf16[4,8]{1,0} parameter(0)
  %map.1 = bf16[4,8]{1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2", backend_config={kernel_hash = "'\F9s\22", module = "ML\00kv_append_block_mosaic_gpu\00"}
  %map.2 = bf16[4,8]{1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2", backend_config={kernel_hash = "\88\A5", module = "ML\00attention_decode_mosaic_gpu\00"}
  %map.3 = bf16[4,8]{1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2", backend_config={kernel_hash = "'\F9s\22", module = "ML\00kv_append_block_mosaic_gpu\00"}
  ROOT %gemm = bf16[4,8]{1,0} custom-call(%map.2), custom_call_target="__cublas$gemm"
}
"""  # noqa: E501


def test_a_kernel_that_two_programs_share_is_read_once_and_told_of_both(tmp_path):
    """The compiler's process dumps a kernel when it first compiles it: later programs had no registers at all."""
    for name, registers in (("attention_decode_0", 89), ("kv_append_block_1", 10)):
        text = f"Compiling for 'sm_90a'\n0 bytes spill stores\nUsed {registers} registers"
        (tmp_path / f"{name}.ptxas").write_text(text)
    calls = hlo.gpu_kernels(hlo.parse(GPU_HLO))
    assert len(calls) == 2
    process = child.Child("cpu", "1")
    first = process._gpu_kernels(calls, tmp_path)
    assert [kernel["registers"] for kernel in first] == [10, 89] and not list(tmp_path.iterdir())
    assert process._gpu_kernels(calls, tmp_path) == first
    assert process._gpu_kernels({"new": "no such name"}, tmp_path)[0]["registers"] is None


def test_the_document_has_the_layout_table_and_ours_is_never_copied():
    """scripts/page_layout.py measures it with the TPU compiler; here what the document says is held to the claim."""
    lines = (Path(__file__).parents[2] / "docs" / "aot.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    heads = [i for i, row in enumerate(rows) if any("[K, page, 2H]" in x or "[K, 2, page]" in x for x in row)]
    checked = 0
    for head in heads:
        ours = [i for i, x in enumerate(rows[head]) if "[K, page, 2H]" in x or "[K, 2, page]" in x]
        for row in rows[head + 2 :]:
            if len(row) != len(rows[head]):
                break
            checked += len(ours)
            assert {row[i] for i in ours} == {"0.00"}, row
    assert checked == 12 * 3 + 6  # dtypes x K x H, and scales

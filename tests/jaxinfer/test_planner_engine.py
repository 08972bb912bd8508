"""The plan against what an engine allocates, and impossible settings refused before anything is loaded."""

import dataclasses

import jax
import pytest
from planner_shapes import tiny_shape
from tiny_models import CONFIGS

from jaxinfer.checkpoints import fetch
from jaxinfer.kv_cache import KVCacheSpec
from jaxinfer.llm import LLM
from jaxinfer.models import llama
from jaxinfer.options import device_facts
from jaxinfer.options.device_facts import DeviceFacts
from jaxinfer.options.llm_options import LLMOptions
from jaxinfer.programs.buckets import Buckets, Program
from jaxinfer.text.wording import size
from jaxinfer.tools.planner import PlanError, check, hardware, make_plan, temporaries
from jaxinfer.tools.planner.measure import measure_engine
from jaxinfer.weights.weight_forms import ModelFacts, WeightForm, num_bytes, shapes

CONFIG = llama.Config.from_hf(CONFIGS["llama_gqa"])
SPEC = KVCacheSpec(CONFIG.num_layers, CONFIG.num_kv_heads, CONFIG.head_dim, 32, 2)
TOKEN = 2 * 2 * 2 * 16 * 4  # K and V, layers, heads, head_dim, float32
MODEL = "smollm2-135m-instruct"
MIB = 2**20
BUCKETS = Buckets(prefill=((64, 16),), decode=(16,), decode_steps=1, multi_step=(16,))


def allocated(llm, program):
    """(weights, pool, all) of an engine in bytes, its temporaries as the compiler reports them."""
    engine = llm.engine
    executable = engine.programs.get(program)
    weights, pool, rows = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
        for tree in (engine.weights, engine._cache, engine._rows)
    )
    return weights, pool, weights + pool + rows + executable.memory_analysis().temp_size_in_bytes


@pytest.fixture(scope="module")
def engine():
    options = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "decode_steps": 1, "page_size": 32}
    with LLM(
        config=CONFIG,
        weights=llama.init(CONFIG, jax.random.key(0)),
        buckets=BUCKETS,
        background_compile=False,
        **options,
    ) as llm:
        yield llm


def test_weights_and_pool_are_what_the_engine_allocates_and_the_total_is_near(engine):
    device = device_facts.facts_of(jax.devices()[0])
    plan = checked(device, max_model_len=None, max_num_seqs=16, max_num_batched_tokens=64)
    weights, pool, total = allocated(engine, Program("prefill", 64, 16))
    assert (plan.weights_bytes, plan.pool_bytes) == (weights, pool)
    assert plan.num_pages == engine.engine.spec.num_pages
    assert plan.total_bytes == pytest.approx(total, rel=0.15)


def test_compiled_temporaries_are_those_of_the_engines_program(engine):
    """From shapes alone, without weights."""
    found = temporaries.compiled(engine.resolved)
    executable = engine.engine.programs.get(Program("prefill", 64, 16))
    assert found >= executable.memory_analysis().temp_size_in_bytes > 0
    assert found < 1.5 * executable.memory_analysis().temp_size_in_bytes


@pytest.mark.skipif(not fetch.is_here(MODEL), reason=f"run `jaxinfer fetch {MODEL}` for this test")
def test_smollm2_is_as_large_as_planned(monkeypatch, tmp_path):
    monkeypatch.setattr(
        hardware, "measure_cpu", lambda: {"peaks": {"float32": 1e11}, "memory_bandwidth": 1e10}
    )
    monkeypatch.setattr("platformdirs.user_cache_path", lambda name: tmp_path)
    plan = make_plan(MODEL, hardware="cpu", context=512, batch=4)
    buckets = Buckets(prefill=((512, 4),), decode=(4,), decode_steps=1, multi_step=(4,))
    sizes = {"max_num_seqs": 4, "max_model_len": 512, "decode_steps": 1, "buckets": buckets}
    # The plan is of the matrices; codes of a file beside them are counted by the engine alone (test_few_rows.py).
    with LLM(MODEL, few_rows="full", background_compile=False, **sizes) as llm:
        weights, pool, total = allocated(llm, Program("prefill", 512, 4))
    assert (plan.memory.weights_bytes, plan.memory.pool_bytes) == (weights, pool)
    assert plan.memory.total_bytes == pytest.approx(total, rel=0.15)


# Refusals


def gpu(limit, in_use=0):
    """An accelerator with so much memory, of which nothing else is known."""
    return DeviceFacts("gpu", "a GPU", limit, in_use)


def checked(device, weights_loaded=False, config=CONFIG, **options):
    options = LLMOptions(**{"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64} | options)
    weights = num_bytes(shapes(ModelFacts(llama, config), config, WeightForm()))
    return check(llama, config, device, SPEC, options, weights_bytes=weights, weights_loaded=weights_loaded)


def test_the_default_pool_is_what_all_rows_can_use():
    plan = checked(gpu(64 * MIB))
    assert plan.num_pages == 1 + 4 * 8
    assert plan.pool_bytes == plan.num_pages * 32 * TOKEN
    assert plan.num_tokens == 4 * 256
    assert any("4 sequences of max_model_len=256" in line for line in plan.lines())


def test_the_pool_before_loading_is_the_pool_after_it():
    before = checked(gpu(8 * MIB), max_num_seqs=64)
    weights = before.weights_bytes
    loaded = gpu(8 * MIB, in_use=weights)
    after = checked(loaded, max_num_seqs=64, weights_loaded=True)
    assert before.num_pages == after.num_pages < 1 + 64 * 8


def test_a_model_that_does_not_fit_names_a_dtype_that_does():
    weights = tiny_shape(dtype="float32").weights_bytes()
    with pytest.raises(PlanError, match=r"does not fit.*nearest is dtype='bfloat16'"):
        checked(gpu(weights))
    with pytest.raises(PlanError, match="smaller model"):
        checked(gpu(weights // 4))


def test_num_pages_over_the_memory_names_the_most_that_fits():
    device = gpu(2 * MIB)
    with pytest.raises(
        PlanError, match=r"num_pages=1000 asks for 1000 pages.*nearest is num_pages=(\d+)"
    ) as caught:
        checked(device, num_pages=1000)
    most = int(str(caught.value).split("nearest is num_pages=")[1].split()[0])
    assert checked(device, num_pages=most).num_pages == most
    with pytest.raises(PlanError):
        checked(device, num_pages=most + 1)


@pytest.mark.parametrize(
    "options",
    [
        {"num_pages": 5},
        {"kv_cache_memory_bytes": 5 * 32 * TOKEN},
        {"gpu_memory_utilization": 0.35},
    ],
)
def test_a_pool_below_one_sequence_names_settings_that_work(options):
    device = gpu(2 * MIB)
    with pytest.raises(PlanError, match="one sequence of 256 tokens needs 9") as caught:
        checked(device, **options)
    nearest = dict(
        part.split("=")
        for part in str(caught.value).split("nearest are ")[1].replace(",", "").split()
        if "=" in part
    )
    assert checked(device, num_pages=int(nearest["num_pages"])).num_tokens >= 256
    assert checked(device, gpu_memory_utilization=float(nearest["gpu_memory_utilization"])).num_tokens >= 256
    if "max_model_len" in nearest:
        assert checked(device, **options | {"max_model_len": int(nearest["max_model_len"])}).num_pages >= 2


@pytest.mark.parametrize("in_use", [0, MIB // 2])
@pytest.mark.parametrize("loaded", [False, True])
def test_the_share_of_memory_that_is_named_is_the_smallest_that_passes(in_use, loaded):
    """Whatever else is in use, and whether or not the weights are."""
    device = gpu(3 * MIB, in_use)
    options = {"weights_loaded": loaded}
    with pytest.raises(PlanError, match="nearest are") as caught:
        checked(device, gpu_memory_utilization=0.06, **options)
    share = float(str(caught.value).split("gpu_memory_utilization=")[2])
    assert checked(device, gpu_memory_utilization=share, **options).num_tokens >= 256
    with pytest.raises(PlanError):
        checked(device, gpu_memory_utilization=round(share - 0.01, 2), **options)


def test_a_default_pool_shrinks_to_what_is_left_and_a_named_one_is_refused():
    """On a CPU the default is a share of the memory, of which the weights may leave less."""
    options = {"max_num_seqs": 64, "max_num_batched_tokens": 4096}
    needed = checked(DeviceFacts("cpu", "cpu", 64 * MIB), **options)
    beside = needed.total_bytes - needed.pool_bytes
    cpu = DeviceFacts("cpu", "cpu", beside + 20 * 32 * TOKEN)
    plan = checked(cpu, **options)
    assert plan.num_pages == 20
    assert "all that weights and temporaries leave" in plan.lines()[1]
    with pytest.raises(PlanError, match="nearest is num_pages=20 "):
        checked(cpu, gpu_memory_utilization=0.99, **options)


@pytest.mark.parametrize(
    ("limit", "available"),
    [("max", 4000 * 1024), (3_000_000, 3_000_000 - 2_000_000 + 500_000), (10**12, 4000 * 1024), (1000, 0)],
)
def test_the_memory_of_a_container_is_its_limit(tmp_path, limit, available):
    """Less what it uses, of which the pages of files that were read can be taken back."""
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.stat").write_text("anon 1500000\ninactive_file 500000\n")
    assert device_facts.available_memory(tmp_path / "meminfo", tmp_path) == available
    assert device_facts.available_memory(tmp_path / "meminfo", tmp_path / "none") == 4000 * 1024


@pytest.mark.parametrize(
    ("own", "folder", "version", "left"),
    [
        ("0::/", "", 2, 700),
        ("0::/user.slice/job.scope", "user.slice", 2, 700),  # a limit on an outer one
        ("0::/user.slice/job.scope", "user.slice/job.scope", 2, 700),
        ("0::/somewhere/else", "user.slice", 2, None),  # another one's limit
        ("4:memory:/slurm/uid_1/job_2\n3:cpu,cpuacct:/", "memory/slurm/uid_1/job_2", 1, 700),
        ("4:cpuset,memory:/slurm/uid_1", "memory/slurm", 1, 700),
        ("4:memory:/docker/0123", "memory", 1, 700),  # in a container its own is mounted as the root
    ],
)
def test_limits_of_all_cgroups_around_a_process_count(tmp_path, own, folder, version, left):
    """Of 1,000 bytes 400 are in use, 100 of which are files that can be read again."""
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    limit, used, files = names[version]
    (tmp_path / "meminfo").write_text("MemAvailable: 4 kB\n")
    (tmp_path / "own").write_text(own + "\n")
    cgroup = tmp_path / "cgroup"
    (cgroup / folder).mkdir(parents=True)
    (cgroup / folder / limit).write_text("1000\n")
    (cgroup / folder / used).write_text("400\n")
    (cgroup / folder / "memory.stat").write_text(f"{files} 100\n")
    found = device_facts.available_memory(tmp_path / "meminfo", cgroup, tmp_path / "own")
    assert found == (4096 if left is None else left)
    (cgroup / folder / limit).write_text("max\n" if version == 2 else f"{2**63 - 4096}\n")
    assert device_facts.available_memory(tmp_path / "meminfo", cgroup, tmp_path / "own") == 4096


def test_without_a_length_of_its_own_a_small_pool_is_no_error():
    plan = checked(gpu(64 * MIB), num_pages=5, max_model_len=None)
    assert plan.max_model_len == CONFIG.max_position_embeddings
    assert "refused one by one" in plan.lines()[1]


def test_two_sizes_for_the_pool_are_refused():
    with pytest.raises(ValueError, match="both set the size"):
        checked(gpu(64 * MIB), num_pages=5, gpu_memory_utilization=0.5)


@pytest.mark.parametrize(("n", "text"), [(5, "5 B"), (2048, "2.00 KiB"), (3 * 2**30, "3.00 GiB")])
def test_sizes_are_in_binary_units(n, text):
    assert size(n) == text


def test_bound_and_measured_stand_side_by_side(engine):
    """The engine is run; what it allocates is what was planned. (Ratios of a tiny model mean nothing.)"""
    chip = dataclasses.replace(hardware.load("h100"), peaks={"float32": 1e15}, memory_bandwidth=1e15)
    found = measure_engine(engine, chip, name="tiny", batch=2, prompt=20, output=20)
    assert found.planned_bytes == found.allocated_bytes
    assert all(
        c.measured_s > c.bound_s > 0 and c.ratio == c.measured_s / c.bound_s for c in found.comparisons
    )

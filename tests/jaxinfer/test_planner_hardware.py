"""Facts of chips: each has a source, a user's file overrides, and the CPU is measured once."""

import json
import tomllib

import pytest

from jaxinfer.tools.planner import hardware

NAMES = ("h200", "h100", "b200", "a100", "v5e", "v5p", "v6e", "tpu7x")


def test_names_are_those_of_the_compile_targets_and_cpu():
    assert set(hardware.names()) == {*NAMES, "cpu"}


@pytest.mark.parametrize("name", NAMES)
def test_every_number_has_a_source(name):
    chip = hardware.load(name)
    numbers = {"memory_bytes", "memory_bandwidth", "interconnect_bandwidth"}
    assert set(chip.sources) == numbers | {f"peak.{dtype}" for dtype in chip.peaks}
    assert all(len(source) > 15 for source in chip.sources.values())
    assert chip.peaks["bfloat16"] > 100e12


def test_peaks_are_dense():
    """NVIDIA prints figures with 2:4 sparsity, twice what a dense product reaches."""
    assert hardware.load("h100").peak("bfloat16") == 1979e12 / 2
    assert hardware.load("a100").peak("bfloat16") == 312e12


def test_a_peak_that_is_not_published_is_refused():
    with pytest.raises(ValueError, match="no published peak for int8"):
        hardware.load("tpu7x").peak("int8")
    assert hardware.load("h200").peak("float8_e4m3fn") == 1979e12


OWN = """
[h100]
memory_bandwidth = { value = 2.0e12, source = "measured by us" }
[h100.peak]
bfloat16 = { value = 700e12, source = "measured by us" }
"""


def test_a_users_file_overrides_what_it_names(tmp_path):
    path = tmp_path / "ours.toml"
    path.write_text(OWN)
    ours, published = hardware.load(str(path)), hardware.load("h100")
    assert (ours.memory_bandwidth, ours.peak("bfloat16")) == (2.0e12, 700e12)
    assert (ours.memory_bytes, ours.peak("int8")) == (published.memory_bytes, published.peak("int8"))
    assert ours.sources["memory_bandwidth"] == "measured by us"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[mine]\ntitle = 'x'", "missing"),
        (OWN.replace(', source = "measured by us"', "", 1), "source = where it is"),
        (OWN.replace("2.0e12", "-1"), "positive number"),
        (OWN.replace("memory_bandwidth", "bandwidth"), "not understood"),
        (OWN.replace("bfloat16", "fp4"), "not understood"),
        (OWN + "[h200]\n", "one chip per file"),
        ("[", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "ours.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        hardware.load(str(path))
    assert "\n" not in str(caught.value) or "TOML" in message


def test_unknown_names_and_files_are_refused():
    with pytest.raises(ValueError, match="'h300' is not known; known are h200"):
        hardware.load("h300")
    with pytest.raises(ValueError, match="does not exist"):
        hardware.load("nowhere.toml")


def test_the_cpu_is_measured_once(tmp_path, monkeypatch):
    measured = []

    def fake():
        measured.append(1)
        return {"peaks": {"float32": 1e11}, "memory_bandwidth": 1e10}

    monkeypatch.setattr(hardware, "measure_cpu", fake)
    first, second = hardware.cpu(tmp_path), hardware.cpu(tmp_path)
    assert first == second and len(measured) == 1
    assert first.peak("float32") == 1e11
    hardware.cpu(tmp_path, again=True)
    assert len(measured) == 2
    kept = json.loads((tmp_path / "cpu_peaks.json").read_text())
    (tmp_path / "cpu_peaks.json").write_text(json.dumps(kept | {"machine": "another"}))
    hardware.cpu(tmp_path)
    assert len(measured) == 3  # another machine, or another jaxlib


def test_measuring_the_cpu_gives_plausible_figures():
    found = hardware.measure_cpu(sizes=(128,), stream_bytes=4 << 20, seconds=0.02)
    assert set(found["peaks"]) == {"float32", "bfloat16", "int8"}
    assert all(1e7 < flops < 1e15 for flops in found["peaks"].values())
    assert 1e7 < found["memory_bandwidth"] < 1e13


def test_the_facts_are_one_file():
    entries = tomllib.loads(hardware.FACTS.read_text())
    assert set(entries) == set(NAMES)

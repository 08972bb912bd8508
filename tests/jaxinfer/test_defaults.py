"""What "auto" picks on devices that are not attached."""

from pathlib import Path

import pytest

from jaxinfer.options import defaults
from jaxinfer.options.device_facts import DeviceFacts, capability


def device(platform, compute_capability="", **facts):
    return DeviceFacts(platform, platform, 2**30, compute_capability=capability(compute_capability), **facts)


@pytest.mark.parametrize(
    ("chip", "dtype", "head_dim", "expected"),
    [
        (device("cpu"), "float32", 64, "cpu"),
        (device("tpu"), "bfloat16", 64, "tpu"),
        (device("tpu"), "float16", 64, "xla"),
        (device("gpu", compute_capability="9.0"), "bfloat16", 128, "gpu"),
        (device("gpu", compute_capability="9.0"), "float32", 128, "xla"),
        (device("gpu", compute_capability="9.0"), "bfloat16", 24, "xla"),
        (device("gpu", compute_capability="8.0"), "bfloat16", 128, "gpu_xla"),
        (device("gpu", compute_capability="10.0"), "bfloat16", 128, "gpu_xla"),
        (device("gpu", compute_capability="12.0"), "float32", 128, "xla"),
        (device("gpu", compute_capability="7.5"), "bfloat16", 128, "xla"),
        (device("gpu", compute_capability="gfx942"), "bfloat16", 128, "xla"),
    ],
)
def test_auto_picks_what_can_run_and_says_why(chip, dtype, head_dim, expected):
    choice = defaults.implementation("auto", chip, dtype, head_dim)
    assert choice.value == expected and choice.reason


CHIPS = {
    "CPU": device("cpu"),
    "TPU v5e": device("tpu"),
    "TPU v6e": device("tpu"),
    "A100 (8.0)": device("gpu", compute_capability="8.0"),
    "L4 (8.9)": device("gpu", compute_capability="8.9"),
    "H100 (9.0)": device("gpu", compute_capability="9.0"),
    "H200 (9.0)": device("gpu", compute_capability="9.0"),
    "B200 (10.0)": device("gpu", compute_capability="10.0"),
}


def test_the_table_in_the_docs_is_what_auto_picks():
    """The README, at head_dim 128. When this fails, what it prints is the new table."""
    rows = []
    for name, chip in CHIPS.items():
        choices = [
            defaults.implementation("auto", chip, dtype, 128) for dtype in ("bfloat16", "float16", "float32")
        ]
        rows.append(
            f"| {name} | {' | '.join(f'`{choice.value}`' for choice in choices)} | {choices[0].reason} |"
        )
    table = "\n".join(
        ["| device | bfloat16 | float16 | float32 | why, in bfloat16 |", "|---|---|---|---|---|", *rows]
    )
    docs = (Path(__file__).parents[2] / "README.md").read_text()
    assert table in docs, f"\n{table}"


def test_a_name_is_never_replaced():
    assert defaults.implementation("reference", device("tpu"), "float32", 64).value == "reference"


@pytest.mark.parametrize(("name", "platform"), [("tpu", "gpu"), ("gpu", "tpu"), ("gpu_xla", "tpu")])
def test_kernels_of_another_accelerator_are_refused(name, platform):
    """The compiler's own words were "scalar prefetch not implemented in the Triton backend"."""
    chip = device(platform, compute_capability="9.0")
    with pytest.raises(ValueError, match=f"implementation='{name}' has no kernels for {platform}"):
        defaults.implementation(name, chip, "bfloat16", 128)
    assert defaults.implementation(name, device("cpu"), "bfloat16", 128).value == name  # interpreted


@pytest.mark.parametrize(("length", "expected"), [(5, 8), (20, 32), (4096, 64)])
def test_a_page_is_no_larger_than_a_whole_sequence_needs(length, expected):
    assert defaults.page_size("auto", "cpu", length).value == expected


@pytest.mark.parametrize(
    ("platform", "features", "options"),
    [
        ("cpu", {"avx2", "avx512f"}, {"xla_cpu_prefer_vector_width": 512}),
        ("cpu", {"avx2"}, {}),
        ("tpu", {"avx512f"}, {}),
    ],
)
def test_wide_vectors_where_they_were_measured(platform, features, options):
    found = frozenset(features) if platform == "cpu" else frozenset()
    assert defaults.compiler_options(device(platform, instruction_sets=found)).value == options

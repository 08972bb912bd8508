"""Who may import whom, and what must never be imported."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_tiny, write_hf

ROOT = Path(__file__).parents[1]

# Lowest first. A module imports from its own layer and from those below; a new module needs a place here.
LAYERS = [
    "pallas_kernels text.wording",
    "sampling.params sampling.logprob_arrays outputs",
    "request programs.forks programs.tiles weights.quantization sampling.sample sampling.filters sampling.penalties "
    "sampling.logits_processors text.stop_strings programs.compile_cache programs.settings programs.slow_compile",
    "kv_cache models.layers models.rope batch page_allocator page_groups metrics tools.timeline",
    "scheduler attention options.device_facts programs.saved_programs programs.buckets",
    "models options.defaults options.llm_options",
    "forward",
    "step sampling.logprobs",
    "programs.arguments",
    "programs.compile programs.background",
    "engine",
    "checkpoints",
    "text.tokenizer text.detokenizer text.chat text.prompts text.templates text.template_worker",
    "text.records weights.smoothing",
    "weights.weight_forms",
    "options.model_source",
    "request_loop",
    "options.resolve llm tools.planner tools.gen_kwargs tools.batch_runner tools.bench tools.aot",
    "cli tools.eval_adapter tools.ray_data __main__",
]
LEVEL = {name: level for level, layer in enumerate(LAYERS) for name in layer.split()}
FOLDERS = ("jaxinfer", "pallas_kernels", "checkpoints")
SOURCES = sorted(path.relative_to(ROOT) for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported_modules(source: str) -> set[str]:
    """Dotted names that the source imports, inside functions too; `from a import b` counts as a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer: write the package's name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def unit(dotted: str) -> str:
    """The name that LAYERS knows: jaxinfer.models.llama -> models, jaxinfer.tools.planner.plan -> tools.planner."""
    parts = dotted.removeprefix("jaxinfer.").split(".")
    two = ".".join(parts[:2])
    return two if two in LEVEL else parts[0]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_import_direction(path):
    if path == Path("jaxinfer/__init__.py") or (path.name == "__init__.py" and len(path.parts) == 3):
        return  # the public names, from every layer; what a folder holds
    me = unit(".".join(path.with_suffix("").parts))
    assert me in LEVEL, f"{path}: give {me} a place in LAYERS"
    for name in imported_modules((ROOT / path).read_text()):
        assert name.partition(".")[0] not in FOLDERS[1:], f"{path}: a user's folder can shadow {name}"
        if name.startswith("jaxinfer."):
            assert LEVEL[unit(name)] <= LEVEL[me], f"{path} ({me}) imports {name} from a higher layer"


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_program_asks_what_it_runs_on(path):
    """Kernels are chosen by name before a program is traced (`resolve`)."""
    text = (ROOT / path).read_text()
    assert "platform_dependent" not in text and "default_backend" not in text


@pytest.mark.parametrize(
    "name", ["request", "outputs", "sampling/params", "page_allocator", "page_groups", "scheduler"]
)
def test_host_modules_know_no_jax(name):
    modules = imported_modules((ROOT / "jaxinfer" / f"{name}.py").read_text())
    assert not {m for m in modules if m.split(".")[0] in ("jax", "jaxlib", "flax")}


EVERYTHING = """
import importlib, pkgutil, sys
import jaxinfer
for package in (jaxinfer,):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if module.name != "jaxinfer.tools.eval_adapter":  # needs lm_eval, which is an extra
            importlib.import_module(module.name)

import jax.numpy as jnp
from jaxinfer import batch, checkpoints, kv_cache, models
from jaxinfer.forward import forward
checkpoint = checkpoints.open_checkpoint(sys.argv[1])
model = models.for_config(checkpoint.config)
config = model.Config.from_hf(checkpoint.config)
weights = checkpoints.load_weights(checkpoint, model, config, jnp.float32)
spec = kv_cache.KVCacheSpec(config.num_layers, config.num_kv_heads, config.head_dim, 16, 4, implementation="xla")
packed = batch.pack([([5, 6, 7], 0, [1])], page_size=16)
forward(model, config, weights, kv_cache.init(spec), packed)
print(*sorted(name for name in ("optax", "flax.nnx", "torch", "transformers") if name in sys.modules))
"""


def test_heavy_packages_stay_out(tmp_path):
    """Neither importing every module nor loading and running a model pulls in a training or torch stack."""
    command = [sys.executable, "-c", EVERYTHING, str(write_hf(tmp_path, *make_tiny("llama_gqa")))]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


WITHOUT_GGUF = """
import sys
sys.modules["gguf"] = None
import jaxinfer.cli, jaxinfer.engine, jaxinfer.llm, jaxinfer.text.tokenizer
from jaxinfer import checkpoints
print(checkpoints.open_checkpoint(sys.argv[1]).kind)
try:
    checkpoints.open_checkpoint(sys.argv[2])
except checkpoints.CheckpointError as error:
    print(error)
"""


def test_only_gguf_files_need_the_gguf_package(tmp_path):
    """Accelerator images have no such package; their checkpoints are folders, or random weights."""
    folder, file = write_hf(tmp_path / "hf", *make_tiny("llama_gqa")), tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    command = [sys.executable, "-c", WITHOUT_GGUF, str(folder), str(file)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["huggingface", f"{file} needs the gguf package: pip install gguf"]


def test_folders_of_a_user_shadow_nothing(tmp_path):
    """A script beside folders named as ours runs: every module is reached under jaxinfer's own name."""
    for name in FOLDERS[1:]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the package of a user')\n")
    script = tmp_path / "script.py"
    script.write_text("import jaxinfer.llm, jaxinfer.checkpoints.fetch, jaxinfer.cli\nprint('imported')\n")
    command = [sys.executable, str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=300
    )
    assert result.stdout == "imported\n", result.stderr

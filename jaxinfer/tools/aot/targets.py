"""The chips that programs can be compiled for, and how their compilers are reached."""

import importlib.util
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

# What the child's environment has beside the parent's. JAX_PLATFORMS=cpu: the compilers are found by name, and no
# backend of theirs is started.
ENVIRONMENTS = {
    "cpu": {"JAX_PLATFORMS": "cpu"},
    "tpu": {  # no metadata server, and no lock on a device that is not there
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    },
    "gpu": {"JAX_PLATFORMS": "cpu", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"},
}
# platform -> (what must be importable, distributions to name in reports, the extra that brings them)
COMPILERS = {
    "tpu": (("libtpu",), ("libtpu",), "aot-tpu"),
    "gpu": (
        ("jax_plugins.xla_cuda13", "nvidia.cu13"),
        ("jax-cuda13-plugin", "nvidia-cuda-nvcc", "nvidia-nvvm"),
        "aot-gpu",
    ),
}


class MissingCompiler(ImportError):
    """The compiler of a platform is not installed; the message has the pip line."""


@dataclass(frozen=True)
class Target:
    """A chip by name. `hardware` is its entry in planner/hardware.toml."""

    name: str
    platform: str  # cpu | gpu | tpu
    topology: str  # of one chip, as XLA writes it
    topology_rank: int = 0  # numbers in a topology


TARGETS = {
    target.name: target
    for target in (
        Target("v5e", "tpu", "1x1", 2),
        Target("v6e", "tpu", "1x1", 2),
        Target("v5p", "tpu", "1x1x1", 3),
        Target("tpu7x", "tpu", "1x1x1", 3),
        Target("a100", "gpu", "1x1x1", 3),
        Target("h100", "gpu", "1x1x1", 3),
        Target("h200", "gpu", "1x1x1", 3),
        Target("b200", "gpu", "1x1x1", 3),
        Target("cpu", "cpu", "1"),
    )
}


def find(name: str) -> Target:
    """Raises ValueError for a name that is none of TARGETS."""
    if name not in TARGETS:
        raise ValueError(f"target={name!r} is not known; known are {', '.join(TARGETS)}")
    return TARGETS[name]


def topology(target: Target, given: str | None) -> str:
    """`given` as the compiler of `target` writes it (2x2 becomes 2x2x1 where it wants three numbers).

    Raises:
      ValueError: it is no product of positive numbers, has too many, or the platform has one device only.
    """
    if given is None:
        return target.topology
    parts = given.split("x")
    if target.platform != "tpu":
        raise ValueError(
            f"topology={given!r} is for TPUs; programs for {target.name} are compiled for one device"
        )
    if not all(part.isdigit() and int(part) for part in parts) or len(parts) > target.topology_rank:
        raise ValueError(
            f"topology={given!r} must be {target.topology_rank} numbers for {target.name}, such as "
            f"{'x'.join(['2', '2', '1'][: target.topology_rank])}"
        )
    return "x".join(parts + ["1"] * (target.topology_rank - len(parts)))


def check_compiler(platform: str) -> None:
    """Raises MissingCompiler, with the pip line, if the compiler of a platform is not installed here."""
    modules, _, extra = COMPILERS.get(platform, ((), (), ""))
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:  # of its parent package
            found = False
        if not found:
            raise MissingCompiler(
                f"the {platform.upper()} compiler is not installed ({module} is missing): "
                f"pip install 'jaxinfer[{extra}]', best in a virtual environment of its own"
            )


def versions(platform: str) -> dict[str, str]:
    """Distribution -> version of jax and of what compiles for a platform."""
    names = ("jax", "jaxlib", *COMPILERS.get(platform, ((), (), ""))[1])
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found

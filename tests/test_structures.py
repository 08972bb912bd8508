"""docs/structures.md names the modules that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jaxinfer"
TABLES = (ROOT / "docs" / "structures.md").read_text().partition("## Modules")[2]


def named() -> set[str]:
    rows = [line.split("|")[1] for line in TABLES.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([\w/]+)`", row)}


def test_every_name_is_a_module():
    missing = {
        name for name in named() if not (PACKAGE / f"{name}.py").is_file() and not (PACKAGE / name).is_dir()
    }
    assert not missing


def test_every_module_is_named():
    """Those of tools and commands by their package."""
    modules = {path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py")}
    modules = {name for name in modules if not name.endswith("__init__")}
    packages = tuple(f"{name}/" for name in named())
    assert not {name for name in modules if name not in named() and not name.startswith(packages)}

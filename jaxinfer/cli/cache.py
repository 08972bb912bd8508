"""`jaxinfer cache`: what this program keeps on the disk, and a way to be rid of it."""

import shutil
from pathlib import Path
from typing import Annotated, Literal

import platformdirs
import typer

from jaxinfer.cli.command import command, print_pairs

KINDS = {"models": "fetched models", "compiled": "compiled programs"}

Clear = Annotated[
    Literal["compiled", "models", "all"] | None,
    typer.Option(help="What to delete, after a question.", show_default=False),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Delete without a question.")]


def folder(kind: str) -> Path:
    """Where models (`jaxinfer.checkpoints.fetch`) or compiled programs (`jaxinfer.programs.compile_cache`) are kept."""
    return platformdirs.user_cache_path("jaxinfer") / kind


@command()
def run(clear: Clear = None, yes: Yes = False) -> None:
    """Show or delete fetched models and compiled programs.

    Both are made or fetched again when they are needed.
    """
    if yes and clear is None:
        raise typer.BadParameter("--yes goes with --clear")
    if clear is None:
        print_pairs([pair for kind in KINDS for pair in _sizes(kind)])
        return
    kinds = list(KINDS) if clear == "all" else [clear]
    for kind in kinds:
        files, size = _size(folder(kind))
        question = f"Delete {size / 1e6:,.1f} MB of {KINDS[kind]} in {folder(kind)}?"
        if files and not yes:
            typer.confirm(question, abort=True)
        if folder(kind).exists():
            shutil.rmtree(folder(kind))
        print(f"Deleted {files:,} files, {size / 1e6:,.1f} MB of {KINDS[kind]}.")


def _sizes(kind: str) -> list[tuple[str, str]]:
    """A line for the folder, and one for each model or version in it."""
    files, size = _size(folder(kind))
    lines = [(kind, f"{size / 1e6:,.1f} MB in {files:,} files, {folder(kind)}")]
    for part in sorted(path for path in folder(kind).glob("*") if path.is_dir()):
        files, size = _size(part)
        lines.append(("", f"{size / 1e6:,.1f} MB in {files:,} files, {part.name}"))
    return lines


def _size(path: Path) -> tuple[int, int]:
    """(files, bytes) below a folder."""
    sizes = [file.stat().st_size for file in path.rglob("*") if file.is_file()]
    return len(sizes), sum(sizes)

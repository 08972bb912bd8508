"""`jaxinfer merge`: the outputs of all shards of a batch job as one file."""

from pathlib import Path
from typing import Annotated

import typer

from jaxinfer.cli.command import command, fail

Parts = Annotated[
    list[Path], typer.Argument(help="Outputs of shards 1/n to n/n, in any order.", metavar="OUT...")
]
Output = Annotated[Path, typer.Option("--output", "-o", help="The file to write.", metavar="FILE")]


@command()
def run(parts: Parts, output: Output) -> None:
    """Merge the outputs of all shards of a batch job, in the order of the input.

    Refuses shards that are missing, unfinished, or of another job.
    """
    from jaxinfer.tools.batch_runner.merge import merge

    fail(f"{merge(parts, output):,} lines in {output}")

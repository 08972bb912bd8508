"""`jaxinfer fetch`: a model of the catalog, on this machine."""

from typing import Annotated

import typer

from jaxinfer.cli.command import command

Name = Annotated[str, typer.Argument(help="A model of the catalog.")]


@command()
def run(name: Name) -> None:
    """Download a model, verify it, and print where it lies."""
    from checkpoints import fetch

    print(fetch.resolve(name))

"""`jaxinfer fetch`: a model of the catalog or the hub, on this machine."""

from typing import Annotated

import typer

from jaxinfer.cli.command import command

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model of the hub.")]
Name = Annotated[str, typer.Argument(help="A model of the catalog, or org/name of the hub.")]


@command()
def run(name: Name, revision: Revision = None) -> None:
    """Download a model, verify it, and print where it lies."""
    from jaxinfer.checkpoints import fetch

    print(fetch.resolve(name, revision))

"""`jaxinfer fetch`: a model of the catalog or the hub, on this machine."""

from typing import Annotated

import typer

from jaxinfer.cli.command import command

Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model of the hub.")]
Name = Annotated[
    str | None,
    typer.Argument(
        help="A model of the catalog, or org/name of the hub; without it the catalog is listed.",
        show_default=False,
    ),
]


@command()
def run(name: Name = None, revision: Revision = None) -> None:
    """Download a model, verify it, and print where it lies; or list the catalog."""
    from jaxinfer.checkpoints import fetch

    if name is not None:
        print(fetch.resolve(name, revision))
        return
    if revision is not None:
        raise typer.BadParameter("--revision is for a model of the hub: name one")
    for entry in fetch.catalog().values():
        state = "fetched" if fetch.is_here(entry.name) else "not fetched yet"
        print(f"{entry.name}  {entry.bytes / 1e6:,.0f} MB  {entry.licence}  {state}")

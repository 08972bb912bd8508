"""The command `jaxinfer`: one file per subcommand.

Nothing here imports jax at the top of a file, so that `--help` and wrong usage answer at once.
"""

from typing import Annotated

import typer

from jaxinfer.cli import batch, bench, cache, chat, compile, fetch, generate, info, merge, plan, simulate
from jaxinfer.cli.command import SectionedHelp

# Plain help and errors instead of typer's panels: they survive pipes and narrow terminals.
app = typer.Typer(
    help="Run language models in JAX.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
COMMANDS = {
    "generate": generate,
    "chat": chat,
    "batch": batch,
    "merge": merge,
    "bench": bench,
    "fetch": fetch,
    "info": info,
    "plan": plan,
    "compile": compile,
    "simulate": simulate,
    "cache": cache,
}
for name, module in COMMANDS.items():
    app.command(name, cls=SectionedHelp)(module.run)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"jaxinfer {version('jaxinfer')} (jax {version('jax')}, jaxlib {version('jaxlib')})")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the versions of jaxinfer and jax.",
        ),
    ] = False,
) -> None:
    """Run language models in JAX."""


def main() -> None:
    """The entry point. Exit code 0: all was done; 2: wrong usage; 130: Ctrl-C; 1: anything else."""
    app(prog_name="jaxinfer")

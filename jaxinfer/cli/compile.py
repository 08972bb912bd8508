"""`jaxinfer compile`: the engine's programs through the real compiler of a chip that need not be here."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxinfer.cli.command import command, fail
from jaxinfer.cli.options import THROUGHPUT_ENGINE
from jaxinfer.options.llm_options import SHAPES
from jaxinfer.tools.aot.targets import TARGETS

Model = Annotated[
    str,
    typer.Argument(
        help="Folder (its config.json is enough), config.json, .gguf file, catalog name or org/name; weights "
        "are not read."
    ),
]
TargetName = Annotated[str, typer.Option(help=f"{', '.join(TARGETS)}; cpu is this one.", metavar="NAME")]
Topology = Annotated[
    str | None, typer.Option(help="Chips side by side, such as 2x2; one when left out.", metavar="AxB")
]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel-size", help="Devices that share the model.", min=1)
]
KVDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="Of pages: auto is that of the model.")]
Largest = Annotated[
    bool,
    typer.Option("--largest", help="Only the programs that need the most memory, not all of the warm-up."),
]
Save = Annotated[
    Path | None,
    typer.Option(
        help="Folder for executables; `--programs FOLDER` starts from them. Where they cannot be serialized it gets "
        "the persistent cache instead."
    ),
]
Search = Annotated[
    bool, typer.Option(help="Whether to look for the largest setting when something does not fit.")
]
Json = Annotated[
    bool, typer.Option("--json", help='Write one JSON object, with "ok" and "error"; bytes are integers.')
]


@command(*(option for option in THROUGHPUT_ENGINE if option.name in SHAPES))
def run(
    model: Model,
    *,
    target: TargetName,
    topology: Topology = None,
    tensor_parallel_size: TensorParallel = 1,
    kv_cache_dtype: KVDtype = "auto",
    largest: Largest = False,
    save: Save = None,
    search: Search = True,
    as_json: Json = False,
    **options: Any,
) -> None:
    """Compile the programs that the engine would run on a chip, and say what they need there.

    Exit code 1 if one is refused, does not fit, or copies pages. It proves that the chip's compiler takes the
    programs and what memory they need; not their values, and not their speed.
    """
    from jaxinfer.tools.aot import run as aot

    arguments: dict[str, Any] = {
        "topology": topology,
        "unbuilt": {
            "tensor_parallel_size": None if tensor_parallel_size == 1 else tensor_parallel_size,
            "kv_cache_dtype": None if kv_cache_dtype == "auto" else kv_cache_dtype,
        },
        "options": options,
        "which": "largest" if largest else "all",
        "save": save,
        "search": search,
    }
    if not as_json:
        result = aot.compile_model(model, target, **arguments)
        if not result["ok"]:
            fail(f"Error: {result['error']}")
            raise typer.Exit(1)
        return
    try:
        result = aot.compile_model(model, target, **arguments, say=lambda line: None)
    except Exception as error:
        print(json.dumps({"ok": False, "error": str(error)}))
        raise
    print(json.dumps(result))
    if not result["ok"]:
        raise typer.Exit(1)

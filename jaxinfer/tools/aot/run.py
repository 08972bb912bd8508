"""One model for one target, from its options to the result of every program."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxinfer.options.llm_options import FOREIGN
from jaxinfer.text.wording import size
from jaxinfer.tools.aot import report
from jaxinfer.tools.aot.compiler import Compiler
from jaxinfer.tools.aot.search import largest_setting, probes


def compile_model(
    model: str,
    target: str,
    *,
    topology: str | None = None,
    unbuilt: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    which: str | Sequence[str] = "all",
    save: Path | None = None,
    search: bool = True,
    say: Callable[[str], Any] = print,
    each: Callable[[dict[str, Any]], Any] = lambda record: None,
) -> dict[str, Any]:
    """Compiles the programs of `LLM(model, **options)` for a target, and says what comes of each as it comes.

    Args:
      unbuilt: options that the engine does not have yet, name -> value or None; a value is refused by name.
      which: "all" programs of the warm-up, the "largest" ones, or their names.
      save: a folder for the executables.
      search: whether to look for the largest setting that fits, if one is too large.
      each: called with the record of each program as it comes.

    Returns:
      "ok", "error" (a sentence, or None), "device" (see `child.Child.describe`), "programs" (their records),
      "nearest" (options that fit, or None).

    Raises:
      NotImplementedError: an option of `unbuilt` was given.
      ValueError, MissingCompiler: see `Compiler`.
    """
    for name, value in (unbuilt or {}).items():
        if value is not None:
            raise NotImplementedError(f"{name}={value!r}: {FOREIGN[name]}")
    options = dict(options or {})
    with Compiler(model, target, topology) as compiler:
        described = compiler.describe(options)
        for line in report.headline(described):
            say(line)
        names = [program["name"] for program in described["programs"]]
        chosen = (
            {"all": names, "largest": probes(described["programs"])}[which]
            if isinstance(which, str)
            else which
        )
        if unknown := set(chosen) - set(names):
            raise ValueError(f"there is no program {sorted(unknown)[0]}; there are {', '.join(names)}")
        records = []
        for name in chosen:
            records.append(compiler.compile(options, name, save))
            each(records[-1])
            for line in report.program_lines(records[-1]):
                say(line)
        large = [record for record in records if record["result"] == "too large"]
        error = _error(records, described["plan_problem"], len(large))
        nearest = None
        if large and search:
            say("looking for the largest setting that fits")
            worst = max(record["needed_bytes"] - record["usable_bytes"] for record in large)
            nearest = largest_setting(compiler.describe, compiler.compile, options, worst, like=chosen)
            say(report.nearest_line(nearest))
            error = f"{error}; {report.nearest_line(nearest)}"
    return {
        "ok": error is None,
        "error": error,
        "model": model,
        "device": described,
        "programs": records,
        "nearest": nearest,
    }


def _error(records: list[dict[str, Any]], plan_problem: str | None, num_large: int) -> str | None:
    if num_large:
        worst = max(
            (record for record in records if record["result"] == "too large"),
            key=lambda record: record["needed_bytes"] - record["usable_bytes"],
        )
        return (
            f"{worst['program']} needs {size(worst['needed_bytes'])}, {report.excess(worst)} more than the "
            f"{size(worst['usable_bytes'])} of the device"
        )
    wrong = [record for record in records if report.failed(record)]
    if wrong:
        why = wrong[0].get("why") or wrong[0].get("not_saved") or ", ".join(report.findings(wrong[0]))
        return f"{len(wrong)} of {len(records)} programs failed, the first {wrong[0]['program']}: {why}"
    if plan_problem:
        return f"everything compiles, but the engine would refuse to start: {plan_problem}"
    return None

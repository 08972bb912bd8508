"""Compares two commits as ratios in one run: A and B in turn, so that a machine that changes changes both.

    python scripts/bench_regress.py A B [--runs 5] [-- --workload single --dtype float32]
    python scripts/bench_regress.py HEAD .       the working tree against its last commit

Each run is scripts/bench_engine.py of that commit (what follows -- goes to it), in a process of its own, with this
Python and the commit's own packages. A commit is checked out into a temporary git worktree. Printed are, for each
figure, the medians, the median of the ratios B / A of neighbouring runs, and how far the ratios spread: a ratio
within the spread of 1 says nothing. The last line is JSON.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ("seconds", "total_tok_per_s", "out_tok_per_s", "ttft_ms", "decode_tok_per_s", "peak_rss_mb")


@contextmanager
def checkout(commit: str) -> Iterator[Path]:
    """A folder with the files of a commit; "." is the working tree itself."""
    if commit == ".":
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        git("worktree", "add", "--detach", str(path), commit)
        try:
            yield path
        finally:
            git("worktree", "remove", "--force", str(path))


def git(*arguments: str) -> str:
    """Raises SystemExit with what git says."""
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        raise SystemExit(f"git {' '.join(arguments)}: {result.stderr.strip()}")
    return result.stdout.strip()


def run(tree: Path, arguments: list[str], script: str) -> dict[str, Any]:
    """The last line of the benchmark of that tree; its packages come before the installed ones."""
    result = subprocess.run(
        [sys.executable, str(tree / script), *arguments],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
    )
    if result.returncode:
        raise SystemExit(f"the benchmark of {tree} failed:\n{result.stdout}{result.stderr}")
    *_, last = result.stdout.splitlines() or [""]
    try:
        return json.loads(last)
    except json.JSONDecodeError:
        raise SystemExit(f"the last line of the benchmark of {tree} is no JSON: {last!r}") from None


def compare(pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, dict[str, float]]:
    """Of each figure that both have: medians, median ratio B / A, its smallest and largest, and the spread."""
    found = {}
    for name in FIGURES:
        values = [(a[name], b[name]) for a, b in pairs if a.get(name) and b.get(name)]
        if not values:
            continue
        ratios = [b / a for a, b in values]
        found[name] = {
            "a": statistics.median(a for a, _ in values),
            "b": statistics.median(b for _, b in values),
            "ratio": statistics.median(ratios),
            "smallest": min(ratios),
            "largest": max(ratios),
            "spread": max(ratios) / min(ratios) - 1,
        }
    return found


def main() -> None:
    given = sys.argv[1:]
    split = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("a", help='a commit, or "." for the working tree')
    parser.add_argument("b", help="likewise; its figures are divided by those of A")
    parser.add_argument("--runs", type=int, default=5, help="of each")
    parser.add_argument("--script", default="scripts/bench_engine.py", help="whose last line is JSON")
    args = parser.parse_args(given[:split])
    arguments = given[split + 1 :]

    pairs = []
    with ExitStack() as stack:
        trees = {side: stack.enter_context(checkout(getattr(args, side))) for side in ("a", "b")}
        for number in range(args.runs):
            order = "ab" if number % 2 == 0 else "ba"  # so that neither is always the second
            results = {side: run(trees[side], arguments, args.script) for side in order}
            pairs.append((results["a"], results["b"]))
            ratios = ", ".join(f"{name} {f['ratio']:.3f}" for name, f in compare(pairs[-1:]).items())
            print(f"run {number + 1} of {args.runs}: {ratios}", file=sys.stderr, flush=True)
    found = compare(pairs)
    print(f"{'':<18}{'A':>12}{'B':>12}{'B / A':>9}   of {args.runs} pairs")
    for name, f in found.items():
        print(
            f"{name:<18}{f['a']:>12,.1f}{f['b']:>12,.1f}{f['ratio']:>9.3f}   "
            f"{f['smallest']:.3f} to {f['largest']:.3f}"
        )
    print(json.dumps({"a": args.a, "b": args.b, "runs": args.runs, "figures": found}))


if __name__ == "__main__":
    main()

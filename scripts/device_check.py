"""What a chip says: are the kernels right, how near to its limits are they, how fast is the engine.

    python scripts/device_check.py --stage check|kernels|engine [--out FILE] [--limit SECONDS]

check    every case of every kernel against the reference, which runs on the CPU of the machine
kernels  times of the kernels at real sizes: MBU and MFU, by the bytes and FLOPs that the task needs at the least
engine   256 requests, prompts and outputs of U(100, 1024) tokens, on Qwen3-0.6B's shape with random weights: output
         tokens per second, MBU of decode, MFU of prefill

Each result goes to FILE at once, as one JSON line; the last line sums up. The work runs in a child process, which is
ended when it does not answer, and started again for what is left: a kernel that hangs or takes the device with it is
a failed case among others. Nothing new begins after SECONDS (170, so that a stage ends within three minutes); what
was not run is named. Exit code 1 if anything failed or nothing passed.
"""

import argparse
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import IO, Any

STAGES = Path(__file__).with_name("device_stages.py")
SILENCE = {
    "check": 60.0,
    "kernels": 60.0,
    "engine": 600.0,
}  # seconds without an answer after which a child is ended
GRACE = 8.0  # seconds past the limit that what has begun is given
STDERR_TAIL = 1500  # characters


class Report:
    """The JSON lines of a stage, and how many of each result there are."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self.counts: Counter[str] = Counter()

    def add(self, record: dict[str, Any], count: int = 1) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        self.counts[record.get("result", "")] += count
        print("  ".join(f"{key}={value}" for key, value in record.items()), flush=True)


class Child:
    """A process that works through a plan: {"plan": names}, then for each name {"begin": name}, any number of
    {"record": ...}, {"end": name}; {"stopped": why} when it begins nothing more. One JSON object per line."""

    def __init__(self, command: list[str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  (closed with the process)
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def messages(self, silence: float, end: float) -> Any:
        """Yields messages until the process ends. Raises TimeoutError after `silence` seconds or at `end`."""
        while True:
            patience = min(silence, end - time.monotonic())
            try:
                line = self._lines.get(timeout=max(patience, 0.0))
            except queue.Empty:
                raise TimeoutError(f"no answer for {patience:.0f} s") from None
            if line is None:
                return
            try:
                yield json.loads(line)
            except ValueError:  # something that a library prints
                print(line, end="", file=sys.stderr)

    def close(self, kill: bool) -> str:
        """Waits for the process, or kills it; how it ended, and the end of what it wrote to stderr."""
        if kill:
            self._process.kill()
        code = self._process.wait()
        self._errors.seek(0)
        tail = self._errors.read()[-STDERR_TAIL:].strip()
        self._errors.close()
        return f"exit code {code}; {tail}"


def supervise(command: list[str], report: Report, limit: float, silence: float) -> None:
    """Runs `command` with --skip and --limit until its plan is worked through or the time is up."""
    start = time.monotonic()
    end = start + limit + GRACE
    plan: list[str] = []
    settled = 0  # entries of the plan that have an outcome
    why = ""
    while True:
        remaining = limit - (time.monotonic() - start)
        if plan and (remaining <= 0 or settled == len(plan)):
            break
        child = Child([*command, "--skip", str(settled), "--limit", f"{remaining:.1f}"])
        running, broken = "start", ""
        try:
            for message in child.messages(silence, end):
                plan = message.get("plan", plan)
                running = message.get("begin", running)
                why = message.get("stopped", why)
                if "record" in message:
                    report.add(message["record"])
                if "end" in message:
                    running, settled = "", settled + 1
        except TimeoutError as error:
            broken = f"{error}; "
        except BaseException:  # Ctrl-C: what holds the device does not outlive this process
            child.close(kill=True)
            raise
        ended = child.close(kill=bool(broken))
        if why or (settled == len(plan) and plan):
            break
        result = "cut short" if broken and time.monotonic() >= end else "failed"
        report.add({"name": running or "between cases", "result": result, "error": broken + ended})
        if running == "start":
            why = "no child could start"
            break
        settled += bool(running)
    if plan[settled:]:
        why = why or f"the limit of {limit:.0f} s"
        names = plan[settled:]
        report.add({"result": "not run", "why": why, "names": names}, count=len(names))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", choices=tuple(SILENCE), required=True)
    parser.add_argument("--out", type=Path, help="JSON lines; device_STAGE.jsonl")
    parser.add_argument("--limit", type=float, default=170.0, help="seconds after which nothing new begins")
    parser.add_argument("--implementation", help="kernels; the one that the engine picks for this device")
    parser.add_argument(
        "--hardware", default="auto", help="whose limits count: a name of the planner's table"
    )
    parser.add_argument("--only", default="", help="run what has this in its name")
    parser.add_argument("--compile-cache", help="folder of compiled programs, for a second run")
    parser.add_argument("--tiny", action="store_true", help="a few small cases, to try the script on a CPU")
    args = parser.parse_args()
    command = [sys.executable, str(STAGES), "--stage", args.stage, "--hardware", args.hardware]
    command += ["--only", args.only]
    if args.implementation:
        command += ["--implementation", args.implementation]
    if args.compile_cache:
        command += ["--compile-cache", args.compile_cache]
    if args.tiny:
        command.append("--tiny")
    start = time.monotonic()
    out = args.out or Path(f"device_{args.stage}.jsonl")
    with out.open("w") as file:
        report = Report(file)
        supervise(command, report, args.limit, SILENCE[args.stage])
        counts = {name: count for name, count in report.counts.items() if name}
        report.add({"summary": counts, "stage": args.stage, "seconds": round(time.monotonic() - start, 1)})
    if counts.get("failed") or not counts.get("ok"):
        sys.exit(1)


if __name__ == "__main__":
    main()

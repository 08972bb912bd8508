"""The parent's end of the compiler's process: one request, one answer, a new process if one died."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxinfer.tools.aot import targets


class CompilerDied(RuntimeError):
    """The process ended without an answer; the message has the end of what it wrote."""


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (as the system does where memory runs out)" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}"


class Compiler:
    """Compiles programs of one model for one target. Use it as a context manager.

    Raises:
      ValueError: the target or topology is not known.
      MissingCompiler: its compiler is not installed.
    """

    def __init__(self, model: str, target: str, topology: str | None = None) -> None:
        self._model, self._target = model, targets.find(target)
        self._topology = targets.topology(self._target, topology)
        targets.check_compiler(self._target.platform)
        self._process: subprocess.Popen[str] | None = None
        self._scratch = tempfile.TemporaryDirectory(prefix="jaxinfer-compile-")

    def describe(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """What would be compiled; see `child.Child.describe`. Raises ValueError where the options are wrong."""
        answer = self._ask({"do": "describe", "options": dict(options)})
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def compile(self, options: Mapping[str, Any], program: str, save: Path | None = None) -> dict[str, Any]:
        """The record of one program; see `child.Child.compile`. A compiler that dies has rejected it."""
        request = {"do": "compile", "options": dict(options), "program": program}
        try:
            answer = self._ask(request | ({"save": str(save)} if save else {}))
        except CompilerDied as error:
            return {"program": program, "result": "rejected", "why": str(error)}
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None
        try:
            print(json.dumps(request | {"model": self._model}), file=process.stdin, flush=True)
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = process.wait()
            self._process = None
            said = (Path(self._scratch.name) / "stderr").read_text(errors="replace").strip().splitlines()
            last = f"its last line was {said[-1][:300]!r}" if said else "it wrote nothing"
            raise CompilerDied(
                f"the compiler's process for {self._target.name} {_how_it_ended(code)}; {last}"
            )
        return json.loads(line)

    def _start(self) -> subprocess.Popen[str]:
        folder = Path(self._scratch.name)
        environment = os.environ | targets.ENVIRONMENTS[self._target.platform]
        if self._target.platform == "gpu":  # where Mosaic GPU says what its kernels need
            dump = folder / "dump"
            dump.mkdir(exist_ok=True)
            environment |= {"MOSAIC_GPU_DUMP_TO": str(dump), "MOSAIC_GPU_DUMP_PTXAS": "1"}
        command = [sys.executable, "-m", "jaxinfer.tools.aot.child", self._target.name, self._topology]
        with (folder / "stderr").open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return self._process

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    stream.close()
        self._scratch.cleanup()

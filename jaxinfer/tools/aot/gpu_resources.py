"""What kernels need of a GPU's multiprocessor, from the dumps of the compilers. Imports nothing of ours."""

import re
from pathlib import Path
from typing import Any


def kernel_resources(dump: Path) -> list[dict[str, Any]]:
    """Registers, spilled and shared bytes of each kernel in Mosaic GPU's dump of ptxas.

    The dump is what MOSAIC_GPU_DUMP_TO and MOSAIC_GPU_DUMP_PTXAS=1 leave in a folder.
    """
    kernels = []
    for log in sorted(dump.glob("*.ptxas")):
        text = log.read_text(errors="replace")
        spills = re.search(r"(\d+) bytes spill stores", text)
        registers = re.search(r"Used (\d+) registers", text)
        chip = re.search(r"for '(sm_\w+)'", text)
        resources = log.with_suffix(".resources.txt")
        shared = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text()) if resources.exists() else None
        kernels.append(
            {
                "kernel": log.stem,
                "target": chip[1] if chip else None,
                "registers": int(registers[1]) if registers else None,
                "spill_bytes": int(spills[1]) if spills else None,
                "smem_bytes": int(shared[1]) if shared else None,
            }
        )
    return kernels

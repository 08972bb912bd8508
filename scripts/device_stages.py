"""The process of device_check.py that holds the device; started by that script."""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path

STARTED = time.monotonic()
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jaxinfer.options import defaults  # noqa: E402
from jaxinfer.options.device_facts import facts_of  # noqa: E402
from jaxinfer.tools.planner.hardware import load as load_hardware  # noqa: E402
from scripts.device_kernels import Item, Record, check_items, kernel_items  # noqa: E402


def say(message: Record) -> None:
    print(json.dumps(message), flush=True)


def run_items(items: list[Item], skip: int, limit: float) -> None:
    """Works through `items` from the one after `skip` on, as `device_check.Child` has it."""
    say({"plan": [name for name, _ in items]})
    for name, work in items[skip:]:
        if time.monotonic() - STARTED > limit:
            return say({"stopped": "the time limit"})
        say({"begin": name})
        try:
            work(lambda record, name=name: say({"record": {"name": name} | record}))
        except NotImplementedError as error:
            say({"record": {"name": name, "result": "refused", "why": str(error)[:400]}})
        except Exception as error:  # whatever goes wrong is this item's result
            text = f"{type(error).__name__}: {error}"[:1500]
            where = "".join(traceback.format_tb(error.__traceback__)[-3:])
            say({"record": {"name": name, "result": "failed", "error": text, "where": where}})
            say({"end": name})
            jax.block_until_ready(jnp.zeros(8) + 1)  # a device that is gone ends this process, not every item
            continue
        say({"end": name})
    return None


def commit() -> str:
    """Of the checkout; "" where there is no git."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout.strip()
    except OSError:
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=("check", "kernels", "engine"), required=True)
    parser.add_argument("--hardware", default="auto")
    parser.add_argument("--implementation")
    parser.add_argument("--only", default="")
    parser.add_argument("--compile-cache")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--skip", type=int, default=0)
    parser.add_argument("--limit", type=float, default=170.0)
    args = parser.parse_args()
    if args.compile_cache:
        jax.config.update("jax_compilation_cache_dir", args.compile_cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    device = jax.devices()[0]
    choice = defaults.implementation(args.implementation or "auto", facts_of(device), "bfloat16", 128)
    hardware, why = None, ""
    if args.stage != "check":
        try:
            hardware = load_hardware(args.hardware)
        except ValueError as error:  # times are worth having without their share of the peak
            why = str(error)
    if args.skip == 0:
        facts = {
            "stage": args.stage,
            "device": device.device_kind,
            "jax": jax.__version__,
            "commit": commit(),
        }
        facts |= {"implementation": choice.value, "reason": choice.reason, "python": sys.version.split()[0]}
        facts["limits_of"] = hardware.title if hardware else why
        say({"record": facts})
    if args.stage == "check":
        items = check_items(args, device, choice.value)
    elif args.stage == "kernels":
        items = kernel_items(args, hardware, choice.value)
    else:
        # Here: kernels are checked without importing an engine.
        from scripts.device_engine import NANO, TINY_NANO, run_nano

        bench = TINY_NANO if args.tiny else NANO
        items = [("nano", partial(run_nano, bench, hardware, choice.value, STARTED + args.limit))]
    if not items:
        sys.exit(f"nothing has {args.only!r} in its name")
    run_items(items, args.skip, args.limit)
    sys.stdout.flush()
    os._exit(0)  # compilers that still work on what will not run are not waited for


if __name__ == "__main__":
    main()

"""What works on this machine's accelerator: one row per check, each with what it measured or what is missing.

    bash scripts/gpu_check.sh                          one CUDA device, a random Qwen2 of 0.5B parameters
    bash scripts/gpu_check.sh --tiny --device cpu      the same rows on a model of a few thousand parameters

A row ends as ``ok``, ``FAIL`` or ``SKIP``. Exit status: 0 when nothing failed, 1 when something did, 2 for a mistake.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

LIMIT_S = 480.0


def main(arguments: list[str] | None = None) -> int:
    """Run the rows and print the table; returns the exit status."""
    options = _options(arguments)
    missing = [name for name in ("torch", "transformers", "pydantic") if importlib.util.find_spec(name) is None]
    if missing:
        print(f"gpu_check: python package {missing[0]} is not installed for {sys.executable}", file=sys.stderr)
        return 2
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks for devices
    import gpu_rows
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if options.device == "cuda" and (accelerator is None or accelerator.type != "cuda"):
        print("gpu_check: torch sees no CUDA device; --device cpu tries the code on the CPU", file=sys.stderr)
        return 2
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore")
    started = time.monotonic()
    failed = False
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        setting = gpu_rows.Setting.prepare(Path(folder), options.tiny)
        print(f"{setting.describe()}\n{'row':<26} {'':<5} {'s':>6}  figures")
        for row in gpu_rows.ROWS:
            if options.only and options.only not in row.name:
                continue
            status = _run(row, setting, LIMIT_S - (time.monotonic() - started))
            failed |= status == "FAIL"
    print(f"{time.monotonic() - started:.0f} s in all")
    return 1 if failed else 0


def _run(row: Any, setting: Any, left_s: float) -> str:
    import torch
    from gpu_setting import Skip

    started = time.monotonic()
    missing = next((piece for need in row.needs if (piece := need(setting)) is not None), None)
    if missing is None and left_s <= 0:
        missing = f"time: the rows before took {LIMIT_S:.0f} s; --only {row.name.split()[0]!r} runs it alone"
    status, text = "SKIP", f"needs {missing}"
    if missing is None:
        try:
            if setting.device.is_accelerator:
                torch.cuda.reset_peak_memory_stats()
            status, text = "ok", row.check(setting)
        except Skip as skip:
            text = f"needs {skip}"
        except Exception as error:  # a table whose rows stop each other would say nothing about the rest
            place = traceback.extract_tb(error.__traceback__)[-1]
            status, text = "FAIL", f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"
        finally:
            gc.collect()
            if setting.device.is_accelerator:
                torch.cuda.empty_cache()
    print(f"{row.name:<26} {status:<5} {time.monotonic() - started:>6.1f}  {' '.join(text.split())}", flush=True)
    return status


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters instead of 0.5B")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where to run (default: cuda)")
    parser.add_argument("--only", metavar="WORD", help="run the rows whose name contains WORD")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())

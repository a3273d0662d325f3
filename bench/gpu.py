"""Everything about GPU blocks, on a machine that has one: checks first, then figures.

    python bench/gpu.py --path /mnt/nvme/bench --output bench/results/2026-11-29-gpu-h200.json

The parts, in this order unless --parts names some: `tests` (pytest -m gpu, memcheck included),
`copy` (copies alone), `whole` (stores and loads beside the simple way, on the disk and on tmpfs),
`latency` (loads beside stores), `products` (what compute keeps). The raw rows are the result; the
text that is printed is a digest. The exit status is 1 when a test failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_copy
import gpu_interference
import gpu_whole
import load_latency
import torch
from rig import open_rig, surroundings

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("tests", "copy", "whole", "latency", "products")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", type=Path, default=ROOT / "build/bench", help="on the disk")
    parser.add_argument("--memory-path", type=Path, default=Path("/dev/shm/kvdisk-bench"))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--seconds", type=float, default=1.0, help="of a phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shards", type=int, default=1)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def run_tests() -> dict[str, Any]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--durations=15",
        "-p",
        "no:cacheprovider",
        "tests/gpu",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print(done.stdout[-3000:], done.stderr[-2000:])
    return {"status": done.returncode, "summary": done.stdout.strip().splitlines()[-1:]}


def copy(arguments: argparse.Namespace) -> dict[str, Any]:
    seconds = min(arguments.seconds, 0.2)
    result = {"by_way": gpu_copy.by_way(seconds / 2), "as_shipped": gpu_copy.as_shipped(seconds)}
    for row in result["by_way"]:
        print_row(row, "segment", "way", "direction", "gb_per_s", "cpu_s_per_gb")
    for row in result["as_shipped"]:
        print_row(
            row, "segment", "direction", "in_flight", "gb_per_s", "cpu_s_per_gb", "us_per_copy"
        )
    return result


def whole(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for place, path in (("disk", arguments.path), ("tmpfs", arguments.memory_path)):
        for shape in gpu_whole.SHAPES:
            for row in gpu_whole.compare(
                path, shape, arguments.seconds, arguments.rounds, shards=arguments.shards
            ):
                rows.append({"place": place} | row)
                print_row(
                    rows[-1],
                    *("place", "shape", "direction", "gb_per_s", "staged_gb_per_s", "ratio"),
                    *("cpu_s_per_gb", "engine_cpu_s_per_gb", "staged_cpu_s_per_gb"),
                )
    return rows


def latency(arguments: argparse.Namespace) -> dict[str, Any]:
    """As bench/load_latency.py, with blocks on the GPU."""
    options = argparse.Namespace(
        block=2 << 20, blocks=8, pause=0.02, seconds=2 * arguments.seconds, rounds=3
    )
    result = {}
    for place, path in (("disk", arguments.path), ("tmpfs", arguments.memory_path)):
        with open_rig(
            path, block_bytes=2 << 20, slot_count=512, sources=64, targets=8, device="cuda"
        ) as rig:
            result[place] = load_latency.measure(rig, options) | surroundings(path, rig)
        print(place, json.dumps(result[place]))
    return result


def products(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for place, path in (("tmpfs", arguments.memory_path), ("disk", arguments.path)):
        for shape in (gpu_whole.SHAPES[0], gpu_whole.SHAPES[2]):
            for row in gpu_interference.measure(
                path, shape, arguments.seconds, arguments.rounds, shards=arguments.shards
            ):
                rows.append({"place": place} | row)
                print_row(rows[-1], "place", "shape", "direction", "kept", "gb_per_s_beside")
    return rows


def print_row(row: dict[str, Any], *names: str) -> None:
    print("  ".join(f"{row[name]!s:>8}" for name in names), flush=True)


def main() -> int:
    arguments = parse_arguments()
    wanted = arguments.parts.split(",")
    assert set(wanted) <= set(PARTS), f"the parts are {', '.join(PARTS)}"
    properties = torch.cuda.get_device_properties(0)
    document: dict[str, Any] = {
        "device": properties.name,
        "processors": os.cpu_count(),
        "kernel": platform.release(),
        "torch": torch.__version__,
        "seconds": arguments.seconds,
        "rounds": arguments.rounds,
        "shards": arguments.shards,
    }
    for part in PARTS:
        if part not in wanted:
            continue
        started = time.monotonic()
        print(f"== {part}", flush=True)
        document[part] = run_tests() if part == "tests" else globals()[part](arguments)
        print(f"== {part} took {time.monotonic() - started:.0f} s", flush=True)
        if arguments.output is not None:
            arguments.output.write_text(json.dumps(document, indent=1) + "\n")
    return 1 if document.get("tests", {}).get("status") else 0


if __name__ == "__main__":
    sys.exit(main())

"""Copies alone, between a GPU and a bounce ring: by which way, in which segments, at what cost."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from kvdisk import _native
from kvdisk.layout import Layout

_BLOCK_BYTES = 2 << 20
_BLOCKS = 256
_ALWAYS = 1 << 40

SEGMENTS = [1 << power for power in range(12, 22)]  # 4 KiB to 2 MiB


@dataclass(frozen=True)
class Way:
    name: str
    kernel_below_bytes: int
    ctas: int = 4
    batched: bool = True


WAYS = [
    *(Way(f"kernel, {ctas} CTAs", _ALWAYS, ctas) for ctas in (2, 4, 8)),
    Way("batched copies", 0),
    Way("single copies", 0, batched=False),
]


def job_for(segment_bytes: int, way: Way | None, buffers: int = 64) -> tuple[Any, Any]:
    """A job over 512 MiB of blocks, each one in segments of its own tensors; and those tensors."""
    layers = max(1, _BLOCK_BYTES // segment_bytes)
    tensors = torch.zeros((layers, _BLOCKS, segment_bytes), dtype=torch.uint8, device="cuda")
    layout = Layout.from_tensors(list(tensors))
    options = _native.CopyJobOptions()
    options.set_layout(
        [(r.address, r.block_stride_bytes, r.segment_bytes) for r in layout.regions],
        layout.block_count,
    )
    options.device = layout.device
    options.buffers = buffers
    if way is not None:
        options.kernel_below_bytes = way.kernel_below_bytes
        options.kernel_ctas_max = way.ctas
        options.batched = way.batched
    return _native.CopyJob(options), tensors


def run(job: Any, direction: str, seconds: float) -> dict[str, float]:
    gathers, scatters = direction != "in", direction != "out"
    before = time.process_time()
    result = job.run(gathers, scatters, int(seconds * 1e9))
    cpu_s = time.process_time() - before
    assert result["errors"] == 0
    gigabytes = result["bytes"] / 1e9
    return {
        "gb_per_s": round(result["bytes"] / result["elapsed_ns"], 2),
        "cpu_s_per_gb": round(cpu_s / gigabytes, 5),
        "us_per_copy": round(result["elapsed_ns"] / 1000 / result["copies"], 2),
    }


def by_way(seconds: float) -> list[dict[str, Any]]:
    """Every way at every segment size, out of the device and into it."""
    rows = []
    for segment_bytes in SEGMENTS:
        for way in WAYS:
            job, tensors = job_for(segment_bytes, way)
            for direction in ("out", "in"):
                run(job, direction, 0.02)
                rows.append(
                    {"segment": segment_bytes, "way": way.name, "direction": direction}
                    | run(job, direction, seconds)
                )
            del job, tensors
    return rows


def as_shipped(seconds: float) -> list[dict[str, Any]]:
    """The copier's own choice; one way, and both at once; and one copy at a time."""
    rows = []
    for segment_bytes in SEGMENTS:
        for direction in ("out", "in", "both"):
            for in_flight in (64, 1):
                if in_flight == 1 and direction == "both":
                    continue
                job, tensors = job_for(segment_bytes, None, in_flight)
                run(job, direction, 0.02)
                rows.append(
                    {
                        "segment": segment_bytes,
                        "way": job.note,
                        "direction": direction,
                        "in_flight": in_flight,
                    }
                    | run(job, direction, seconds)
                )
                del job, tensors
    return rows

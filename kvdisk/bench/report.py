"""What a measurement says: a table for people, and JSON that readers of fio's JSON understand.

The JSON has fio's names, nesting and units (``jobs[0].read.bw_bytes``, ``clat_ns.percentile``, ...)
with ours beside them: ``kvdisk`` says what was measured and how, ``compare`` the ratios. Units are
exact: MB is 10^6 bytes, MiB 2^20; fio's ``bw`` is KiB/s.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from typing import Any, Final

from kvdisk import __version__
from kvdisk.bench.job import Job
from kvdisk.bench.result import (
    DIRECTIONS,
    Comparison,
    DirectionName,
    Latency,
    Round,
    sum_rounds,
)
from kvdisk.bench.session import Outcome
from kvdisk.units import display_size, format_size

_KIB: Final = 1024
_SHOWN_PERCENTILES: Final = (50.0, 95.0, 99.0, 99.9)


def warnings_of(outcome: Outcome) -> list[str]:
    """Whatever keeps the numbers from being the disk's own; empty is good."""
    found = []
    if outcome.place.is_memory:
        found.append(
            f"{outcome.place.file_system} is memory, not a disk: these are not a disk's numbers"
        )
    if not outcome.mode.direct:
        what = []
        if outcome.job.reads:
            what.append("reads begin cold and are answered from memory once they come round again")
        if outcome.job.writes:
            what.append("writes include the final sync")
        found.append(f"through the page cache ({outcome.mode.reason}): {'; '.join(what)}")
    if outcome.facts.backend_reason:
        found.append(f"backend {outcome.facts.backend}: {outcome.facts.backend_reason}")
    if outcome.facts.backend == "uring" and not outcome.facts.buffers_registered:
        found.append("the buffers are not registered with io_uring")
    found.extend(outcome.job.notes)
    found.extend(outcome.facts.notes)
    verdict = outcome.verdict
    if verdict is None:
        found.append("what was written was not read back (--no-verify)")
    elif verdict.wrong:
        found.append(f"WRONG DATA: {verdict.wrong} blocks are not what was written")
    return found


def cache_state(outcome: Outcome) -> str:
    """How the page cache took part: "bypassed", "cold start" or "write back and sync"."""
    if outcome.mode.direct:
        return "bypassed"
    return "cold start" if outcome.job.reads else "written back and synced in the timed part"


# For people --------------------------------------------------------------------------------------


def text_rows(outcome: Outcome) -> list[tuple[str, str]]:
    """``(label, text)`` line by line; the caller lays them out."""
    job, facts, total = outcome.job, outcome.facts, sum_rounds(outcome.rounds)
    rows = [
        ("job", describe_job(job)),
        (
            "host",
            f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors, Linux "
            f"{platform.release()}",
        ),
        ("file system", f"{outcome.place.file_system} on {outcome.place.disk}"),
        ("mode", _mode(outcome)),
        (
            "backend",
            f"{facts.backend}, buffers {_registered(facts.buffers_registered)}, files "
            f"{_registered(facts.files_registered)}, buffers of {display_size(facts.ring_bytes)}",
        ),
        ("data", _data(outcome)),
    ]
    if facts.copier:
        rows.insert(5, ("device", f"{job.device}, copied by {facts.copier}"))
    for name in DIRECTIONS:
        if not total.ios[name]:
            continue
        rows.append((name, _speed(total, name)))
        rows.append(("  I/O latency", _percentiles_text(facts.latency[name])))
        if name in facts.row_latency:
            rows.append(("  with queueing", _percentiles_text(facts.row_latency[name])))
    rows.append(("CPU", _cpu(outcome, total)))
    rows.append(
        (
            "ring",
            f"{facts.ring_occupancy:.0%} occupied, {facts.in_flight:.1f} I/Os in flight on average",
        )
    )
    for comparison in outcome.comparisons:
        rows.extend(_comparison_rows(comparison))
    rows.extend(("note", text) for text in warnings_of(outcome))
    return rows


def describe_job(job: Job) -> str:
    text = f"{job.layer}, {job.rw}"
    if job.reads and job.writes:
        text += f" ({job.read_percent}% reads)"
    text += f", bs {format_size(job.io_bytes)}"
    if job.layer == "whole":
        text += (
            f" = {job.geometry.layers} x {format_size(job.geometry.segment_bytes)}"
            f" ({job.geometry.source})"
        )
    text += f", iodepth {job.iodepth}, numjobs {job.numjobs}, size {format_size(job.file_bytes)}"
    return f"{text}, {job.rounds} x {job.runtime_ns / 1e9:g} s"


def _mode(outcome: Outcome) -> str:
    mode = outcome.mode
    name = "O_DIRECT" if mode.direct else "buffered"
    reason = mode.reason.removeprefix("O_DIRECT, ")
    return f"{name} ({reason}), alignment {mode.alignment}, page cache {cache_state(outcome)}"


def _data(outcome: Outcome) -> str:
    text = "unique, incompressible"
    if outcome.verdict is None:
        return f"{text}, not verified"
    verdict = outcome.verdict
    return f"{text}; read back {verdict.checked} of {verdict.total} blocks, {verdict.wrong} wrong"


def _registered(yes: bool) -> str:
    return "registered" if yes else "not registered"


def _speed(total: Round, name: DirectionName) -> str:
    bandwidth = total.bandwidth(name)
    return (
        f"{bandwidth / 1e6:.1f} MB/s ({bandwidth / 2**20:.1f} MiB/s), {total.iops(name):.0f} IOPS, "
        f"{display_size(total.bytes[name])} in {total.elapsed_ns / 1e9:.2f} s"
    )


def _percentiles_text(latency: Latency) -> str:
    parts = [f"mean {_time(latency.mean)}"]
    parts += [f"p{p:g} {_time(latency.percentiles.get(p, 0))}" for p in _SHOWN_PERCENTILES]
    return ", ".join([*parts, f"max {_time(latency.most)}"])


def _time(ns: float) -> str:
    if ns >= 1e9:
        return f"{ns / 1e9:.2f} s"
    return f"{ns / 1e6:.2f} ms" if ns >= 1e6 else f"{ns / 1e3:.0f} us"


def _cpu(outcome: Outcome, total: Round) -> str:
    moved = sum(total.bytes.values())
    if not moved:
        return "nothing moved"
    text = (
        f"{total.cpu_seconds_per_gb():.3f} s per GB (user {total.cpu_user_ns / moved:.3f}, system "
        f"{total.cpu_system_ns / moved:.3f})"
    )
    if outcome.facts.engine_cpu_ns is not None:
        text += f", {outcome.facts.engine_cpu_ns / moved:.3f} of it in the I/O loop"
    return text


def _comparison_rows(comparison: Comparison) -> list[tuple[str, str]]:
    rows = []
    name = comparison.name
    label = name if name == "fio" else f"{name}, depth 1"
    total = sum_rounds(comparison.rounds)
    for direction in DIRECTIONS:
        ratio = comparison.ratio(direction)
        if ratio is None:
            continue
        each = comparison.ratios[direction]
        rows.append((label, f"{direction} {_speed(total, direction)}"))
        rows.append(
            (
                "  ratio",
                f"{direction} {ratio:.3f} (median of {len(each)} rounds, {min(each):.3f} to "
                f"{max(each):.3f})",
            )
        )
    if total.cpu_seconds_per_gb():
        rows.append(("  CPU", f"{total.cpu_seconds_per_gb():.3f} s per GB"))
    return rows


# For programs ------------------------------------------------------------------------------------


def as_json(outcome: Outcome) -> dict[str, Any]:
    """A document in the shape of ``fio --output-format=json``, with ``kvdisk`` and ``compare``."""
    now = time.time()
    return {
        "fio version": f"kvdisk-{__version__}",
        "timestamp": int(now),
        "timestamp_ms": int(now * 1000),
        "time": time.strftime("%a %b %d %H:%M:%S %Y", time.localtime(now)),
        "jobs": [_job_json(outcome)],
        "kvdisk": _kvdisk_json(outcome),
        "compare": {each.name: _comparison_json(each) for each in outcome.comparisons},
    }


def _job_json(outcome: Outcome) -> dict[str, Any]:
    job, total = outcome.job, sum_rounds(outcome.rounds)
    elapsed_s = total.elapsed_ns / 1e9
    return {
        "jobname": f"kvdisk-{job.layer}",
        "groupid": 0,
        "error": 0,
        "eta": 0,
        "elapsed": round(elapsed_s),
        "job options": {
            "name": f"kvdisk-{job.layer}",
            "directory": str(job.path),
            "rw": job.rw,
            "rwmixread": str(job.read_percent),
            "bs": str(job.io_bytes),
            "size": str(job.size_bytes),
            "iodepth": str(job.iodepth),
            "numjobs": str(job.numjobs),
            "ioengine": outcome.facts.backend,
            "direct": str(int(outcome.mode.direct)),
            "runtime": f"{job.runtime_ns // 1_000_000}ms",
        },
        **{name: _direction_json(outcome, total, name) for name in DIRECTIONS},
        "trim": _direction_json(outcome, Round({}, {}, 0, 0, 0), None),
        "job_runtime": round(total.elapsed_ns / 1e6),
        "usr_cpu": total.cpu_user_ns / total.elapsed_ns * 100 if total.elapsed_ns else 0.0,
        "sys_cpu": total.cpu_system_ns / total.elapsed_ns * 100 if total.elapsed_ns else 0.0,
    }


def _direction_json(outcome: Outcome, total: Round, name: DirectionName | None) -> dict[str, Any]:
    bandwidth = total.bandwidth(name) if name else 0.0
    moved = total.bytes[name] if name else 0
    latency = outcome.facts.latency.get(name, Latency()) if name else Latency()
    rows = outcome.facts.row_latency.get(name, latency) if name else Latency()
    each = [one.bandwidth(name) / _KIB for one in outcome.rounds] if name and moved else []
    return {
        "io_bytes": moved,
        "io_kbytes": moved // _KIB,
        "bw_bytes": round(bandwidth),
        "bw": round(bandwidth / _KIB),
        "iops": total.iops(name) if name else 0.0,
        "runtime": round(total.elapsed_ns / 1e6) if moved else 0,
        "total_ios": total.ios[name] if name else 0,
        "short_ios": outcome.facts.short_ios.get(name, 0) if name else 0,
        "drop_ios": 0,
        "slat_ns": latency_json(Latency()),
        "clat_ns": latency_json(latency),
        "lat_ns": latency_json(rows),
        "bw_min": round(min(each, default=0.0)),
        "bw_max": round(max(each, default=0.0)),
        "bw_mean": sum(each) / len(each) if each else 0.0,
        "bw_samples": len(each),
    }


def latency_json(latency: Latency) -> dict[str, Any]:
    """As fio writes it: nanoseconds, percentiles keyed by text of six decimals."""
    document: dict[str, Any] = {
        "min": latency.least,
        "max": latency.most,
        "mean": latency.mean,
        "stddev": latency.deviation,
        "N": latency.count,
    }
    if latency.count:
        document["percentile"] = {
            f"{percent:.6f}": value for percent, value in latency.percentiles.items()
        }
    return document


def _short_latency_json(latency: Latency) -> dict[str, Any]:
    """What is worth keeping of each round."""
    document = latency_json(latency)
    kept = {f"{percent:.6f}" for percent in _SHOWN_PERCENTILES}
    if latency.count:
        document["percentile"] = {
            percent: value for percent, value in document["percentile"].items() if percent in kept
        }
    return document


def _kvdisk_json(outcome: Outcome) -> dict[str, Any]:
    job, facts, total = outcome.job, outcome.facts, sum_rounds(outcome.rounds)
    return {
        "version": __version__,
        "layer": job.layer,
        "geometry": {
            "layers": job.geometry.layers,
            "segment_bytes": job.geometry.segment_bytes,
            "block_bytes": job.geometry.block_bytes,
            "source": job.geometry.source,
        },
        "io_bytes": job.io_bytes,
        "seed": job.seed,
        "host": {
            "processors": len(os.sched_getaffinity(0)),
            "machine": platform.machine(),
            "kernel": platform.release(),
        },
        "place": {
            "file_system": outcome.place.file_system,
            "mount_point": outcome.place.mount_point,
            "mount_options": outcome.place.mount_options,
            "disk": outcome.place.disk,
            "is_memory": outcome.place.is_memory,
        },
        "mode": {
            "direct": outcome.mode.direct,
            "alignment": outcome.mode.alignment,
            "reason": outcome.mode.reason,
            "page_cache": cache_state(outcome),
        },
        "backend": {
            "name": facts.backend,
            "reason": facts.backend_reason,
            "buffers_registered": facts.buffers_registered,
            "files_registered": facts.files_registered,
        },
        "device": {"name": job.device, "copier": facts.copier},
        "ring": {
            "bytes": facts.ring_bytes,
            "occupancy": facts.ring_occupancy,
            "ios_in_flight": facts.in_flight,
        },
        "cpu": {
            "seconds_per_gb": total.cpu_seconds_per_gb(),
            "loop_seconds_per_gb": _per_byte(facts.engine_cpu_ns, total),
        },
        "verify": (
            None
            if outcome.verdict is None
            else {
                "blocks_checked": outcome.verdict.checked,
                "blocks_wrong": outcome.verdict.wrong,
                "blocks_total": outcome.verdict.total,
            }
        ),
        "rounds": [_round_json(each) for each in outcome.rounds],
        "warnings": warnings_of(outcome),
    }


def _per_byte(cpu_ns: int | None, total: Round) -> float | None:
    moved = sum(total.bytes.values())
    return None if cpu_ns is None or not moved else cpu_ns / moved


def _comparison_json(comparison: Comparison) -> dict[str, Any]:
    return {
        "ratio": {name: comparison.ratio(name) for name in DIRECTIONS},
        "ratios": {name: list(comparison.ratios[name]) for name in DIRECTIONS},
        "command": list(comparison.command),
        "rounds": [_round_json(each) for each in comparison.rounds],
        "cpu": {"seconds_per_gb": sum_rounds(comparison.rounds).cpu_seconds_per_gb()},
    }


def _round_json(one: Round) -> dict[str, Any]:
    document: dict[str, Any] = {"runtime": one.elapsed_ns / 1e6}
    for name in DIRECTIONS:
        latency = one.latency.get(name)
        document[name] = {
            "io_bytes": one.bytes[name],
            "bw_bytes": round(one.bandwidth(name)),
            "iops": one.iops(name),
            "clat_ns": _short_latency_json(latency) if latency else {},
        }
    return document


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Rows as aligned plain text."""
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)

"""What a replay says: a document for programs, and from that the text for people.

Shares are of all block references, or of all prompt tokens where the name says so. Bytes are exact,
times in seconds or milliseconds as their names say.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from kvdisk import __version__
from kvdisk.bench.report import latency_json
from kvdisk.bench.result import cpu_times_ns
from kvdisk.replay.job import ReplayJob
from kvdisk.replay.result import Outcome
from kvdisk.replay.session import Curve, Replayed, Run
from kvdisk.replay.ttft import Ttft
from kvdisk.units import display_size, format_size

_NS_PER_MS: Final = 1e6
# Of the most that any capacity gives, what a recommendation is content with.
_ENOUGH: Final = 0.9
_NOTEWORTHY: Final = 1.02  # times the mean without a tier: less may be chance


def as_document(replayed: Replayed) -> dict[str, Any]:
    """JSON-ready. ``runs`` in the order of capacity, ``curves`` one for each policy."""
    job, trace, place = replayed.job, replayed.job.trace, replayed.place
    return {
        "kvdisk": {
            "version": __version__,
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "host": {
                "processors": len(os.sched_getaffinity(0)),
                "machine": platform.machine(),
                "kernel": platform.release(),
                "python": platform.python_version(),
            },
            "place": None
            if place is None
            else {
                "file_system": place.file_system,
                "disk": place.disk,
                "is_memory": place.is_memory,
                **_mode(replayed.runs[0].outcome.facts),
            },
            "cpu_seconds": sum(cpu_times_ns()) / 1e9,
        },
        "replay": {
            "trace": trace.source,
            "requests": len(trace),
            "references": trace.references,
            "distinct_blocks": trace.distinct_blocks,
            "input_tokens": int(trace.input_tokens.sum()),
            "span_s": trace.span_s,
            "block_tokens": trace.block_tokens,
            "block_bytes": job.block_bytes,
            "block_source": job.geometry.source,
            "working_set_bytes": job.working_set_bytes,
            "speed": job.speed or "max",
            "prefill_rate": job.prefill_rate,
            "load_rate": job.load_rate,
            "partial_loads": job.partial_loads,
            "device_blocks": job.device_blocks,
            "verify": job.verify,
            "seed": job.seed,
        },
        "without": _ttft(replayed.without),
        "runs": [_run(job, run) for run in replayed.runs],
        "curves": [_curve(curve) for curve in replayed.curves],
    }


def _mode(facts: Mapping[str, object]) -> dict[str, object]:
    return {name: facts[name] for name in ("backend", "backend_reason", "direct", "direct_reason")}


def _run(job: ReplayJob, run: Run) -> dict[str, Any]:
    outcome = run.outcome
    setup = outcome.setup
    return {
        "capacity_bytes": setup.capacity_bytes,
        "slots": setup.slots,
        "policy": setup.policy,
        "eviction": setup.eviction,
        "admission": setup.admission,
        "simulated": outcome.simulated,
        **_hits(job, outcome),
        "bytes_read": outcome.blocks_read * job.block_bytes,
        "bytes_written": outcome.blocks_written * job.block_bytes,
        "load_ms": {
            "p50": outcome.load_percentile_ns(50) / _NS_PER_MS,
            "p99": outcome.load_percentile_ns(99) / _NS_PER_MS,
        },
        "block_load_ns": latency_json(outcome.block_load),
        "ttft": _ttft(run.ttft),
        "loaded_share": run.ttft.loaded_tokens / max(1, int(outcome.hit_tokens(job.trace).sum())),
        "refused": dict(outcome.refused),
        "lost": dict(outcome.lost),
        "evicted": outcome.evicted,
        "verified": outcome.verified,
        "wrong": outcome.wrong,
        "elapsed_s": outcome.elapsed_s,
        "references_per_s": job.trace.references / max(outcome.elapsed_s, 1e-9),
        "simulation": {
            **_hits(job, run.simulated),
            "references_per_s": job.trace.references / max(run.simulated.elapsed_s, 1e-9),
        },
        "doubled": _hits(job, run.doubled),
    }


def _hits(job: ReplayJob, outcome: Outcome) -> dict[str, Any]:
    trace = job.trace
    tokens = int(trace.input_tokens.sum())
    return {
        "hit_blocks": outcome.blocks_read,
        "hit_share": outcome.blocks_read / trace.references,
        "hit_token_share": int(outcome.hit_tokens(trace).sum()) / tokens,
        "device_hit_share": int(outcome.device_blocks.sum()) / trace.references,
    }


def _ttft(ttft: Ttft) -> dict[str, float]:
    return {
        "mean_s": ttft.mean_s,
        "p50_s": ttft.p50_s,
        "p99_s": ttft.p99_s,
        "prefill_busy": ttft.busy,
    }


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "policy": curve.policy,
        "exact": curve.exact,
        "points": [
            {
                "capacity_bytes": point.capacity_bytes,
                "hit_share": point.hit_share,
                "hit_token_share": point.hit_token_share,
            }
            for point in curve.points
        ],
    }


# For people --------------------------------------------------------------------------------------


def as_text(document: Mapping[str, Any]) -> str:
    """Facts, a table with a line for each run, and what another size would give."""
    parts = [_aligned(_facts(document)), _table(document), "\n".join(_advice(document))]
    notes = [f"note: {note}" for note in _notes(document)]
    return "\n\n".join(part for part in [*parts, "\n".join(notes)] if part)


def _facts(document: Mapping[str, Any]) -> list[list[str]]:
    about, place, without = document["replay"], document["kvdisk"]["place"], document["without"]
    rows = [
        [
            "trace",
            f"{about['trace']}: {about['requests']} requests in {about['span_s']:.0f} s, "
            f"{about['references']} blocks asked for, {about['distinct_blocks']} different",
        ],
        [
            "block",
            f"{about['block_tokens']} tokens, {format_size(about['block_bytes'])} "
            f"({about['block_source']}); all different ones "
            f"{display_size(about['working_set_bytes'])}",
        ],
    ]
    if place is not None:
        direct = "O_DIRECT" if place["direct"] else f"no O_DIRECT ({place['direct_reason']})"
        rows.append(
            ["disk", f"{place['file_system']} on {place['disk']}, {direct}, {place['backend']}"]
        )
        speed = about["speed"]
        pace = "one after another" if speed == "max" else f"at {speed:g} times the trace's speed"
        verified = "every loaded byte compared" if about["verify"] else "loads not compared"
        rows.append(["replayed", f"{pace}, {verified}"])
    else:
        rows.append(["simulated", f"no I/O; loads at {display_size(about['load_rate'])}/s"])
    if about["device_blocks"]:
        rows.append(["device", f"LRU cache of {about['device_blocks']} blocks before the tier"])
    rows.append(
        [
            "no tier",
            f"TTFT mean {_seconds(without['mean_s'])}, p99 {_seconds(without['p99_s'])}, prefill "
            f"at {about['prefill_rate']:g} tokens/s {_percent(without['prefill_busy'])} busy",
        ]
    )
    return rows


def _table(document: Mapping[str, Any]) -> str:
    device = bool(document["replay"]["device_blocks"])
    head = ["capacity", "policy", "hits", "of tokens", "read", "written", "load p50", "p99"]
    head += ["loaded", "TTFT mean", "p99", "busy", "refused", "evicted"]
    if device:
        head.insert(2, "device")
    rows = [head]
    for run in document["runs"]:
        row = [
            display_size(run["capacity_bytes"]),
            run["policy"],
            _percent(run["hit_share"]),
            _percent(run["hit_token_share"]),
            display_size(run["bytes_read"]),
            display_size(run["bytes_written"]),
            _short(run["load_ms"]["p50"]),
            _short(run["load_ms"]["p99"]),
            _percent(run["loaded_share"]),
            _seconds(run["ttft"]["mean_s"]),
            _seconds(run["ttft"]["p99_s"]),
            _percent(run["ttft"]["prefill_busy"]),
            str(sum(run["refused"].values())),
            str(run["evicted"]),
        ]
        if device:
            row.insert(2, _percent(run["device_hit_share"]))
        rows.append(row)
    return _aligned(rows)


def _advice(document: Mapping[str, Any]) -> list[str]:
    """What twice the disk would give, and how much is enough."""
    lines = []
    for run in document["runs"]:
        here, there = run["simulation"]["hit_share"], run["doubled"]["hit_share"]
        gain = f"{100 * (there - here):+.1f} points of hits"
        lines.append(
            f"{run['policy']}, {display_size(run['capacity_bytes'])}: twice the disk would give "
            f"{gain} ({_percent(here)} -> {_percent(there)})"
        )
    for curve in document["curves"]:
        points = curve["points"]
        if not points:
            continue
        most = max(point["hit_share"] for point in points)
        enough = next(point for point in points if point["hit_share"] >= _ENOUGH * most)
        lines.append(
            f"{curve['policy']}: {100 * _ENOUGH:.0f} % of the most hits ({_percent(most)}) at "
            f"{display_size(enough['capacity_bytes'])}"
        )
    return lines


def _notes(document: Mapping[str, Any]) -> list[str]:
    """Whatever keeps the figures from being what they seem; empty is good."""
    notes = []
    about, place, runs = document["replay"], document["kvdisk"]["place"], document["runs"]
    if place is not None and place["is_memory"]:
        notes.append(f"{place['file_system']} is memory, not a disk: these are no disk's times")
    if about["block_source"] == "as given":
        notes.append(
            "the block's size is as given, not a model's: hits hold for as many blocks of any "
            "size, load times and TTFT for this size alone"
        )
    if document["without"]["prefill_busy"] >= 1:
        notes.append(
            "without the tier prefill cannot keep up with the trace: its queue, and TTFT, grow for "
            "as long as the trace lasts"
        )
    least_s = _NOTEWORTHY * document["without"]["mean_s"]
    if any(run["ttft"]["mean_s"] > least_s for run in runs):
        notes.append(
            "here the first token comes later with the tier: the disk takes longer to load a hit "
            "than --prefill-rate to compute it, or cannot keep up with the trace; with "
            "--partial-loads auto a part of it is computed then, as in vLLM"
            if about["partial_loads"] == "off"
            else "here the first token comes later with the tier: what was to come, or how fast "
            "the disk is, turned out otherwise than the planner expected"
        )
    if place is not None and not about["verify"]:
        notes.append("what was loaded was not compared (--no-verify)")
    for run in runs:
        name = f"{run['policy']}, {display_size(run['capacity_bytes'])}"
        if run["wrong"]:
            notes.append(f"WRONG DATA: {name}: {run['wrong']} blocks are not what was stored")
        if run["lost"]:
            lost = ", ".join(f"{count} {reason}" for reason, count in run["lost"].items())
            notes.append(f"{name}: blocks found and not loaded: {lost}")
        apart = abs(run["hit_share"] - run["simulation"]["hit_share"])
        if apart > 0.005:
            notes.append(f"{name}: {_percent(apart)} of hits apart from its simulation")
    return notes


def wrong_blocks(document: Mapping[str, Any]) -> int:
    """Over all runs."""
    return sum(run["wrong"] for run in document["runs"])


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _short(milliseconds: float) -> str:
    return f"{milliseconds:.1f} ms" if milliseconds < 10_000 else _seconds(milliseconds / 1000)


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"

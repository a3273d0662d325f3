"""A picture of a replay: hit rate and time to first token against capacity, a colour a policy.

Reads the document of ``report``, so that pictures can be drawn from kept results.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvdisk.bench.plot import COLOURS, label_log_axis, label_sizes, require_drawable, save
from kvdisk.errors import ConfigError
from kvdisk.units import display_size


def draw(document: Mapping[str, Any], file: Path, name: str = "this") -> None:
    """Write ``file`` (PNG or SVG). Raises ConfigError, which names the document, if not."""
    require_drawable(file)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5.8), dpi=120, layout="constrained")
    hits, ttft = figure.subplots(1, 2, sharex=True)
    try:
        policies = list(dict.fromkeys(run["policy"] for run in document["runs"]))
        for policy, colour in zip(policies, COLOURS * len(policies), strict=False):
            _draw_hits(hits, document, policy, colour)
            _draw_ttft(ttft, document, policy, colour)
        without = document["without"]
        for name, style in (("mean", "-"), ("p99", "--")):
            ttft.axhline(
                without[f"{name}_s"], color="0.4", linestyle=style, label=f"no tier, {name}"
            )
        working_set = document["replay"]["working_set_bytes"]
        title = _title(document)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"{name}: not a result of kvdisk replay: {error} is missing or odd."
        ) from error
    hits.set_ylabel("hits, % of all blocks asked for")
    hits.set_ylim(bottom=0)
    ttft.set_ylabel("modelled time to first token, s")
    label_log_axis(ttft)
    for axis in (hits, ttft):
        axis.set_xscale("log", base=2)
        axis.set_xlabel("capacity of the tier")
        label_sizes(axis, _powers_of_two(document))
        axis.axvline(working_set, color="0.7", linestyle=":", label="all different blocks")
        axis.grid(alpha=0.3)
        axis.legend(fontsize="small", framealpha=0.9)
    figure.suptitle(title)
    save(figure, file)


def _draw_hits(axis: Any, document: Mapping[str, Any], policy: str, colour: str) -> None:
    for curve in document["curves"]:
        if curve["policy"] != policy:
            continue
        style = {"linestyle": "-"} if curve["exact"] else {"linestyle": "--", "marker": "."}
        axis.plot(
            [point["capacity_bytes"] for point in curve["points"]],
            [100 * point["hit_share"] for point in curve["points"]],
            color=colour,
            label=f"{policy}, curve {'(exact)' if curve['exact'] else '(simulated)'}",
            **style,
        )
    runs = [run for run in document["runs"] if run["policy"] == policy]
    kind = "runs (simulated)" if runs[0]["simulated"] else "runs on the disk"
    axis.plot(
        [run["capacity_bytes"] for run in runs],
        [100 * run["hit_share"] for run in runs],
        color=colour,
        marker="o",
        markersize=9,
        fillstyle="none",
        linestyle="",
        label=f"{policy}, {kind}",
    )


def _draw_ttft(axis: Any, document: Mapping[str, Any], policy: str, colour: str) -> None:
    runs = [run for run in document["runs"] if run["policy"] == policy]
    for name, style in (("mean", "-"), ("p99", "--")):
        axis.plot(
            [run["capacity_bytes"] for run in runs],
            [run["ttft"][f"{name}_s"] for run in runs],
            color=colour,
            marker="o",
            linestyle=style,
            label=f"{policy}, {name}",
        )


def _powers_of_two(document: Mapping[str, Any]) -> list[int]:
    """Those within what is drawn, eight at most."""
    sizes = [run["capacity_bytes"] for run in document["runs"]]
    sizes += [each["capacity_bytes"] for curve in document["curves"] for each in curve["points"]]
    low, high = min(sizes).bit_length() - 1, max(sizes).bit_length()
    step = max(1, -(-(high - low) // 7))
    return [1 << power for power in range(low, high + 1, step)]


def _title(document: Mapping[str, Any]) -> str:
    about, place = document["replay"], document["kvdisk"]["place"]
    where = "simulated" if place is None else f"{place['file_system']} on {place['disk']}"
    device = f", device cache of {about['device_blocks']} blocks" if about["device_blocks"] else ""
    return (
        f"{about['trace']}: {about['requests']} requests, {about['references']} blocks of "
        f"{display_size(about['block_bytes'])} ({about['block_tokens']} tokens){device}\n"
        f"{where}; prefill {about['prefill_rate']:g} tokens/s"
    )

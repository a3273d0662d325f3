"""Pictures of results: bandwidth and p99 latency against block size, a line for each depth.

Reads the JSON of ``kvdisk bench``, so that pictures can be drawn from kept results. matplotlib is
optional and imported only here.
"""

from __future__ import annotations

import importlib.util
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvdisk.bench.result import DIRECTIONS
from kvdisk.errors import ConfigError
from kvdisk.units import format_size

_FORMATS: Final = (".png", ".svg")
_P99: Final = "99.000000"
# Okabe and Ito's colours, which colour-blind people can tell apart.
COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


@dataclass(frozen=True)
class _Point:
    """One job in one direction. Bandwidths in bytes per second, latency in nanoseconds."""

    layer: str
    direction: str
    block_bytes: int
    depth: int
    bandwidth: float
    p99_ns: float
    fio_bandwidth: float | None
    fio_p99_ns: float | None


def require_drawable(file: Path) -> None:
    """Raises ConfigError when matplotlib or the kind of file is not to be had."""
    if file.suffix.lower() not in _FORMATS:
        raise ConfigError(f"{file}: the name must end in {' or '.join(_FORMATS)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("drawing needs matplotlib: pip install 'kvdisk[plot]'.")


def draw(documents: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write ``file`` (PNG or SVG). Raises ConfigError for documents that are no bench results."""
    require_drawable(file)
    points = [point for document in documents for point in _points(document)]
    if not points:
        raise ConfigError("nothing to draw: the results hold no bytes moved.")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    columns = sorted({(point.direction, point.layer) for point in points})
    figure = Figure(figsize=(4.2 * len(columns) + 1.2, 7.2), layout="constrained")
    axes = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="row")
    depths = sorted({point.depth for point in points})
    for column, (direction, layer) in enumerate(columns):
        chosen = [p for p in points if (p.direction, p.layer) == (direction, layer)]
        _draw_column(axes[0][column], axes[1][column], chosen, depths)
        axes[0][column].set_title(f"{direction}, {layer} layer")
    axes[0][0].set_ylabel("bandwidth, MB/s")
    axes[1][0].set_ylabel("p99 latency of one I/O, ms")
    sizes = sorted({point.block_bytes for point in points})
    for axis in axes[1]:
        axis.set_xlabel("block size")
        axis.set_xticks(sizes, [format_size(size) for size in sizes])
        axis.minorticks_off()
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    figure.suptitle(_title(documents), fontsize="small")
    try:
        figure.savefig(file, dpi=120)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror}.") from error


def _draw_column(above: Any, below: Any, points: Sequence[_Point], depths: Sequence[int]) -> None:
    by_depth: dict[int, list[_Point]] = defaultdict(list)
    for point in sorted(points, key=lambda each: each.block_bytes):
        by_depth[point.depth].append(point)
    for depth, line in by_depth.items():
        colour = COLOURS[depths.index(depth) % len(COLOURS)]
        ours = {"color": colour, "marker": "o", "label": f"kvdisk, depth {depth}"}
        fio = {"color": colour, "marker": "x", "linestyle": "--", "label": f"fio, depth {depth}"}
        sizes = [point.block_bytes for point in line]
        above.plot(sizes, [point.bandwidth / 1e6 for point in line], **ours)
        below.plot(sizes, [point.p99_ns / 1e6 for point in line], **ours)
        beside = [point for point in line if point.fio_bandwidth is not None]
        sizes = [point.block_bytes for point in beside]
        if beside:
            above.plot(sizes, [(p.fio_bandwidth or 0) / 1e6 for p in beside], **fio)
            below.plot(sizes, [(p.fio_p99_ns or 0) / 1e6 for p in beside], **fio)
    for axis in (above, below):
        axis.set_xscale("log", base=2)
        axis.grid(alpha=0.3)
    above.set_ylim(bottom=0)
    below.set_yscale("log")


def _points(document: Mapping[str, Any]) -> list[_Point]:
    try:
        job, layer = document["jobs"][0], document["kvdisk"]["layer"]
        options = job["job options"]
        fio = document.get("compare", {}).get("fio")
        found = []
        for direction in DIRECTIONS:
            figures = job[direction]
            if not figures["io_bytes"]:
                continue
            beside = [each[direction] for each in fio["rounds"]] if fio else []
            found.append(
                _Point(
                    layer=layer,
                    direction=direction,
                    block_bytes=int(options["bs"]),
                    depth=int(options["iodepth"]),
                    bandwidth=float(figures["bw_bytes"]),
                    p99_ns=float(figures["clat_ns"]["percentile"][_P99]),
                    fio_bandwidth=_mean([each["bw_bytes"] for each in beside]),
                    fio_p99_ns=_mean([each["clat_ns"]["percentile"][_P99] for each in beside]),
                )
            )
        return found
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"not a result of kvdisk bench: {error!r} is missing or odd.") from error


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _title(documents: Sequence[Mapping[str, Any]]) -> str:
    """Where the first result was measured: a number without that means nothing."""
    about = documents[0]["kvdisk"]
    mode = "O_DIRECT" if about["mode"]["direct"] else "through the page cache"
    return (
        f"{about['place']['file_system']} on {about['place']['disk']}, {mode}, "
        f"{about['backend']['name']}, Linux {about['host']['kernel']}"
    )

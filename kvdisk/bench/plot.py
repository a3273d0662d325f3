"""Pictures of results: bandwidth and p99 latency against block size, a line for each depth.

Reads the JSON of ``kvdisk bench``, so that pictures can be drawn from kept results. matplotlib is
optional and imported only here.
"""

from __future__ import annotations

import importlib
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from kvdisk.bench.result import DIRECTIONS
from kvdisk.errors import ConfigError
from kvdisk.units import display_size

_FORMATS: Final = (".png", ".svg")
_P99: Final = "99.000000"
_LOG_SPAN_MIN: Final = 10.0  # of a logarithmic axis: that some of 1, 2, 5, 10 ... are on it
_SIZES_APART: Final = 1.35  # of neighbouring labels: closer ones would run into each other
_LETTERS_PER_INCH: Final = 10
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
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"drawing needs matplotlib: pip install 'kvdisk[plot]' ({error})."
        ) from None


def draw(
    documents: Sequence[Mapping[str, Any]], file: Path, names: Sequence[str] = ("this",)
) -> None:
    """Write ``file`` (PNG or SVG). Raises ConfigError for documents that are no bench results.

    ``names`` say in errors where each document is from.
    """
    require_drawable(file)
    points = [
        point
        for name, document in zip(names, documents, strict=True)
        for point in _points(name, document)
    ]
    if not points:
        raise ConfigError("nothing to draw: the results hold no bytes moved.")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    columns = sorted({(point.direction, point.layer) for point in points})
    width = 4.2 * len(columns) + 2.2
    figure = Figure(figsize=(width, 7.6), dpi=120, layout="constrained")
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
        label_sizes(axis, _apart(sizes))
        axis.margins(x=0.12)
    fastest = max(max(point.bandwidth, point.fio_bandwidth or 0) for point in points)
    axes[0][0].set_ylim(0, 1.08 * fastest / 1e6)
    label_log_axis(axes[1][0])
    entries = {
        label: handle
        for axis in axes[0]
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(entries.values(), entries, loc="outside right center", frameon=False)
    figure.suptitle(textwrap.fill(_title(documents), int(width * _LETTERS_PER_INCH)))
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Raises ConfigError where the file cannot be written."""
    try:
        figure.savefig(file)
    except OSError as error:
        raise ConfigError(f"{file}: {error.strerror or error}.") from error


def label_sizes(axis: Any, sizes: Sequence[int]) -> None:
    """Ticks of the x axis at these bytes, and no others."""
    axis.set_xticks(sizes, [_size_label(size) for size in sizes])
    axis.minorticks_off()


def label_log_axis(axis: Any) -> None:
    """Make the y axis logarithmic, with plain numbers at some of 1, 2, 5, 10 and so on."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_yscale("log")
    low, high = axis.get_ylim()
    if high < _LOG_SPAN_MIN * low:
        middle = (low * high) ** 0.5
        axis.set_ylim(middle / _LOG_SPAN_MIN**0.5, middle * _LOG_SPAN_MIN**0.5)
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _size_label(size_bytes: int) -> str:
    """Short, for a tick: "512 KiB", "4.29 MiB"."""
    number, unit = display_size(size_bytes).split(" ")
    return f"{float(number):g} {unit}"


def _apart(sizes: Sequence[int]) -> list[int]:
    """Those of ``sizes`` (sorted) that have room for a label on a logarithmic axis."""
    kept: list[int] = []
    for size in sizes:
        if not kept or size >= _SIZES_APART * kept[-1]:
            kept.append(size)
    return kept


def _draw_column(above: Any, below: Any, points: Sequence[_Point], depths: Sequence[int]) -> None:
    by_depth: dict[int, list[_Point]] = defaultdict(list)
    for point in sorted(points, key=lambda each: each.block_bytes):
        by_depth[point.depth].append(point)
    for depth, line in by_depth.items():
        colour = COLOURS[depths.index(depth) % len(COLOURS)]
        ours = {"color": colour, "marker": "o", "label": f"kvdisk, depth {depth}"}
        fio: dict[str, Any] = {
            "color": colour,
            "marker": "x",
            "linestyle": "--",
            "label": f"fio, depth {depth}",
        }
        fio |= {"markersize": 9, "markeredgewidth": 2}  # seen on a dot of ours, too
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
    below.set_yscale("log")


def _points(name: str, document: Mapping[str, Any]) -> list[_Point]:
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
        raise ConfigError(
            f"{name}: not a result of kvdisk bench: {error} is missing or odd."
        ) from error


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

"""Figures of a run, and how several become one. Bytes, nanoseconds, plain counts; no rounding."""

from __future__ import annotations

import resource
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

DirectionName = Literal["read", "write"]
DIRECTIONS: Final[tuple[DirectionName, DirectionName]] = ("read", "write")
# fio's default list, in percent.
PERCENTILES: Final = (
    *(1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0),
    *(95.0, 99.0, 99.5, 99.9, 99.95, 99.99),
)


@dataclass(frozen=True)
class Latency:
    """Of ``count`` values, in nanoseconds. Percentiles are within 1.6 % (the histogram's)."""

    count: int = 0
    least: int = 0
    most: int = 0
    mean: float = 0.0
    deviation: float = 0.0
    percentiles: Mapping[float, int] = field(default_factory=dict)

    @classmethod
    def from_histograms(cls, summaries: Sequence[Mapping[str, Any]]) -> Latency:
        """Of several native histograms together (bind.cpp, histogram_dict)."""
        parts = [summary for summary in summaries if summary["count"]]
        if not parts:
            return cls()
        bins: Counter[int] = Counter()
        for part in parts:
            bins.update(dict(part["bins"]))
        count = sum(bins.values())
        most = max(part["max"] for part in parts)
        mean = sum(part["sum"] for part in parts) / count
        squares = sum(number * (value - mean) ** 2 for value, number in bins.items())
        return cls(
            count=count,
            least=min(part["min"] for part in parts),
            most=most,
            mean=mean,
            deviation=(squares / count) ** 0.5,
            percentiles=_percentiles(bins, count, most),
        )


def _percentiles(bins: Mapping[int, int], count: int, most: int) -> dict[float, int]:
    """For each of PERCENTILES the smallest value that so many do not exceed."""
    percentiles: dict[float, int] = {}
    seen, wanted = 0, list(PERCENTILES)
    for value in sorted(bins):
        seen += bins[value]
        while wanted and seen >= wanted[0] / 100 * count:
            percentiles[wanted.pop(0)] = min(value, most)
    return percentiles | dict.fromkeys(wanted, most)


@dataclass(frozen=True)
class Round:
    """One timed run. ``bytes`` and ``ios`` by direction; a failed request ends a run early.

    ``cpu_user_ns`` and ``cpu_system_ns`` are the whole process's, kernel workers of io_uring and
    bench's own work included.
    """

    bytes: Mapping[DirectionName, int]
    ios: Mapping[DirectionName, int]
    elapsed_ns: int
    cpu_user_ns: int
    cpu_system_ns: int
    latency: Mapping[DirectionName, Latency] = field(default_factory=dict)

    def bandwidth(self, direction: DirectionName) -> float:
        """Bytes per second; 0.0 where nothing moved."""
        return self.bytes[direction] * 1e9 / self.elapsed_ns if self.elapsed_ns else 0.0

    def iops(self, direction: DirectionName) -> float:
        return self.ios[direction] * 1e9 / self.elapsed_ns if self.elapsed_ns else 0.0

    def cpu_seconds_per_gb(self) -> float:
        """CPU seconds for each 10^9 bytes moved, both directions together."""
        moved = sum(self.bytes.values())
        return (self.cpu_user_ns + self.cpu_system_ns) / moved if moved else 0.0


@dataclass(frozen=True)
class Verdict:
    """Of reading back: ``checked`` blocks compared byte for byte, ``wrong`` of them differed."""

    checked: int = 0
    wrong: int = 0
    total: int = 0


@dataclass(frozen=True)
class Comparison:
    """Ours beside another's, round by round; ratios are ours / theirs of the same round."""

    name: str
    command: Sequence[str]
    rounds: Sequence[Round]
    ratios: Mapping[DirectionName, Sequence[float]]

    def ratio(self, direction: DirectionName) -> float | None:
        """The median of the rounds' ratios; None where nothing moved in this direction."""
        ratios = self.ratios[direction]
        return statistics.median(ratios) if ratios else None


def compare(
    name: str, command: Sequence[str], ours: Sequence[Round], theirs: Sequence[Round]
) -> Comparison:
    """Pair the rounds as they were run, one after the other."""
    ratios: dict[DirectionName, list[float]] = {"read": [], "write": []}
    for mine, other in zip(ours, theirs, strict=True):
        for direction in DIRECTIONS:
            if other.bandwidth(direction) > 0 and mine.bandwidth(direction) > 0:
                ratios[direction].append(mine.bandwidth(direction) / other.bandwidth(direction))
    return Comparison(name, command, theirs, ratios)


def sum_rounds(rounds: Sequence[Round]) -> Round:
    """Rounds one after the other as one; without latency, which does not add up."""
    return Round(
        bytes={name: sum(each.bytes[name] for each in rounds) for name in DIRECTIONS},
        ios={name: sum(each.ios[name] for each in rounds) for name in DIRECTIONS},
        elapsed_ns=sum(each.elapsed_ns for each in rounds),
        cpu_user_ns=sum(each.cpu_user_ns for each in rounds),
        cpu_system_ns=sum(each.cpu_system_ns for each in rounds),
    )


def cpu_times_ns() -> tuple[int, int]:
    """User and system time of this process since its start."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return round(usage.ru_utime * 1e9), round(usage.ru_stime * 1e9)

"""What the raw and the whole layer have in common: how a session drives either.

A runner owns its file and its buffers from construction to ``close``. ``fill`` lays the file out,
``run`` is the timed part, ``verify`` reads back whatever this runner knows to be there, ``forget``
is called when another program has written to the file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from kvdisk.bench.result import DirectionName, Latency, Round, Verdict
from kvdisk.direct_mode import DirectMode
from kvdisk.errors import KVDiskError

# Called a few times a second with the bytes moved since the phase began.
Progress = Callable[[int], None]

PROGRESS_GAP_S = 0.2


class WrongDataError(KVDiskError):
    """What came back is not what was written."""


@dataclass(frozen=True)
class Facts:
    """What a runner found when it opened, and counted since."""

    backend: str
    backend_reason: str
    notes: tuple[str, ...]
    buffers_registered: bool
    files_registered: bool
    ring_bytes: int
    copier: str = ""  # whole layer: what moves blocks to and from the ring
    # Share of the ring (raw: of the queue) in use on average over the timed part, 0..1.
    ring_occupancy: float = 0.0
    # Payload I/Os in flight on average over the timed part, all jobs together.
    in_flight: float = 0.0
    # Answers of the disk that moved a part, over the timed part; what was left was asked for again.
    short_ios: dict[DirectionName, int] = field(default_factory=dict)
    engine_cpu_ns: int | None = None  # of the engine's threads alone, over the timed part
    latency: dict[DirectionName, Latency] = field(default_factory=dict)  # of one I/O, all rounds
    # Whole layer: from submit to the row's end, queueing included.
    row_latency: dict[DirectionName, Latency] = field(default_factory=dict)


class Runner(Protocol):
    mode: DirectMode
    data_fd: int

    def fill(self, progress: Progress) -> None: ...
    def run(self, progress: Progress) -> Round: ...
    def verify(self, progress: Progress) -> Verdict: ...
    def forget(self) -> None: ...
    def facts(self) -> Facts: ...
    def close(self) -> None: ...

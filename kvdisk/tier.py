"""The disk tier in one process: keys and blocks in, keys and blocks out.

``DiskTier`` is a scheduler's half and a worker's half with nothing between them. A serving engine
whose scheduler and workers live in different processes uses those two, ``TierScheduler`` and
``TierWorker``, and carries their messages itself; the contract is the same.

Nothing on the data path raises or waits. A miss is always a legal answer.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from kvdisk.config import TierConfig
from kvdisk.errors import KVDiskError
from kvdisk.identity import Identity
from kvdisk.layout import Layout
from kvdisk.messages import PathState, Worker
from kvdisk.metrics import TierStats
from kvdisk.open_transfers import TierResult
from kvdisk.placement import Placement
from kvdisk.room import require_room
from kvdisk.scheduler import TierScheduler
from kvdisk.transfer import Direction
from kvdisk.units import display_size
from kvdisk.worker import TierWorker

_CLEAR_POLL_S = 0.05

_log = logging.getLogger("kvdisk")


@dataclass(frozen=True)
class TierEvents:
    """What has happened since the last ``poll``.

    ``source_free``: ids of stores whose blocks may be overwritten, told no later than their result.
    """

    source_free: list[int]
    finished: list[TierResult]


@dataclass(frozen=True)
class TierHealth:
    """``status``: "ok"; "degraded" when a path sits out for loads or stores; "down" when all do.

    ``paths`` has each path's own state, ``facts`` what was found at open: backend, O_DIRECT or why
    not, slots, blocks recovered.
    """

    status: Literal["ok", "degraded", "down"]
    paths: tuple[PathState, ...]
    facts: dict[str, object]


class DiskTier:
    """Blocks of ``layout`` on disk. Not thread-safe: one thread calls it. Use ``open``."""

    def __init__(self, scheduler: TierScheduler, worker: Worker, block_count: int) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self._block_count = block_count
        self._closed = False

    @classmethod
    def open(
        cls,
        layout: Layout,
        identity: Identity,
        config: TierConfig,
        *,
        direct_stores: bool = False,
        tell_removed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> DiskTier:
        """A tier for the blocks of ``layout``, with what earlier runs of ``identity`` left.

        ``direct_stores``: blocks in host memory, aligned as the disk asks and each filling its
        slot, are written from where they are; others by way of the ring. Blocks must then stay
        unchanged until the store has ended. ``tell_removed`` keeps what ``take_removed`` gives.

        Raises ConfigError (an option, the directory or the size cannot work), BusyError (another
        process has it open) or DeviceError (the disk does not do what is needed).
        """
        placement = Placement.of(config, layout.block_bytes, 1)
        require_room(config, identity, placement, 0, 1)  # before the memory for so many slots
        scheduler = TierScheduler(
            config, layout.block_bytes, tell_removed=tell_removed, clock=clock
        )
        worker = TierWorker.open(layout, identity, config, direct_stores=direct_stores, clock=clock)
        try:
            opened = worker.take_opened()
            scheduler.attach(opened)
        except BaseException:
            worker.close(0)
            raise
        _log.info("%s", opening_line(opened.facts, scheduler.counters.restored))
        return cls(scheduler, worker, layout.block_count)

    # --- what is there

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys``, from the first on, could be loaded now. Not a use: see ``touch``.

        Never waits. A key that is found may still miss at its load.
        """
        return self._scheduler.lookup(keys)

    def readable(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of ``keys`` could be loaded now, one by one."""
        return self._scheduler.readable(keys)

    def contains(self, keys: Sequence[bytes], *, counted: bool = True) -> bool:
        """Whether all of a few ``keys`` could be loaded now. Cheaper than ``lookup`` for one.

        ``counted``: in ``stats``, among the keys looked up and the hits found.
        """
        return self._scheduler.contains(keys, counted=counted)

    def touch(self, keys: Sequence[bytes]) -> None:
        """``keys``, the head of the prefix first, are used again, as far as they are here."""
        self._scheduler.touch(keys)

    # --- moving blocks

    def store(
        self,
        keys: Sequence[bytes],
        block_ids: npt.ArrayLike,
        *,
        prefix: Sequence[bytes] = (),
        event: int = 0,
    ) -> int:
        """Store block ``block_ids[i]`` as ``keys[i]``; returns an id. Never waits.

        ``keys`` are of one sequence of tokens, its head first; ``prefix`` are the keys before them.
        Keys that are here already cost nothing. The blocks must stay unchanged until
        ``TierEvents.source_free`` names the id. ``event``: what to wait for before reading them, as
        in ``TransferEngine.submit_store``. Raises KVDiskError on a closed tier, and ValueError for
        a block that there is not.
        """
        self._require_open()
        transfer = self._scheduler.store(keys, self._blocks(block_ids), prefix=prefix)
        if len(transfer):
            self._worker.submit(transfer, event=event)
        return transfer.id

    def load(
        self,
        keys: Sequence[bytes],
        block_ids: npt.ArrayLike,
        *,
        event: int = 0,
        within_s: float | None = None,
    ) -> int:
        """Load ``keys[i]`` into block ``block_ids[i]``; returns an id. Never waits.

        A block whose status is not OK has undefined content. ``event``: behind what the blocks are
        written, as in ``TransferEngine.submit_load``. ``within_s``: instead of ``load_deadline``.
        Raises as ``store``.
        """
        self._require_open()
        transfer = self._scheduler.load(keys, self._blocks(block_ids))
        if len(transfer):
            self._worker.submit(replace(transfer, within_s=within_s), event=event)
        return transfer.id

    def refused(self, reason: str, blocks: int) -> None:
        """So many were not even given to ``store``: counted as those that it refuses."""
        self._scheduler.counters.refused(reason, blocks)

    def poll(self) -> TierEvents:
        """What has happened since the last call; never blocks. Also after ``close``."""
        self._scheduler.apply(self._worker.poll())
        return TierEvents(self._scheduler.take_source_free(), self._scheduler.take_finished())

    def wait(self, timeout_s: float | None = None) -> bool:
        """Block, without the GIL, until ``poll`` may have something; False when time is over."""
        return self._scheduler.has_news or self._worker.wait(timeout_s)

    def fileno(self) -> int:
        """A descriptor that is readable when ``poll`` should be called, for selectors.

        Transfers that ended within ``store`` or ``load`` (nothing to move) do not show there.
        """
        return self._worker.fileno()

    # --- forgetting

    def drop(self, keys: Sequence[bytes]) -> int:
        """Forget ``keys`` until they are stored again; returns how many were here.

        A restart may find them again: what must stay forgotten needs ``clear``.
        """
        return self._scheduler.drop(keys)

    def clear(self, timeout_s: float = 10.0) -> bool:
        """Forget everything, stores under way included; for weights that changed, above all.

        At once for this process; True when it is durable too, so that no restart or crash brings
        anything back. False: the disk did not answer in time; it is tried on until it does.
        """
        self._require_open()
        message = self._scheduler.clear()
        self._worker.clear(message)
        until = time.monotonic() + timeout_s
        while True:
            self._scheduler.apply(self._worker.poll())
            if self._scheduler.cleared(message.id):
                return True
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._worker.wait(min(left, _CLEAR_POLL_S))

    def take_removed(self) -> list[bytes]:
        """With ``tell_removed``: keys evicted or dropped since the last call, stored or not."""
        return self._scheduler.take_removed()

    # --- looking at it

    def disk_rate(self, direction: Direction) -> float | None:
        """Bytes a second that the disks give to loads or to stores now; None: not yet known."""
        return self._scheduler.disk_rate(direction)

    def stats(self) -> TierStats:
        """Counters and occupancy now."""
        return TierStats(
            counters=self._scheduler.counters.copy(),
            slots=self._scheduler.counts(),
            open_transfers=self._scheduler.open_transfers,
            engines=self._worker.stats(),
        )

    def health(self) -> TierHealth:
        """Whether the disks take part, and what was found at open."""
        paths = self._scheduler.path_states()
        if all(path.loads and path.stores for path in paths):
            status: Literal["ok", "degraded", "down"] = "ok"
        else:
            status = "degraded" if any(path.loads for path in paths) else "down"
        return TierHealth(status, paths, self._scheduler.facts().get(0, {}))

    def check(self) -> None:
        """Recount everything; AssertionError when something does not add up. For tests."""
        self._scheduler.check()

    # --- ending it

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._closed

    def close(self, timeout_s: float = 5.0) -> int:
        """End everything: drain until the limit, then time out what is left. Idempotent.

        Returns how many I/Os a hanging disk forced to abandon. ``poll`` still gives the last
        results.
        """
        self._closed = True
        return self._worker.close(timeout_s)

    def __enter__(self) -> DiskTier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise KVDiskError("the tier is closed.")

    def _blocks(self, block_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Checked before anything is begun: slots and pins would wait for an end for ever."""
        blocks = np.asarray(block_ids, dtype=np.int64)
        if blocks.size and int(blocks.max()) >= self._block_count:
            raise ValueError(f"block {int(blocks.max())}: there are {self._block_count} blocks")
        return blocks


def opening_line(facts: dict[str, Any], recovered: int) -> str:
    """What an operator wants to see in the log once: where, how much, how, and what was found."""
    direct = "O_DIRECT" if facts["direct"] else f"no O_DIRECT ({facts['direct_reason']})"
    backend = f"{facts['backend']} {facts['backend_reason']}".strip()
    return (
        f"kvdisk: {', '.join(facts['paths'])} on {facts['file_system']}: "
        f"{facts['slots']} slots of {display_size(facts['slot_bytes'])} "
        f"({display_size(facts['reserved_bytes'])} reserved, up to "
        f"{display_size(facts['slot_memory_bytes'])} of memory), {backend}, {direct}, "
        f"{recovered} blocks recovered"
    )

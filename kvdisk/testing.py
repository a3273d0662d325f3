"""A tier whose disk is memory and fails on demand, for tests of what is built on kvdisk.

``simulated_tier`` gives a ``DiskTier`` that behaves like the real one without a file or a thread:
nothing moves until ``poll``, and what goes wrong follows from a seed. For the split form there is
``SimulatedWorker``, in place of ``TierWorker``. The disk outlives its workers, so that restarts and
crashes can be tested too::

    disk = SimulatedDisk(seed=7, faults=Faults(load_error=0.1))
    tier = simulated_tier(disk, blocks, simulated_config(slots=64, block_bytes=256))

What always holds, as for the real one: a block that is loaded has the bytes that were stored under
its key, or it is a miss. The simulated disk may tear, flip, lose and misdirect, and a slot whose
write timed out is written late. Same seed, same calls: same outcome.
"""

from __future__ import annotations

import errno
import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdisk.config import TierConfig
from kvdisk.key_index import KEY_BYTES_MAX
from kvdisk.messages import Clear, PathState, RankOpened, RankReport, RankResult, Transfer
from kvdisk.placement import Placement
from kvdisk.rank_file import record_file_bytes
from kvdisk.scheduler import TierScheduler
from kvdisk.tier import DiskTier
from kvdisk.transfer import Direction, RowStatus

Blocks = npt.NDArray[np.uint8]

_ERRORS: Final = (errno.EIO, errno.ENOSPC, errno.EROFS, errno.EAGAIN, errno.ENOMEM)


@dataclass
class Faults:
    """How often things go wrong: each a probability per block, but ``delay`` per transfer.

    They may be changed at any time. ``delay``: a transfer is not finished in this ``poll``.
    ``timeout``: a block runs into its deadline while the disk still works on it; the work is done
    late, and its slot is quarantined until then. ``lost``: a store is acknowledged and did not
    happen. ``misdirected``: it also overwrote another slot.
    """

    delay: float = 0.0
    load_error: float = 0.0
    store_error: float = 0.0
    timeout: float = 0.0
    bit_flip: float = 0.0
    lost: float = 0.0
    misdirected: float = 0.0


@dataclass(frozen=True)
class _Record:
    """What a slot record says: see docs/file-format.md."""

    key: bytes
    sequence: int
    epoch: int
    checksum: bytes


@dataclass
class _Rank:
    """One rank's files."""

    payloads: dict[int, bytes] = field(default_factory=dict)
    records: dict[int, _Record] = field(default_factory=dict)
    epoch: int = 1
    clears: int = 0
    sequence: int = 0


class SimulatedDisk:
    """The files of all ranks, in memory. ``seed`` decides everything that is left to chance."""

    def __init__(self, seed: int = 0, faults: Faults | None = None) -> None:
        self.random = random.Random(seed)
        self.faults = Faults() if faults is None else faults
        self.ranks: dict[int, _Rank] = {}

    def rank(self, rank: int) -> _Rank:
        return self.ranks.setdefault(rank, _Rank())

    def happens(self, probability: float) -> bool:
        return probability > 0 and self.random.random() < probability


@dataclass
class _Late:
    """Work that the disk still does although its row has ended."""

    slot: int
    work: Callable[[], None]


class SimulatedWorker:
    """``TierWorker`` on a ``SimulatedDisk``; its blocks are the rows of ``blocks`` (uint8)."""

    def __init__(
        self,
        disk: SimulatedDisk,
        blocks: Blocks,
        config: TierConfig,
        *,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._disk = disk
        self._files = disk.rank(rank)
        self._blocks = blocks
        self._placement = Placement.of(config, blocks.shape[1], world_size)
        self._rank = rank
        self._world_size = world_size
        self._waiting: list[Transfer] = []
        self._busy: dict[int, int] = {}  # slot: late work under way
        self._late: list[_Late] = []
        self._clears: list[Clear] = []
        self._paths = tuple(PathState() for _ in range(self._placement.path_count))
        self._untold_paths: tuple[PathState, ...] | None = self._paths
        self._closed = False

    def take_opened(self) -> RankOpened:
        """As ``TierWorker.take_opened``; what the disk has kept of this rank."""
        epoch = self._files.epoch
        found = {
            slot: record
            for slot, record in sorted(self._files.records.items())
            if record.epoch == epoch and slot < self._placement.slot_count
        }
        rows = np.zeros((len(found), KEY_BYTES_MAX), dtype=np.uint8)
        for row, record in zip(rows, found.values(), strict=True):
            row[: len(record.key)] = np.frombuffer(record.key, dtype=np.uint8)
        return RankOpened(
            rank=self._rank,
            world_size=self._world_size,
            slot_bytes=self._placement.slot_bytes,
            slot_count=self._placement.slot_count,
            restored_slots=np.array(list(found), dtype=np.int64),
            restored_sequences=np.array([r.sequence for r in found.values()], dtype=np.uint64),
            restored_keys=rows,
            restored_key_lengths=np.array([len(r.key) for r in found.values()], dtype=np.uint8),
            clears=self._files.clears,
            paths=self._paths,
            facts={"backend": "simulated"},
        )

    def submit(self, transfer: Transfer, *, event: int = 0) -> None:
        self._waiting.append(transfer)

    def clear(self, message: Clear) -> None:
        self._clears.append(message)

    def cancel_waiting(self, transfer_id: int) -> None:
        """Nothing is ever begun before ``poll``, and then at once."""

    def set_paths(self, *states: PathState) -> None:
        """What ``TierWorker`` finds out by itself: which paths take part from now on."""
        assert len(states) == len(self._paths), "one state for each path"
        self._paths = self._untold_paths = states

    def poll(self) -> RankReport:
        """Do what was submitted, as far as the faults allow, and report it."""
        report = RankReport(self._rank, paths=self._untold_paths)
        self._untold_paths = None
        waiting, self._waiting = self._waiting, []
        for transfer in waiting:
            # What was begun before a clear ends before it, so that it cannot outlive it.
            may_wait = not self._closed and not self._clears
            if may_wait and self._disk.happens(self._disk.faults.delay):
                self._waiting.append(transfer)
            else:
                self._move(transfer, report)
        self._end_late_work(report)
        if self._clears:
            self._files.epoch += 1
            self._files.records.clear()
            self._files.clears = max(each.number for each in self._clears)
            report.cleared.extend(each.id for each in self._clears)
            self._clears.clear()
        return report

    def wait(self, timeout_s: float | None = None) -> bool:
        return bool(self._waiting or self._late or self._clears or self._untold_paths)

    def fileno(self) -> int:
        return -1

    def stats(self) -> dict[int, dict[str, Any]]:
        return {}

    def close(self, timeout_s: float = 5.0) -> int:
        """What waits is done or failed in the next ``poll``; late work happens now."""
        self._closed = True
        for late in self._late:
            late.work()
        self._late.clear()
        return 0

    def crash(self) -> None:
        """The process dies: of what the disk still had to do, some is done and some is not."""
        self._closed = True
        for late in self._late:
            if self._disk.random.random() < 0.5:
                late.work()
        self._late.clear()

    # --- steps of the above

    def _move(self, transfer: Transfer, report: RankReport) -> None:
        move = self._store if transfer.direction is Direction.STORE else self._load
        rows = len(transfer)
        result = RankResult(
            transfer.id,
            np.zeros(rows, dtype=np.uint8),
            np.zeros(rows, dtype=np.int32),
            np.zeros(rows, dtype=np.bool_),
        )
        for row, slot in enumerate(transfer.slots.tolist()):
            path = self._paths[int(self._placement.path_of(transfer.slots[row : row + 1])[0])]
            out = not (path.loads if transfer.direction is Direction.LOAD else path.stores)
            if self._closed or out:
                result.statuses[row] = RowStatus.REFUSED
            elif slot in self._busy:
                result.statuses[row] = RowStatus.BUSY
            else:
                block = int(transfer.block_ids[row])
                move(transfer.keys[row], slot, block, result, row)
        if transfer.direction is Direction.STORE:
            report.source_free.append(transfer.id)
        report.results.append(result)

    def _store(self, key: bytes, slot: int, block: int, result: RankResult, row: int) -> None:
        faults, disk = self._disk.faults, self._disk
        payload = self._blocks[block].tobytes()
        self._files.records.pop(slot, None)
        if disk.happens(faults.timeout):
            self._time_out(slot, lambda: self._write(slot, payload), result, row)
            return
        if disk.happens(faults.store_error):
            result.statuses[row] = RowStatus.FAILED
            result.errors[row] = disk.random.choice(_ERRORS)
            if disk.random.random() < 0.5:
                self._write(slot, payload)
            return
        self._write(slot, payload)
        self._files.sequence += 1
        sequence, epoch = self._files.sequence, self._files.epoch
        checksum = _checksum(key, slot, sequence, epoch, payload)
        self._files.records[slot] = _Record(key, sequence, epoch, checksum)
        result.statuses[row] = RowStatus.OK

    def _write(self, slot: int, payload: bytes) -> None:
        faults, disk = self._disk.faults, self._disk
        if disk.happens(faults.lost):
            return
        if disk.happens(faults.bit_flip):
            flipped = bytearray(payload)
            flipped[disk.random.randrange(len(flipped))] ^= 1 << disk.random.randrange(8)
            payload = bytes(flipped)
        self._files.payloads[slot] = payload
        if disk.happens(faults.misdirected):
            self._files.payloads[disk.random.randrange(self._placement.slot_count)] = payload

    def _load(self, key: bytes, slot: int, block: int, result: RankResult, row: int) -> None:
        faults, disk = self._disk.faults, self._disk
        record = self._files.records.get(slot)
        if record is None or record.key != key:
            result.statuses[row] = RowStatus.MISS
        elif disk.happens(faults.timeout):
            self._time_out(slot, lambda: None, result, row)
        elif disk.happens(faults.load_error):
            result.statuses[row] = RowStatus.FAILED
            result.errors[row] = disk.random.choice(_ERRORS)
        else:
            payload = self._files.payloads.get(slot, b"")
            proof = _checksum(key, slot, record.sequence, record.epoch, payload)
            if proof != record.checksum:
                del self._files.records[slot]
                result.statuses[row] = RowStatus.CORRUPT
                return
            self._blocks[block] = np.frombuffer(payload, dtype=np.uint8)
            result.statuses[row] = RowStatus.OK

    def _time_out(self, slot: int, work: Callable[[], None], result: RankResult, row: int) -> None:
        result.statuses[row] = RowStatus.TIMED_OUT
        result.quarantined[row] = True
        self._busy[slot] = self._busy.get(slot, 0) + 1
        self._late.append(_Late(slot, work))

    def _end_late_work(self, report: RankReport) -> None:
        """Each piece of late work ends in one of the next polls, in any order."""
        late, self._late = self._late, []
        for each in late:
            if self._disk.random.random() < 0.5:
                self._late.append(each)
                continue
            each.work()
            self._busy[each.slot] -= 1
            if self._busy[each.slot] == 0:
                del self._busy[each.slot]
                report.released_slots.append(each.slot)


def simulated_tier(disk: SimulatedDisk, blocks: Blocks, config: TierConfig) -> DiskTier:
    """A ``DiskTier`` for the rows of ``blocks`` on ``disk``, with what earlier tiers left there.

    Of ``config`` the sizes and policies count; its path is not touched.
    """
    scheduler = TierScheduler(config, blocks.shape[1])
    worker = SimulatedWorker(disk, blocks, config)
    scheduler.attach(worker.take_opened())
    return DiskTier(scheduler, worker, len(blocks))


def simulated_config(slots: int, block_bytes: int, **options: Any) -> TierConfig:
    """A configuration for ``slots`` slots, but no less than the smallest tier (1 MiB).

    ``options`` are ``TierConfig``'s.
    """
    slot_bytes = -(-block_bytes // 4096) * 4096
    capacity_bytes = max(1 << 20, slots * slot_bytes + record_file_bytes(slots))
    return TierConfig(paths=(Path("/simulated"),), capacity_bytes=capacity_bytes, **options)


def _checksum(key: bytes, slot: int, sequence: int, epoch: int, payload: bytes) -> bytes:
    seed = b"%d %d %d %d " % (len(key), slot, sequence, epoch)
    return hashlib.blake2b(seed + key + payload, digest_size=8).digest()

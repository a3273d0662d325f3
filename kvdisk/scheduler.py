"""The scheduler's half of the tier: which key is where, and what came of every transfer.

It does no I/O. It makes transfers for the workers, one per rank, and merges what they report: a
block counts only when every rank has it, and one rank's failure is everybody's miss. A serving
engine calls it on its own thread, a few times per step.

What always holds:
    * Only what every rank has stored is ever called present, and a hit is counted only when every
      rank has loaded it.
    * Every transfer ends exactly once, with a status for every key of the call.
    * A block that failed its proof, or that the disk could not read, is forgotten at once: it fails
      one load, not the same request for ever.
    * A slot is given to nobody while any rank's disk may still write there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvdisk import messages
from kvdisk.agreement import keys_not_held, rows_of_all
from kvdisk.clears import Clears
from kvdisk.config import TierConfig
from kvdisk.errors import TRANSIENT_ERRORS, ConfigError
from kvdisk.key_index import ABSENT, KEY_BYTES_MAX, KeyBatch
from kvdisk.memory import SCHEDULER_BYTES_PER_SLOT, require_slot_memory
from kvdisk.messages import Clear, PathState, RankOpened, RankReport, RankResult, Transfer
from kvdisk.metrics import TierCounters
from kvdisk.open_transfers import OpenTransfer, OpenTransfers, TierResult
from kvdisk.placement import Placement
from kvdisk.policy import AdmitAll, make_admission_policy, make_eviction_policy
from kvdisk.rate_meter import RateMeter
from kvdisk.slots import SlotAllocator, SlotCounts
from kvdisk.transfer import Direction, RowStatus, stored_key

_log = logging.getLogger("kvdisk")


class TierScheduler:
    """Keys and slots for ``world_size`` ranks. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        config: TierConfig,
        block_bytes: int,
        *,
        world_size: int = 1,
        tell_removed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``block_bytes``: of one rank, the largest where ranks differ. Raises ConfigError."""
        if world_size < 1:
            raise ConfigError(f"world_size={world_size}: there is at least one rank.")
        self.placement = Placement.of(config, block_bytes, world_size)
        slots = self.placement.slot_count
        require_slot_memory(slots, SCHEDULER_BYTES_PER_SLOT[config.eviction])
        self._allocator = SlotAllocator(
            slots,
            make_eviction_policy(config.eviction, slots),
            path_count=self.placement.path_count,
            path_of=self.placement.path_of,
            tell_removed=tell_removed,
        )
        self._admission = make_admission_policy(
            config.admission,
            slots,
            write_budget_bytes=config.write_budget_bytes,
            block_bytes=self.placement.slot_bytes * world_size,
            clock=clock,
        )
        self.world_size = world_size
        self._counters = TierCounters(block_bytes=block_bytes * world_size)
        self._opened: dict[int, RankOpened] = {}
        self._joined_once = False
        self._rank_paths: dict[int, tuple[PathState, ...]] = {}
        self._up = {direction: np.ones(self.placement.path_count, bool) for direction in Direction}
        self._all_load = True  # no path sits out for loads
        self._open = OpenTransfers(world_size)
        self._clears = Clears()
        self._disk_meters = {
            direction: [RateMeter() for _ in range(world_size)] for direction in Direction
        }
        self._finished: list[TierResult] = []
        self._source_free: list[int] = []
        self._id_last = 0
        self._suspicion_told = False

    # --- the ranks

    def attach(self, opened: RankOpened) -> bool:
        """Take a worker's first message. True when it was the last one missing.

        Until then every lookup misses and every store is refused. Then what all ranks have comes
        back, what was stored last as used last.

        Raises ConfigError when the rank does not fit this scheduler.
        """
        mine = (self.world_size, self.placement.slot_bytes, self.placement.slot_count)
        theirs = (opened.world_size, opened.slot_bytes, opened.slot_count)
        if theirs != mine or not 0 <= opened.rank < self.world_size:
            raise ConfigError(
                f"rank {opened.rank} was opened for (world size, slot bytes, slots) = {theirs}, "
                f"the scheduler has {mine}: give both the same configuration and block size."
            )
        if opened.rank in self._opened:
            raise ConfigError(f"rank {opened.rank} is here twice: use the engine's global rank.")
        self._opened[opened.rank] = opened
        self._clears.attach(opened.rank, opened.clears)
        self._set_paths(opened.rank, opened.paths)
        if self._joined_once:
            self._allocator.drop(keys_not_held(self._allocator.entries(), opened))
        if len(self._opened) < self.world_size:
            return False
        ranks = [self._opened[rank] for rank in range(self.world_size)]
        if self.needs_clear:
            _log.warning("some ranks have missed a clear: what is stored must be cleared again")
            self._allocator.clear()
        elif not self._joined_once:
            self._restore(ranks)
        self._opened = {each.rank: each.without_restored() for each in ranks}
        self._joined_once = True
        return True

    @property
    def needs_clear(self) -> bool:
        """Ranks have missed a clear, so what they hold may be older or differ under one key.

        Nothing is stored until ``clear`` has reached all of them.
        """
        return self._clears.another_needed

    def detach(self, rank: int) -> None:
        """A worker's process has ended: until another is attached, nothing is read or stored."""
        self._opened.pop(rank, None)
        away = PathState(loads=False, stores=False, reason=f"rank {rank} is away")
        self._set_paths(rank, (away,) * self.placement.path_count)
        report = RankReport(rank, *self._open.end_of_rank(rank))
        self.apply(report)

    @property
    def ready(self) -> bool:
        """Every rank is attached, and they agree on what was cleared."""
        return len(self._opened) == self.world_size and not self.needs_clear

    # --- what is there

    def lookup(self, keys: Sequence[bytes]) -> int:
        """How many of ``keys``, from the first on, could be loaded now. Not a use: see ``touch``.

        Never waits. A key that is found may still miss at its load.
        """
        batch = _encode(keys)
        if self._all_load:
            found = self._allocator.lookup(batch)
        else:
            readable = self._readable(batch)
            found = len(readable) if readable.all() else int(readable.argmin())
        self._counters.looked_up(len(batch), found)
        self._suspect()
        return found

    def readable(self, keys: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of ``keys`` could be loaded now, one by one."""
        readable = self._readable(_encode(keys))
        self._counters.looked_up(len(readable), int(np.count_nonzero(readable)))
        return readable

    def contains(self, keys: Sequence[bytes], *, counted: bool = True) -> bool:
        """Whether all of a few ``keys`` could be loaded now. Cheaper than ``lookup`` for one.

        ``counted``: among the keys looked up and the hits found.
        """
        if self._all_load:
            found = True
            for key in keys:  # called for each key of every request: a generator would cost more
                found = found and stored_key(key) in self._allocator
        else:
            found = bool(self._readable(_encode(keys)).all())
        if counted:
            self._counters.looked_up(len(keys), len(keys) if found else 0)
        self._suspect()
        return found

    def touch(self, keys: Sequence[bytes]) -> None:
        """``keys``, the head of the prefix first, are used again, as far as they are here."""
        self._allocator.touch(_encode(keys))

    # --- moving blocks

    def store(
        self, keys: Sequence[bytes], block_ids: npt.ArrayLike, *, prefix: Sequence[bytes] = ()
    ) -> Transfer:
        """Store block ``block_ids[i]`` as ``keys[i]``, for those keys that need it.

        ``keys`` are of one sequence of tokens, its head first; ``prefix`` are the keys before them.
        Give the transfer to every worker, unless it has no rows. Its blocks must stay unchanged
        until ``take_source_free`` names it.
        """
        batch = _encode(keys)
        blocks = _block_ids(block_ids, len(batch))
        statuses = np.full(len(batch), RowStatus.REFUSED, dtype=np.uint8)
        before = _encode(prefix) if len(prefix) else ()
        rows, slots, tickets = self._allocate(batch, before, statuses)
        return self._begin(Direction.STORE, batch, blocks, statuses, rows, slots, tickets)

    def load(self, keys: Sequence[bytes], block_ids: npt.ArrayLike) -> Transfer:
        """Load ``keys[i]`` into block ``block_ids[i]``, for those keys that are here.

        Give the transfer to every worker, unless it has no rows. Counts as a use of the keys.
        """
        batch = _encode(keys)
        blocks = _block_ids(block_ids, len(batch))
        statuses = np.full(len(batch), RowStatus.MISS, dtype=np.uint8)
        slots, tickets = self._allocator.pin(batch)
        present = slots != ABSENT
        self._counters.missed("absent", len(batch) - int(np.count_nonzero(present)))
        if not self._all_load:
            out = present & ~self._up[Direction.LOAD][self.placement.path_of(slots)]
            statuses[out] = RowStatus.REFUSED
            self._counters.missed("unavailable", int(np.count_nonzero(out)))
            self._allocator.unpin(slots[out], tickets[out])
            present &= ~out
        rows = np.flatnonzero(present)
        return self._begin(
            Direction.LOAD, batch, blocks, statuses, rows, slots[rows], tickets[rows]
        )

    def drop(self, keys: Sequence[bytes]) -> int:
        """Forget ``keys`` until they are stored again; returns how many were here.

        A restart may find them again: what must stay forgotten needs ``clear``.
        """
        return self._allocator.drop(_encode(keys))

    def clear(self) -> Clear:
        """Forget everything; loads under way miss. Give the message to every worker.

        Nothing stored before is readable from now on; after a restart or a crash as well, once
        ``cleared`` says so of its id.
        """
        self._allocator.clear()
        self._open.void_all()
        self._id_last += 1
        return self._clears.begin(self._id_last, all_there=len(self._opened) == self.world_size)

    def cleared(self, clear_id: int) -> bool:
        """Every rank has made that clear durable."""
        return self._clears.durable(clear_id)

    # --- what came of it

    def apply(self, report: RankReport) -> None:
        """Take a worker's report into account. Old and unknown ids are counted, and change nothing.

        Order within a report: states of paths, results, releases.
        """
        if report.paths is not None:
            self._set_paths(report.rank, report.paths)
        for direction, (moved_bytes, seconds) in report.moved.items():
            self._disk_meters[direction][report.rank].add(moved_bytes, seconds)
        for transfer_id in report.source_free:
            if self._open.source_free(report.rank, transfer_id):
                self._source_free.append(transfer_id)
        for result in report.results:
            self._apply_result(report.rank, result)
        for slot in report.released_slots:
            self._apply_release(report.rank, slot)
        self._clears.take(report.rank, report.cleared)

    @property
    def has_news(self) -> bool:
        """``take_finished`` or ``take_source_free`` has something to give."""
        return bool(self._finished or self._source_free)

    def take_finished(self) -> list[TierResult]:
        """Transfers that have ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def take_source_free(self) -> list[int]:
        """Stores whose blocks no rank reads any more, since the last call; before their result."""
        free, self._source_free = self._source_free, []
        return free

    def take_removed(self) -> list[bytes]:
        """With ``tell_removed``: keys evicted or dropped since the last call, stored or not."""
        return self._allocator.take_removed()

    # --- looking at it

    @property
    def open_transfers(self) -> int:
        return len(self._open)

    @property
    def counters(self) -> TierCounters:
        """Running counts; see ``metrics``."""
        return self._counters

    def disk_rate(self, direction: Direction) -> float | None:
        """Bytes a second that the slowest rank's disks move now; None: not yet known."""
        rates = [meter.rate for meter in self._disk_meters[direction]]
        known = [rate for rate in rates if rate is not None]
        return min(known) if len(known) == self.world_size else None

    def counts(self) -> SlotCounts:
        """Slots by state."""
        return self._allocator.counts()

    def path_states(self) -> tuple[PathState, ...]:
        """Each path over all ranks: it takes part only where it does in every rank."""
        return tuple(
            messages.worst_of([states[index] for states in self._rank_paths.values()])
            for index in range(self.placement.path_count)
        )

    def facts(self) -> dict[int, dict[str, object]]:
        """What each rank said of its files at open."""
        return {rank: opened.facts for rank, opened in self._opened.items()}

    def check(self) -> None:
        """Recount everything; AssertionError when something does not add up. For tests."""
        self._allocator.check()

    # --- steps of the above

    def _restore(self, ranks: list[RankOpened]) -> None:
        first = ranks[0]
        rows = rows_of_all(ranks)
        batch = KeyBatch.from_rows(first.restored_keys[rows], first.restored_key_lengths[rows])
        taken = self._allocator.restore(
            batch, first.restored_slots[rows], first.restored_sequences[rows]
        )
        self._counters.restored = int(np.count_nonzero(taken))

    def _readable(self, batch: KeyBatch) -> npt.NDArray[np.bool_]:
        slots = self._allocator.find(batch)
        present: npt.NDArray[np.bool_] = slots != ABSENT
        if not self._all_load:
            present &= self._up[Direction.LOAD][self.placement.path_of(slots)]
        return present

    def _allocate(
        self, batch: KeyBatch, prefix: KeyBatch | tuple[()], statuses: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Rows to be stored, their slots and tickets; ``statuses`` gets the others' outcome."""
        nothing = np.empty(0, np.intp), np.empty(0, np.int32), np.empty(0, np.int64)
        if not self.ready or not self._up[Direction.STORE].any():
            self._counters.refused("paused", len(batch))
            return nothing
        self._forget_unreadable(batch)
        admitted = np.arange(len(batch))
        if not isinstance(self._admission, AdmitAll):
            absent = np.flatnonzero(self._allocator.find(batch) == ABSENT)
            turned_away = absent[~self._admission.admit(batch.pick(absent))]
            admitted = np.delete(admitted, turned_away)
            self._counters.refused("admission", len(turned_away))
        wanted = batch if len(admitted) == len(batch) else batch.pick(admitted)
        allocation = self._allocator.allocate(wanted, prefix)
        if allocation is None:
            self._counters.refused("no_room", len(wanted))
            return nothing
        here = np.delete(np.arange(len(wanted)), allocation.rows)
        if here.size:
            resident = self._allocator.find(wanted.pick(here)) != ABSENT
            statuses[admitted[here]] = np.where(resident, RowStatus.OK, RowStatus.BUSY)
            self._counters.blocks_already_there += here.size
        rows, slots, tickets = admitted[allocation.rows], allocation.slots, allocation.tickets
        self._admission.charge(len(rows))
        return rows, slots, tickets

    def _forget_unreadable(self, batch: KeyBatch) -> None:
        """What lies on a disk that serves no loads is worth storing again on another."""
        if not self._all_load:
            present = self._allocator.find(batch) != ABSENT
            lost = np.flatnonzero(present & ~self._readable(batch))
            self._allocator.drop(batch.pick(lost))

    def _begin(
        self,
        direction: Direction,
        batch: KeyBatch,
        blocks: npt.NDArray[np.int64],
        statuses: npt.NDArray[np.uint8],
        rows: npt.NDArray[np.intp],
        slots: npt.NDArray[np.int32],
        tickets: npt.NDArray[np.int64],
    ) -> Transfer:
        self._id_last += 1
        keys = batch.keys
        transfer = Transfer(
            self._id_last,
            direction,
            [keys[row] for row in rows.tolist()],
            slots,
            blocks[rows],
            rows,
        )
        opened = self._open.begin(transfer, tickets, statuses)
        if len(rows):
            return transfer
        if direction is Direction.STORE:
            self._source_free.append(transfer.id)
        self._tell(opened)
        return transfer

    def _apply_result(self, rank: int, result: RankResult) -> None:
        if not self._open.expects(rank, result.transfer_id):
            self._counters.unknown_results += 1
            return
        opened = self._open.merge(rank, result)
        if opened is None:
            return
        if opened.transfer.direction is Direction.STORE:
            self._end_store(opened)
        else:
            self._end_load(opened)
        self._counters.ended(opened.transfer.direction, opened.row_statuses, opened.row_errors)
        opened.statuses[opened.transfer.positions] = opened.row_statuses
        self._tell(opened)

    def _end_store(self, opened: OpenTransfer) -> None:
        slots, tickets = opened.transfer.slots, opened.tickets
        self._allocator.quarantine(slots[opened.held], tickets[opened.held])
        ended = ~opened.held
        stored = opened.row_statuses == RowStatus.OK
        published = self._allocator.commit(slots[ended], tickets[ended], stored[ended])
        dropped = np.flatnonzero(ended)[stored[ended] & ~published]
        opened.row_statuses[dropped] = RowStatus.REFUSED

    def _end_load(self, opened: OpenTransfer) -> None:
        slots, tickets = opened.transfer.slots, opened.tickets
        if not (opened.row_statuses == RowStatus.OK).all():
            lasting = ~np.isin(opened.row_errors, list(TRANSIENT_ERRORS))
            lost = np.isin(opened.row_statuses, (RowStatus.MISS, RowStatus.CORRUPT))
            lost |= (opened.row_statuses == RowStatus.FAILED) & lasting
            self._allocator.invalidate(slots[lost], tickets[lost])
        ended = ~opened.held
        self._allocator.unpin(slots[ended], tickets[ended])
        if opened.void:
            opened.row_statuses[opened.row_statuses == RowStatus.OK] = RowStatus.MISS

    def _apply_release(self, rank: int, slot: int) -> None:
        for hold in self._open.release(rank, slot):
            row = np.array([hold.slot], np.int32), np.array([hold.ticket], np.int64)
            if hold.direction is Direction.STORE:
                self._allocator.release(*row)
            else:
                self._allocator.unpin(*row)

    def _tell(self, opened: OpenTransfer) -> None:
        errors = np.zeros(len(opened.statuses), dtype=np.int32)
        errors[opened.transfer.positions] = opened.row_errors
        self._finished.append(
            TierResult(opened.transfer.id, opened.transfer.direction, opened.statuses, errors)
        )

    def _set_paths(self, rank: int, paths: tuple[PathState, ...]) -> None:
        self._rank_paths[rank] = paths
        states = self.path_states()
        self._up[Direction.LOAD] = np.array([state.loads for state in states])
        self._all_load = all(state.loads for state in states)
        self._up[Direction.STORE] = np.array([state.stores for state in states])
        self._allocator.set_open(self._up[Direction.STORE])

    def _suspect(self) -> None:
        """Much stored, much asked for, nothing ever found: say so, once."""
        if self._suspicion_told or self._counters.hits_found or self._counters.restored:
            return
        suspicion = self._counters.suspicion()
        if suspicion is not None:
            self._suspicion_told = True
            _log.warning("%s", suspicion)


def _encode(keys: Sequence[bytes]) -> KeyBatch:
    """Keys as slots hold them: long ones as their digest. Raises TypeError, before anything else.

    A key of another type would cost its slot: only the engine would notice.
    """
    if isinstance(keys, KeyBatch):
        return keys
    for kind in set(map(type, keys)):
        if not issubclass(kind, bytes):
            raise TypeError(f"a key is bytes, not {kind.__name__}")
    if any(len(key) > KEY_BYTES_MAX for key in keys):
        keys = [stored_key(key) for key in keys]
    return KeyBatch(keys)


def _block_ids(block_ids: npt.ArrayLike, count: int) -> npt.NDArray[np.int64]:
    blocks = np.asarray(block_ids, dtype=np.int64)
    if blocks.shape != (count,):
        raise ValueError(f"{count} keys need as many block ids, not shape {blocks.shape}")
    return blocks

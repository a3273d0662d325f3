"""Transfers under way over all ranks: what each rank said, merged row by row.

What always holds: a row is OK only when every rank said so; a row whose I/O some rank could not
stop is held, and its slot with it, until every such rank has released it, whatever the order in
which results and releases arrive.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdisk.messages import RankResult, Transfer
from kvdisk.transfer import Direction, RowStatus


@dataclass(frozen=True)
class TierResult:
    """How a transfer ended over all ranks, key by key in the order of the call.

    ``statuses`` (uint8) are ``RowStatus`` values. OK: loaded into its block, or stored (or already
    there). BUSY: another store of the key is under way. REFUSED: not tried, because there was no
    room, the queue was full, the path sits out, or admission said no. ``errors`` (int32) is the
    errno of the first rank that failed, 0 elsewhere.
    """

    transfer_id: int
    direction: Direction
    statuses: npt.NDArray[np.uint8]
    errors: npt.NDArray[np.int32]

    @property
    def ok(self) -> bool:
        """Every key succeeded."""
        return bool((self.statuses == RowStatus.OK).all())


@dataclass(eq=False)
class Hold:
    """A row whose slot some ranks may still read or write."""

    slot: int
    ticket: int
    direction: Direction
    ranks: set[int] = field(default_factory=set)
    ended: bool = False  # its transfer has ended: the last release ends the hold


@dataclass(eq=False)
class OpenTransfer:
    """``tickets``, ``row_statuses``, ``row_errors`` and ``held`` are of the transfer's rows;
    ``statuses`` are of the caller's keys. ``..._missing`` are the ranks that have not told."""

    transfer: Transfer
    tickets: npt.NDArray[np.int64]
    statuses: npt.NDArray[np.uint8]
    results_missing: set[int]
    sources_missing: set[int]
    void: bool = False  # all was cleared meanwhile: nothing of it counts
    row_statuses: npt.NDArray[np.uint8] = field(init=False)
    row_errors: npt.NDArray[np.int32] = field(init=False)
    held: npt.NDArray[np.bool_] = field(init=False)
    holds: dict[int, Hold] = field(default_factory=dict)  # by row

    def __post_init__(self) -> None:
        rows = len(self.transfer)
        self.row_statuses = np.full(rows, RowStatus.OK, dtype=np.uint8)
        self.row_errors = np.zeros(rows, dtype=np.int32)
        self.held = np.zeros(rows, dtype=np.bool_)


class OpenTransfers:
    """All transfers of one scheduler that ranks still work on, and the holds they leave behind."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: dict[int, OpenTransfer] = {}
        self._holds: dict[int, list[Hold]] = {}  # by slot

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self, transfer: Transfer, tickets: npt.NDArray[np.int64], statuses: npt.NDArray[np.uint8]
    ) -> OpenTransfer:
        """A new transfer; one without rows is not kept, since no rank will tell of it."""
        ranks = range(self._world_size)
        sources = set(ranks) if transfer.direction is Direction.STORE else set()
        opened = OpenTransfer(transfer, tickets, statuses, set(ranks), sources)
        if len(transfer):
            self._open[transfer.id] = opened
        return opened

    def source_free(self, rank: int, transfer_id: int) -> bool:
        """``rank`` no longer reads a store's blocks. True: it was the last one."""
        opened = self._open.get(transfer_id)
        if opened is None or rank not in opened.sources_missing:
            return False
        opened.sources_missing.remove(rank)
        return not opened.sources_missing

    def expects(self, rank: int, transfer_id: int) -> bool:
        """``rank`` has not told how this transfer ended."""
        opened = self._open.get(transfer_id)
        return opened is not None and rank in opened.results_missing

    def end_of_rank(self, rank: int) -> tuple[list[int], list[RankResult], list[int]]:
        """What a rank that has ended would have reported: sources, results and releases.

        Its requests have ended as well: the kernel gives up a process's files, and the lock on
        them, only when nothing is under way there any more.
        """
        expected = [opened for opened in self._open.values() if rank in opened.results_missing]
        sources = [each.transfer.id for each in expected if rank in each.sources_missing]
        results = []
        for opened in expected:
            rows = len(opened.transfer)
            timed_out = np.full(rows, RowStatus.TIMED_OUT, dtype=np.uint8)
            no_errors = np.zeros(rows, dtype=np.int32)
            none_held = np.zeros(rows, dtype=np.bool_)
            results.append(RankResult(opened.transfer.id, timed_out, no_errors, none_held))
        slots = [
            slot for slot, holds in self._holds.items() if any(rank in hold.ranks for hold in holds)
        ]
        return sources, results, slots

    def void_all(self) -> None:
        """Nothing that is under way counts any more, however it ends."""
        for opened in self._open.values():
            opened.void = True

    def merge(self, rank: int, result: RankResult) -> OpenTransfer | None:
        """Take a result that is expected. The transfer, when it was the last one: it has ended.

        Its ``held`` rows end with the last release, which ``release`` gives.
        """
        opened = self._open[result.transfer_id]
        first_failure = (opened.row_statuses == RowStatus.OK) & (result.statuses != RowStatus.OK)
        opened.row_statuses[first_failure] = result.statuses[first_failure]
        opened.row_errors[first_failure] = result.errors[first_failure]
        for row in np.flatnonzero(result.quarantined).tolist():
            self._hold(opened, row).ranks.add(rank)
        opened.results_missing.remove(rank)
        if opened.results_missing:
            return None
        del self._open[result.transfer_id]
        for row, hold in opened.holds.items():
            if hold.ranks:
                hold.ended = True
                opened.held[row] = True
        return opened

    def release(self, rank: int, slot: int) -> list[Hold]:
        """A rank's disk has let go of a slot. The holds that this ends."""
        holds = self._holds.get(slot, [])
        for hold in holds:
            hold.ranks.discard(rank)
        over = [hold for hold in holds if not hold.ranks]
        left = [hold for hold in holds if hold.ranks]
        if left:
            self._holds[slot] = left
        else:
            self._holds.pop(slot, None)
        return [hold for hold in over if hold.ended]

    def _hold(self, opened: OpenTransfer, row: int) -> Hold:
        hold = opened.holds.get(row)
        if hold is None or not hold.ranks:
            slot = int(opened.transfer.slots[row])
            hold = Hold(slot, int(opened.tickets[row]), opened.transfer.direction)
            opened.holds[row] = hold
            self._holds.setdefault(slot, []).append(hold)
        return hold

"""Which key is in which slot, and which slot may be given up: the tier's one source of truth.

One allocator serves one namespace over all ranks of one scheduler: a slot number means the same
place in every rank's file, so "present" is one answer, not one per rank. It does no I/O and knows
no bytes; it is called from the scheduler's thread only, a few times a step, with many keys at once.

A slot's life::

    free ──allocate──▶ storing ──commit ok──▶ resident ──evicted──▶ free
                          │ commit failed ▶ free   │
    key dropped:       abandoned ──commit──▶ free   retired ──last unpin──▶ free
    timed out, from any of the four in use: quarantined ──release──▶ free
    free, on a path that takes no stores: withheld ──path takes stores again──▶ free

What always holds, asserted at every call that changes something:
    * free + withheld + used + quarantined = total, and the structures that hold free slots and keys
      agree.
    * Only a resident slot is readable. Only a resident slot that nothing uses is given up, and only
      where a store can then take it.
    * A slot that an operation uses is never handed out: a store, every pin and every timed-out
      operation counts, and the slot is free only at zero.
    * A result counts only with the ticket of its allocation. Tickets are never reused, so a late
      result of an earlier tenant changes nothing but a counter.
    * A refused call changes nothing at all, and room is never made from the keys of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvdisk.key_index import ABSENT, KeyBatch, KeyIndex, Keys, Mask, Slots, encode, require
from kvdisk.policy import EvictionPolicy, LRUPolicy
from kvdisk.slot_table import (
    ABANDONED,
    FREE,
    QUARANTINED,
    RESIDENT,
    RETIRED,
    STORING,
    WITHHELD,
    PathOf,
    SlotCounts,
    SlotState,
    SlotTable,
    Tickets,
    distinct,
)

__all__ = ["Allocation", "Entry", "Pinned", "SlotAllocator", "SlotCounts", "SlotState"]

# Room is made for this many slots at once when the tier is large: eviction then costs a fraction
# per key, and a sorted batch of victims comes back as runs. At most one slot in 512 is free early.
_RECLAIM_BATCH: Final = 1024
_RECLAIM_SHARE: Final = 512
_RESTORE_BATCH: Final = 1 << 16
_ABSENT: Final = np.int32(ABSENT)
_NO_SLOTS: Final[Slots] = np.empty(0, dtype=np.int32)


class Allocation(NamedTuple):
    """What is to be stored: ``rows`` of the call's keys into ``slots``, under ``tickets``.

    Rows that are missing here need no store: their key is resident, or a store of it is under way.
    """

    rows: npt.NDArray[np.intp]
    slots: Slots
    tickets: Tickets


class Pinned(NamedTuple):
    """A slot and its ticket for every key of the call; ``ABSENT`` and 0 for keys not readable."""

    slots: Slots
    tickets: Tickets


class Entry(NamedTuple):
    """One slot that has a key, for looking at."""

    slot: int
    key: bytes
    state: SlotState
    operations: int
    ticket: int


class SlotAllocator:
    """Key → slot for ``slots`` slots. Not thread-safe; no call waits for anything.

    About 130 bytes a slot with the default policy, whatever is stored; nothing grows later.
    """

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy | None = None,
        *,
        path_count: int = 1,
        path_of: PathOf = np.zeros_like,
        tell_removed: bool = False,
    ) -> None:
        """``policy`` must have been made for ``slots`` slots; LRU when there is none.

        ``path_of`` says on which of ``path_count`` paths slots lie: see ``set_open``.
        ``tell_removed`` keeps the keys that leave until ``take_removed``.
        """
        self._table = SlotTable(slots, path_count, path_of)
        self._index = KeyIndex(slots, tell_removed=tell_removed)
        self._policy: EvictionPolicy = LRUPolicy(slots) if policy is None else policy
        self._refused = 0
        self._evicted = 0
        self._stale = 0

    # Looking. Nothing here changes anything.

    def __len__(self) -> int:
        """How many slots there are."""
        return self._table.total

    @property
    def room(self) -> int:
        """The most new keys that ``allocate`` would take now."""
        return self._table.count[FREE] + self._table.evictable

    def readable(self, keys: Keys) -> Mask:
        """Which keys are resident. Not a use: see ``touch``."""
        return self._table.resident(self._index.find(encode(keys)))

    def find(self, keys: Keys) -> Slots:
        """The slot of every key that is resident, ``ABSENT`` for the others. Not a use."""
        found = self._index.find(encode(keys))
        return np.where(self._table.resident(found), found, _ABSENT)

    def lookup(self, keys: Keys) -> int:
        """How many keys from the first on are resident without a gap. Not a use."""
        batch = encode(keys)
        if self._index.has_none(batch):
            return 0
        mask = self._table.resident(self._index.find(batch))
        return len(mask) if np.count_nonzero(mask) == len(mask) else int(mask.argmin())

    def __contains__(self, key: bytes) -> bool:
        """Whether ``key`` is resident; for a single key, cheaper than the calls for many."""
        return bool(self._table.state[self._index.find_one(key)] == RESIDENT)

    def counts(self) -> SlotCounts:
        count = self._table.count
        return SlotCounts(
            total=self._table.total,
            free=count[FREE],
            storing=count[STORING],
            abandoned=count[ABANDONED],
            resident=count[RESIDENT],
            pinned=count[RESIDENT] - self._table.idle,
            retired=count[RETIRED],
            quarantined=count[QUARANTINED],
            withheld=count[WITHHELD],
            refused=self._refused,
            evicted=self._evicted,
            stale=self._stale,
        )

    def entries(self) -> Iterator[Entry]:
        """Every slot that has a key, by slot number. Change nothing while iterating."""
        table = self._table
        for slot in table.with_key().tolist():
            yield Entry(
                slot,
                self._index.key(slot),
                SlotState(int(table.state[slot])),
                int(table.operations[slot]),
                int(table.ticket[slot]),
            )

    def check(self) -> None:
        """Recount everything. O(slots), for tests and ``kvdisk verify``.

        Raises:
            AssertionError: something does not add up; the text says what.
        """
        self._table.check()
        self._index.check(self._table.with_key())
        self._table.assert_sums(len(self._index))

    # The life of a key.

    def allocate(self, keys: Keys, prefix: Keys = ()) -> Allocation | None:
        """Find slots for the keys that are not here yet, evicting others if need be.

        ``keys`` are of one sequence of tokens, the head first; ``prefix`` are the keys before them,
        the head first, which are used again by this and kept younger. Both are safe from eviction
        in this call. A key that is here already, or occurs twice, gets no second slot.

        The slots are ascending, neighbours as far as there are any. Each must end in ``commit``, or
        in ``quarantine`` and then ``release``. None: there is no room, and nothing was changed.
        """
        batch = encode(keys)
        found = self._index.find(batch)
        before = self._index.find(encode(prefix)) if len(prefix) else _NO_SLOTS
        plain = self._index.has_none(batch) and not len(before) and batch.distinct
        rows = np.arange(len(batch)) if plain else _rows_to_store(batch, found)
        missing = len(rows) - self._table.count[FREE]
        if missing > 0 and not self._make_room(missing, found, before):
            self._refused += 1
            return None
        if not len(rows):
            self._touch(np.concatenate([before, found]))
            return Allocation(rows, _NO_SLOTS, np.empty(0, dtype=np.int64))
        new = batch if plain else batch.pick(rows)
        slots, where, tickets = self._table.take(len(rows))
        self._index.insert(new, slots, where)
        if plain:
            self._policy.insert(slots, new.hashes)
        else:
            path = found.copy()
            path[rows] = slots
            self._insert_path(before, path, rows, new.hashes)
        self._table.assert_sums(len(self._index))
        return Allocation(rows, slots, tickets)

    def commit(self, slots: Slots, tickets: Tickets, ok: Mask) -> Mask:
        """End stores: where ``ok``, the key becomes readable, else its slot becomes free.

        Returns which rows became readable. A row does not when its key was dropped meanwhile. One
        whose ticket is outdated, or that was quarantined (``release`` ends those), is ignored and
        counted as stale. A slot occurs once in a call.
        """
        state = self._table.state_in_use(slots, tickets)
        current = (state == STORING) | (state == ABANDONED)
        published: Mask = (state == STORING) & ok
        ready = slots[published]
        self._table.publish(ready)
        self._policy.unblock(ready)
        if len(ready) < len(slots):
            self._count_stale(current)
            in_vain = current & ~published
            self._forget(slots[in_vain & (state == STORING)])
            self._table.end_abandoned(slots[in_vain])
        self._table.assert_sums(len(self._index))
        return published

    def pin(self, keys: Keys) -> Pinned:
        """Keep the readable ones of ``keys`` in their slots until ``unpin``. Counts as a use.

        The head of the prefix comes first. A key that occurs twice is pinned twice. Every row with
        a slot must end in ``unpin``, or in ``quarantine`` and then ``release``.
        """
        batch = encode(keys)
        found = self._index.find(batch)
        ready = self._table.resident(found)
        slots = found[ready]
        self._table.begin_operations(slots, distinct=batch.distinct)
        self._policy.touch(slots if batch.distinct else distinct(slots))
        self._table.assert_sums(len(self._index))
        tickets = np.zeros(len(found), dtype=np.int64)
        tickets[ready] = self._table.ticket.take(slots)
        return Pinned(np.where(ready, found, _ABSENT), tickets)

    def unpin(self, slots: Slots, tickets: Tickets) -> None:
        """End loads. Rows without a slot are skipped, rows with an outdated ticket counted."""
        slots, tickets = _with_slot(slots, tickets)
        current = self._table.state_in_use(slots, tickets) >= RESIDENT
        self._count_stale(current)
        self._end_operations(slots[current])

    def touch(self, keys: Keys) -> None:
        """``keys``, the head of the prefix first, are used again, as far as they are here."""
        self._touch(self._index.find(encode(keys)))

    def drop(self, keys: Keys) -> int:
        """Forget ``keys``. Returns how many were here.

        A slot that nothing uses is free at once. A store under way goes on, but is not published;
        loads under way keep their slot until they end.
        """
        found = self._index.find(encode(keys))
        slots = np.unique(found[found != ABSENT])
        self._forget(slots)
        self._table.assert_sums(len(self._index))
        return len(slots)

    def invalidate(self, slots: Slots, tickets: Tickets) -> int:
        """``drop`` for what these slots hold, if it still is what the tickets say.

        For a load that failed its proof: a newer copy of the key elsewhere is left alone. Returns
        how many keys were dropped.
        """
        slots, tickets = _with_slot(slots, tickets)
        current = self._table.current(slots, tickets)
        slots = self._that_have_key(np.unique(slots[current]))
        self._forget(slots)
        self._table.assert_sums(len(self._index))
        return len(slots)

    def take_removed(self) -> list[bytes]:
        """Keys that have left since the last call, in that order, stored or not."""
        return self._index.take_removed()

    # Operations that did not end in time.

    def quarantine(self, slots: Slots, tickets: Tickets) -> None:
        """Stores or loads timed out and may still happen: forget the keys, keep the slots.

        Every row must end in ``release``. Loads of the same slot that are in time still end in
        ``unpin``. The slot is free when all have ended.
        """
        slots, tickets = _with_slot(slots, tickets)
        current = self._table.state_in_use(slots, tickets) != FREE
        self._count_stale(current)
        slots = np.unique(slots[current])
        self._forget(self._that_have_key(slots))
        self._table.quarantine(slots)
        self._table.assert_sums(len(self._index))

    def release(self, slots: Slots, tickets: Tickets) -> None:
        """Timed-out operations have ended after all, well or not."""
        slots, tickets = _with_slot(slots, tickets)
        current = self._table.state_in_use(slots, tickets) == QUARANTINED
        self._count_stale(current)
        self._end_operations(slots[current])

    # Everything at once.

    def set_open(self, paths: Mask) -> None:
        """Which paths take stores from now on; all do at first. O(slots).

        Slots of the others are not handed out, and their keys are not given up to make room there.
        """
        if self._table.set_open(paths):
            aside = self._policy.aside()
            self._policy.unblock(aside[self._table.resident(aside) & self._table.may_go(aside)])
        self._table.assert_sums(len(self._index))

    def clear(self) -> None:
        """Forget all keys. Slots that something uses become free as it ends. O(slots)."""
        slots = self._table.with_key()
        self._index.clear()
        self._policy.clear()
        self._table.drop(slots)
        self._table.rebuild_free()
        self._table.assert_sums(len(self._index))

    def restore(
        self, keys: Keys, slots: npt.NDArray[np.integer], sequences: npt.NDArray[np.integer]
    ) -> Mask:
        """Take over what a previous process left: ``keys[i]`` lies in ``slots[i]``.

        A higher ``sequences[i]`` was stored later and counts as used later. Returns what was taken;
        not taken are slots beyond the last or not free, keys that are here, and all but the latest
        of one key or slot. O(slots).
        """
        require(len(keys) == len(slots) == len(sequences), "columns differ in length")
        batch = encode(keys)
        numbers = slots.astype(np.int64)
        usable = (numbers >= 0) & (numbers < len(self))
        numbers[~usable] = ABSENT
        usable &= self._table.vacant(numbers)
        rows = usable.nonzero()[0]
        rows = rows.take(sequences.take(rows).argsort())
        latest = np.empty(len(self), dtype=np.intp)  # row of a slot
        latest[numbers.take(rows)] = rows
        rows = rows[latest.take(numbers.take(rows)) == rows][::-1]  # the latest first
        hashes = [np.empty(0, dtype=np.int64)]
        kept = [rows[:0]]
        for start in range(0, len(rows), _RESTORE_BATCH):
            part = rows[start : start + _RESTORE_BATCH]
            piece = KeyBatch.from_rows(batch.rows.take(part, axis=0), batch.lengths.take(part))
            new = _rows_to_store(piece, self._index.find(piece))
            if len(new) < len(part):
                part, piece = part.take(new), piece.pick(new)
            to = numbers.take(part).astype(np.int32)
            self._index.insert(piece, to, to)
            hashes.append(piece.hashes)
            kept.append(part)
        rows = np.concatenate(kept)
        to = numbers.take(rows).astype(np.int32)
        self._table.restore(to)
        self._table.rebuild_free()
        self._policy.insert(to, np.concatenate(hashes))
        self._table.assert_sums(len(self._index))
        taken = np.zeros(len(batch), dtype=np.bool_)
        taken[rows] = True
        return taken

    def resize(self, slots: int) -> bool:
        """Have ``slots`` slots from now on. Keys in slots beyond are dropped. O(slots).

        False, and nothing changed, when something uses a slot beyond.
        """
        require(0 < slots < 1 << 31, f"slots must be in 1 .. 2**31 - 1, not {slots}")
        if np.count_nonzero(self._table.operations[slots:]):
            return False
        held = self._table.with_key()
        self._forget(held[held >= slots])
        self._policy.resize(slots)
        self._index = self._index.resized(slots, held[held < slots])
        self._table.resize(slots)
        self._table.assert_sums(len(self._index))
        return True

    # Steps of the above.

    def _make_room(self, missing: int, found: Slots, before: Slots) -> bool:
        """Evict at least ``missing`` slots, none of ``found`` or ``before``; or nothing: False."""
        table = self._table
        path = np.concatenate([found, before])
        path = path[path != ABSENT]
        safe = np.unique(path) if len(path) else _NO_SLOTS
        idle = safe[table.resident(safe) & table.may_go(safe)]
        available = table.evictable - len(idle)
        if missing > available:
            return False
        batch = min(_RECLAIM_BATCH, table.total // _RECLAIM_SHARE)
        table.operations[safe] += 1
        victims = self._policy.evict(min(max(missing, batch), available), table.may_go)
        table.operations[safe] -= 1
        self._policy.unblock(idle)
        require(len(victims) >= missing, "the policy found fewer victims than there are")
        table.evict(victims)
        self._index.remove(victims)
        self._evicted += len(victims)
        return True

    def _insert_path(
        self,
        before: Slots,
        slots: Slots,
        new_rows: npt.NDArray[np.intp],
        hashes: npt.NDArray[np.int64],
    ) -> None:
        """Tell the policy of a call with old and new slots.

        Runs of old and of new slots go one by one, from the tail to the head, so that the order
        is that of the whole path.
        """
        new = np.zeros(len(slots), dtype=np.bool_)
        new[new_rows] = True
        bounds = [0, *(np.flatnonzero(new[1:] != new[:-1]) + 1).tolist(), len(slots)]
        left = len(hashes)
        for start, end in zip(bounds[-2::-1], bounds[:0:-1], strict=True):
            if new[start]:
                self._policy.insert(slots[start:end], hashes[left - (end - start) : left])
                left -= end - start
            else:
                self._touch(slots[start:end])
        self._touch(before)

    def _touch(self, path: Slots) -> None:
        path = path[path != ABSENT]
        if len(path):
            self._policy.touch(distinct(path))

    def _forget(self, slots: Slots) -> None:
        """Take their keys from distinct slots that have one; free those that nothing uses."""
        if len(slots):
            self._index.remove(slots)
            self._policy.remove(slots)
            self._table.drop(slots)

    def _that_have_key(self, slots: Slots) -> Slots:
        state = self._table.state.take(slots)
        with_key: Slots = slots[(state == STORING) | (state == RESIDENT)]
        return with_key

    def _end_operations(self, slots: Slots) -> None:
        self._policy.unblock(self._table.end_operations(slots))
        self._table.assert_sums(len(self._index))

    def _count_stale(self, current: Mask) -> None:
        self._stale += len(current) - int(np.count_nonzero(current))


def _rows_to_store(batch: KeyBatch, found: Slots) -> npt.NDArray[np.intp]:
    """The rows whose key is absent, each key once."""
    rows: npt.NDArray[np.intp] = (found == ABSENT).nonzero()[0]
    if not batch.distinct:
        keys = batch.keys
        seen: dict[bytes, int] = {}
        for row in rows.tolist():
            seen.setdefault(keys[row], row)
        rows = np.array(list(seen.values()), dtype=np.intp)
    return rows


def _with_slot(slots: Slots, tickets: Tickets) -> tuple[Slots, Tickets]:
    there = slots != ABSENT
    return slots[there], tickets[there]

"""Who goes when room is needed, and which stores are worth a write: eviction and admission.

A policy knows slots and hashes, never keys, bytes or files. The allocator owns the truth about
states; a policy only orders. It never looks at a slot twice because that slot may not go (it is in
use, or its disk takes no stores): one that it meets is set aside until the allocator says that it
may go again, so however many are stuck, a call's work is bounded by the victims it was asked for.

The order of a call, for every policy: ``insert`` and ``touch`` get the slots of one sequence of
tokens with the head of the prefix first. A block is useless without every block before it, so of
one call the tail is given up before the head.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from kvdisk.errors import ConfigError
from kvdisk.key_index import Keys, Mask, Slots, encode, require
from kvdisk.slot_queue import SlotQueue, resized

Hashes = npt.NDArray[np.int64]
MayGo = Callable[[Slots], Mask]

SECONDS_PER_DAY: Final = 86_400.0


class EvictionPolicy(Protocol):
    """The order in which slots are given up. All slots of one call are distinct."""

    def insert(self, slots: Slots, hashes: Hashes) -> None:
        """``slots`` hold new keys with these 64-bit hashes; the head of the prefix comes first."""

    def touch(self, slots: Slots) -> None:
        """``slots``, inserted before, are used again; the head of the prefix comes first."""

    def remove(self, slots: Slots) -> None:
        """``slots`` lost their keys for another reason than ``evict``."""

    def evict(self, count: int, may_go: MayGo) -> Slots:
        """Give up ``count`` slots and return them, as of removed.

        ``may_go`` says which of some slots may be given up. Others that are met are set aside.
        Fewer come back only when no more may be given up.
        """

    def aside(self) -> Slots:
        """The slots that are set aside. O(slots)."""

    def unblock(self, slots: Slots) -> None:
        """``slots``, all distinct, may go now: those that were set aside may be given up again."""

    def resize(self, slots: int) -> None:
        """There are ``slots`` slots now. Those beyond were removed before."""

    def clear(self) -> None:
        """All slots lost their keys."""


class LRUPolicy:
    """Least recently used first; of one call, the tail of the prefix before its head.

    The rule: a call makes its slots the youngest, the first of them youngest of all. So when every
    call names the whole prefix that it belongs to (``SlotAllocator.allocate`` has ``prefix`` for
    that), no block is ever younger than a block before it, also where prefixes branch, and whatever
    remains of a prefix is usable. Cost is O(1) amortised per slot; 21 bytes a slot.
    """

    def __init__(self, slots: int) -> None:
        self._queue = SlotQueue(slots)
        self._aside = np.zeros(slots, dtype=np.bool_)

    def insert(self, slots: Slots, hashes: Hashes) -> None:
        self._queue.push(slots[::-1])

    def touch(self, slots: Slots) -> None:
        self._aside[slots] = False
        self._queue.push(slots[::-1])

    def remove(self, slots: Slots) -> None:
        self._aside[slots] = False
        self._queue.remove(slots)

    def evict(self, count: int, may_go: MayGo) -> Slots:
        victims: list[Slots] = []
        while count > 0:
            oldest = self._queue.pop(count)
            if not len(oldest):
                break
            going = may_go(oldest)
            if np.count_nonzero(going) < len(oldest):
                self._aside[oldest[~going]] = True
                oldest = oldest[going]
            count -= len(oldest)
            victims.append(oldest)
        return _joined(victims)

    def aside(self) -> Slots:
        return _numbers(self._aside)

    def unblock(self, slots: Slots) -> None:
        returning = slots[self._aside.take(slots)]
        if len(returning):
            self._aside[returning] = False
            self._queue.push(returning[::-1])

    def resize(self, slots: int) -> None:
        self._queue = self._queue.resized(slots)
        self._aside = resized(self._aside, slots)

    def clear(self) -> None:
        self._queue.clear()
        self._aside.fill(False)

    def order(self) -> Slots:
        """The slots in the order they would be given up, without those set aside. O(slots)."""
        return self._queue.ordered()


class S3FIFOPolicy:
    """S3-FIFO: a small queue filters what is used once before it can push out the rest.

    Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP
    2023, algorithm 1. New slots enter the small queue (a tenth of all); those used more than once
    until they reach its end move to the main queue, others go and leave a fingerprint in the ghost,
    and a key found there enters the main queue at once. The main queue gives a slot as many rounds
    as it was used, three at most.

    Two differences. Slots move in batches, and the queues' shares are looked at before every move,
    so that a main queue above its share needs no eviction of its own. And a call looks at a bounded
    number of used slots in the main queue; then the oldest goes, used or not (the paper's loop may
    go round the whole queue three times while the engine waits).

    Use is counted, not dated, so the tail of a prefix goes before its head only within one call.
    Where prefixes grow over many calls and must stay usable, ``LRUPolicy`` keeps the stricter rule.
    About 66 bytes a slot.
    """

    _SMALL: Final = 1
    _MAIN: Final = 2
    _USES_MAX: Final = 3
    _LOOKS_MIN: Final = 4096
    _LOOKS_PER_VICTIM: Final = 16

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._small = SlotQueue(slots)
        self._main = SlotQueue(slots)
        self._home = np.zeros(slots, dtype=np.uint8)  # 0, _SMALL or _MAIN; also while set aside
        self._uses = np.zeros(slots, dtype=np.uint8)
        self._hashes = np.zeros(slots, dtype=np.int64)
        self._aside = np.zeros(slots, dtype=np.bool_)
        self._small_count = 0  # in the queue, without those set aside
        self._main_count = 0
        self._ghost = GhostTable(self._ghost_keys(slots))

    def insert(self, slots: Slots, hashes: Hashes) -> None:
        returning = self._ghost.forget(hashes)
        self._uses[slots] = 0
        self._hashes[slots] = hashes
        self._push(self._MAIN, slots[returning][::-1])
        self._push(self._SMALL, slots[~returning][::-1])

    def touch(self, slots: Slots) -> None:
        self._uses[slots] = np.minimum(self._uses.take(slots) + 1, self._USES_MAX)

    def remove(self, slots: Slots) -> None:
        queued = slots[~self._aside.take(slots)]
        self._aside[slots] = False
        small = int(np.count_nonzero(self._home.take(queued) == self._SMALL))
        self._small_count -= small
        self._main_count -= len(queued) - small
        self._small.remove(slots)
        self._main.remove(slots)
        self._home[slots] = 0

    def evict(self, count: int, may_go: MayGo) -> Slots:
        victims: list[Slots] = []
        small_target = self._slots // 10
        looks_left = max(self._LOOKS_MIN, self._LOOKS_PER_VICTIM * count)
        while count > 0 and (self._small_count or self._main_count):
            over = self._small_count - small_target
            if self._small_count and (over >= 0 or not self._main_count):
                # With the small queue below its share and the main one empty, all may go.
                most = over + 1 if over >= 0 else count
                gone = self._pass(self._SMALL, min(count, most), may_go, 1)
                self._ghost.remember(self._hashes.take(gone))
            else:
                uses_allowed = 0 if looks_left > 0 else self._USES_MAX
                looks_left -= count
                gone = self._pass(self._MAIN, count, may_go, uses_allowed)
            count -= len(gone)
            self._home[gone] = 0
            victims.append(gone)
        return _joined(victims)

    def aside(self) -> Slots:
        return _numbers(self._aside)

    def unblock(self, slots: Slots) -> None:
        returning = slots[self._aside.take(slots)]
        if len(returning):
            self._aside[returning] = False
            back = returning[::-1]
            small = self._home.take(back) == self._SMALL
            self._push(self._SMALL, back[small])
            self._push(self._MAIN, back[~small])

    def resize(self, slots: int) -> None:
        self._small = self._small.resized(slots)
        self._main = self._main.resized(slots)
        self._home = resized(self._home, slots)
        self._uses = resized(self._uses, slots)
        self._hashes = resized(self._hashes, slots)
        self._aside = resized(self._aside, slots)
        self._slots = slots
        self._ghost = GhostTable(self._ghost_keys(slots))

    def clear(self) -> None:
        self._small.clear()
        self._main.clear()
        self._home.fill(0)
        self._aside.fill(False)
        self._small_count = self._main_count = 0

    def order(self) -> tuple[Slots, Slots]:
        """The small and the main queue, oldest first, without slots set aside. O(slots)."""
        return self._small.ordered(), self._main.ordered()

    def _pass(self, source: int, count: int, may_go: MayGo, uses_allowed: int) -> Slots:
        """Take up to ``count`` from the old end of a queue; return those to be given up.

        Those used more than ``uses_allowed`` times go to the young end of the main queue, those
        that may not go are set aside.
        """
        if source == self._SMALL:
            slots = self._small.pop(count)
            self._small_count -= len(slots)
        else:
            slots = self._main.pop(count)
            self._main_count -= len(slots)
        require(len(slots), "a queue that counts slots has none")
        going = may_go(slots)
        if np.count_nonzero(going) < len(slots):
            self._aside[slots[~going]] = True
            slots = slots[going]
        uses = self._uses.take(slots)
        stays = uses > uses_allowed
        if np.count_nonzero(stays):
            again = slots[stays]
            self._uses[again] = 0 if source == self._SMALL else uses[stays] - 1
            self._push(self._MAIN, again)
            slots = slots[~stays]
        return slots

    def _push(self, target: int, slots: Slots) -> None:
        if not len(slots):
            return
        self._home[slots] = target
        if target == self._SMALL:
            self._small.push(slots)
            self._small_count += len(slots)
        else:
            self._main.push(slots)
            self._main_count += len(slots)

    @staticmethod
    def _ghost_keys(slots: int) -> int:
        return max(1, slots - slots // 10)  # as many as the main queue holds


class GhostTable:
    """Which hashes were seen lately: fingerprints of about the last ``keys``, in bounded memory.

    Approximate in both directions, which costs a little hit rate and nothing else: a hash may be
    forgotten early when its bucket of eight is crowded, and a stranger is taken for known about
    once in half a billion. 16 to 32 bytes per key to remember.
    """

    _WAYS: Final = 8

    def __init__(self, keys: int) -> None:
        require(keys > 0, "a ghost remembers at least one key")
        buckets = 1 << max(0, (-(-keys // (self._WAYS // 2)) - 1).bit_length())
        self._age_max = np.uint32(keys)
        self._bucket_mask = buckets - 1
        self._prints = np.zeros((buckets, self._WAYS), dtype=np.uint32)  # 0: vacant
        self._stamps = np.zeros((buckets, self._WAYS), dtype=np.uint32)
        self._now = 0  # counts keys remembered; compared modulo 2**32

    def remember(self, hashes: Hashes) -> Mask:
        """Remember ``hashes``; return which of them were known before the call."""
        bucket, prints, match = self._look(hashes)
        known: Mask = np.logical_or.reduce(match, axis=1)
        stamps = (np.arange(self._now, self._now + len(hashes)) & 0xFFFFFFFF).astype(np.uint32)
        self._now += len(hashes)
        while len(bucket):
            ages = np.uint32(self._now & 0xFFFFFFFF) - self._stamps.take(bucket, axis=0)
            ages[self._prints.take(bucket, axis=0) == 0] = 0xFFFFFFFF
            way = np.where(match.any(axis=1), match.argmax(axis=1), ages.argmax(axis=1))
            self._prints[bucket, way] = prints
            self._stamps[bucket, way] = stamps
            # Several of one bucket chose one place: the last stands, the others choose again.
            lost = self._prints[bucket, way] != prints
            if not np.count_nonzero(lost):
                break
            bucket, prints, stamps, match = bucket[lost], prints[lost], stamps[lost], match[lost]
        return known

    def forget(self, hashes: Hashes) -> Mask:
        """Forget ``hashes``; return which of them were known."""
        bucket, _, match = self._look(hashes)
        rows, ways = match.nonzero()
        known = np.zeros(len(hashes), dtype=np.bool_)
        if rows.size:
            known[rows] = True
            self._prints[bucket.take(rows), ways] = 0
        return known

    def _look(self, hashes: Hashes) -> tuple[Hashes, npt.NDArray[np.uint32], Mask]:
        bucket = hashes & self._bucket_mask
        prints = (hashes >> 32).astype(np.uint32) | np.uint32(1)
        match = self._prints.take(bucket, axis=0) == prints[:, None]
        if np.count_nonzero(match):
            ages = np.uint32(self._now & 0xFFFFFFFF) - self._stamps.take(bucket, axis=0)
            match &= ages <= self._age_max
        return bucket, prints, match


class AdmissionPolicy(Protocol):
    """Which new keys are worth a write."""

    def admit(self, keys: Keys) -> Mask:
        """A mask over ``keys`` (head of the prefix first); false: do not store this one now."""

    def charge(self, blocks: int) -> None:
        """``blocks`` that were admitted are really being written."""


class AdmitAll:
    """Everything is stored."""

    def admit(self, keys: Keys) -> Mask:
        return np.ones(len(keys), dtype=np.bool_)

    def charge(self, blocks: int) -> None:
        pass


class SecondTouch:
    """A key is stored when it is offered for the second time: what is used once costs no write.

    ``keys`` is how many of the last offered keys are remembered (16 to 32 bytes each); the number
    of slots is a sensible choice, because what returns later than that would have been evicted.
    """

    def __init__(self, keys: int) -> None:
        self._ghost = GhostTable(keys)

    def admit(self, keys: Keys) -> Mask:
        return self._ghost.remember(encode(keys).hashes)

    def charge(self, blocks: int) -> None:
        pass


class WriteBudget:
    """Keeps writes below ``bytes_per_day``, so that the disk reaches its years (a token bucket).

    Tokens flow in evenly and gather up to ``burst_bytes`` (an hour's worth unless given), which is
    also what it starts with. Within a call the head of the prefix is served first. Asking costs
    nothing; ``charge`` does, so a store that was then refused is not paid for.
    """

    def __init__(
        self,
        bytes_per_day: float,
        block_bytes: int,
        *,
        burst_bytes: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``block_bytes`` is what storing one block writes; ``clock`` gives seconds."""
        if bytes_per_day <= 0 or block_bytes <= 0:
            raise ConfigError("a write budget needs bytes per day and bytes per block above 0")
        self._burst_bytes = bytes_per_day / 24 if burst_bytes is None else burst_bytes
        if self._burst_bytes < block_bytes:
            raise ConfigError(
                f"a burst of {self._burst_bytes:.0f} bytes never holds a block of {block_bytes}; "
                "raise the write budget or its burst"
            )
        self._bytes_per_second = bytes_per_day / SECONDS_PER_DAY
        self._block_bytes = block_bytes
        self._clock = clock
        self._filled_at = clock()
        self._tokens_bytes = self._burst_bytes

    def admit(self, keys: Keys) -> Mask:
        self._fill()
        return np.arange(len(keys)) < int(self._tokens_bytes // self._block_bytes)

    def charge(self, blocks: int) -> None:
        self._fill()
        self._tokens_bytes -= blocks * self._block_bytes

    def _fill(self) -> None:
        now = self._clock()
        passed = max(0.0, now - self._filled_at)  # a clock that steps back gives nothing
        self._filled_at = now
        self._tokens_bytes = min(
            self._burst_bytes, self._tokens_bytes + passed * self._bytes_per_second
        )


class AdmitIfAll:
    """Stores what every one of ``policies`` admits; each is asked only for what is left.

    So a budget placed last is not asked for keys that were turned down before it.
    """

    def __init__(self, policies: Sequence[AdmissionPolicy]) -> None:
        self._policies = tuple(policies)

    def admit(self, keys: Keys) -> Mask:
        batch = encode(keys)
        admitted = np.ones(len(batch), dtype=np.bool_)
        for policy in self._policies:
            rows = admitted.nonzero()[0]
            admitted[rows] = policy.admit(batch.pick(rows))
        return admitted

    def charge(self, blocks: int) -> None:
        for policy in self._policies:
            policy.charge(blocks)


EVICTION_POLICIES: Final[dict[str, Callable[[int], EvictionPolicy]]] = {
    "lru": LRUPolicy,
    "s3fifo": S3FIFOPolicy,
}


def make_eviction_policy(name: str, slots: int) -> EvictionPolicy:
    """The eviction policy called ``name``, for ``slots`` slots.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in EVICTION_POLICIES:
        raise ConfigError(
            f"unknown eviction policy {name!r}; there are: {', '.join(sorted(EVICTION_POLICIES))}"
        )
    return EVICTION_POLICIES[name](slots)


def make_admission_policy(
    name: str,
    slots: int,
    *,
    write_budget_bytes: int = 0,
    block_bytes: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> AdmissionPolicy:
    """The admission policy called ``name`` ("all", "second-touch") for a tier of ``slots`` slots.

    With a ``write_budget_bytes`` a day above 0, what it admits must also fit that; storing a block
    writes ``block_bytes``.

    Raises:
        ConfigError: there is none of that name, or the budget is below a block an hour.
    """
    policies: list[AdmissionPolicy] = []
    if name == "second-touch":
        policies.append(SecondTouch(slots))
    elif name != "all":
        raise ConfigError(f"unknown admission policy {name!r}; there are: all, second-touch")
    if write_budget_bytes:
        policies.append(WriteBudget(write_budget_bytes, block_bytes, clock=clock))
    return AdmitIfAll(policies) if policies else AdmitAll()


def _numbers(mask: Mask) -> Slots:
    slots: Slots = mask.nonzero()[0].astype(np.int32)
    return slots


def _joined(parts: list[Slots]) -> Slots:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)

"""Which slot holds a key: a hash table in flat numpy arrays, asked for many keys at once.

A dict of a million ``bytes`` costs 200 bytes an entry, stops the caller for a tenth of a second
whenever it rebuilds itself, and is a million objects for the garbage collector to visit. The
serving engine's thread pays for all of that. Here an entry is a row of plain arrays: nothing is
allocated after construction, nothing is ever rebuilt, and a call for 64 keys does about the work
of one.

What always holds:
    * Keys are compared in full. Hashes only say where to look.
    * A bucket has 32 places, whose tags fill one cache line. It is searched whole, so removing a
      key leaves no tombstone. A key whose bucket is full goes to a dict, the overflow; with at most
      half of all places in use that is about one key in a hundred thousand.
    * A key is in the table once, and a slot holds one key.

Python's own ``hash`` is used: it is keyed per process (SipHash), so nobody can choose keys that
collide unless PYTHONHASHSEED is fixed, and even then the overflow keeps every answer right.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

Slots = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]
Where = slice | Slots

# The slot record's key field; the tier digests longer keys before they come here.
KEY_BYTES_MAX: Final = 64
ABSENT: Final = -1

_LENGTHS: Final = frozenset(range(1, KEY_BYTES_MAX + 1))
_KEY: Final = np.dtype(f"S{KEY_BYTES_MAX}")
_WORDS: Final = KEY_BYTES_MAX // 8
_WAYS: Final = 32
_IN_OVERFLOW: Final = -1
# Which quarter of a 64-bit hash is its top 16 bits. The bucket comes from the bottom.
_TAG_LOW: Final = np.uint16(1)  # makes every tag differ from a vacant place
_TAG_QUARTER: Final = 3 if sys.byteorder == "little" else 0


def require(condition: object, message: str) -> None:
    """An assertion that stays on under ``python -O``: ``AssertionError`` is a programmer error."""
    if not condition:
        raise AssertionError(message)


class KeyBatch:
    """The keys of one call, encoded once. Everything that takes keys takes this in their place.

    ``words`` holds the keys zero-padded to 64 bytes, as ``(n, 8)`` integers; ``rows`` is the same
    memory as ``(n, 64)`` bytes, which is what the native engine takes beside ``lengths``.
    Slicing gives a batch of the same memory.
    """

    __slots__ = ("_distinct", "_found", "_hashes", "_keys", "_lengths", "length", "words")

    words: npt.NDArray[np.int64]
    length: int
    """The one length of all keys in bytes, or 0 when lengths differ."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        lengths = set(map(len, keys))
        if not lengths <= _LENGTHS:
            raise AssertionError(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {sorted(lengths)}")
        self._keys: Sequence[bytes] | None = keys
        self.words = np.array(keys, dtype=_KEY).view(np.int64).reshape(-1, _WORDS)
        self.length = lengths.pop() if len(lengths) == 1 else 0
        self._lengths: npt.NDArray[np.uint8] | None = None
        self._hashes: npt.NDArray[np.int64] | None = None
        self._distinct: bool | None = None
        self._found: _Found | None = None

    @classmethod
    def from_rows(cls, rows: npt.NDArray[np.uint8], lengths: npt.NDArray[np.uint8]) -> KeyBatch:
        """From zero-padded ``(n, 64)`` bytes and ``(n,)`` lengths, as slot records are read."""
        require(rows.shape == (len(lengths), KEY_BYTES_MAX), "rows are (n, 64), lengths are (n,)")
        require(
            not len(lengths) or (lengths.min() > 0 and lengths.max() <= KEY_BYTES_MAX),
            f"a key has 1 to {KEY_BYTES_MAX} bytes",
        )
        words = np.ascontiguousarray(rows).view(np.int64)
        return cls._of(None, words, np.asarray(lengths, dtype=np.uint8), None)

    @classmethod
    def _of(
        cls,
        keys: Sequence[bytes] | None,
        words: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.uint8] | None,
        hashes: npt.NDArray[np.int64] | None,
        length: int = 0,
    ) -> KeyBatch:
        batch = cls.__new__(cls)
        batch._keys, batch.words, batch._lengths, batch._hashes = keys, words, lengths, hashes
        batch.length = length
        if lengths is not None and len(lengths) and lengths.min() == lengths.max():
            batch.length = int(lengths[0])
        batch._distinct = None
        batch._found = None
        return batch

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, part: slice) -> KeyBatch:
        return self._of(
            None if self._keys is None else self._keys[part],
            self.words[part],
            None if self._lengths is None else self._lengths[part],
            None if self._hashes is None else self._hashes[part],
            self.length,
        )

    def pick(self, rows: npt.NDArray[np.intp]) -> KeyBatch:
        """The batch of these rows alone, in their order."""
        keys = self.keys
        return self._of(
            [keys[row] for row in rows.tolist()],
            self.words.take(rows, axis=0),
            None if self.length else self.lengths.take(rows),
            self.hashes.take(rows),
            self.length,
        )

    @property
    def keys(self) -> Sequence[bytes]:
        if self._keys is None:
            if self.length:
                columns = np.ascontiguousarray(self.rows[:, : self.length])
                keys: list[bytes] = columns.view(f"V{self.length}").reshape(-1).tolist()
            else:
                flat = self.words.tobytes()
                starts = range(0, len(flat), KEY_BYTES_MAX)
                ends = zip(starts, self.lengths.tolist(), strict=True)
                keys = [flat[start : start + length] for start, length in ends]
            self._keys = keys
        return self._keys

    @property
    def rows(self) -> npt.NDArray[np.uint8]:
        return self.words.view(np.uint8)

    @property
    def lengths(self) -> npt.NDArray[np.uint8]:
        if self._lengths is None:
            if self.length:
                self._lengths = np.full(len(self), self.length, dtype=np.uint8)
            else:
                self._lengths = np.fromiter(map(len, self.keys), np.uint8, len(self))
        return self._lengths

    @property
    def hashes(self) -> npt.NDArray[np.int64]:
        if self._hashes is None:
            self._hashes = np.fromiter(map(hash, self.keys), np.int64, len(self))
        return self._hashes

    @property
    def distinct(self) -> bool:
        """Whether no key occurs twice."""
        if self._distinct is None:
            self._distinct = len(set(self.keys)) == len(self)
        return self._distinct


Keys = Sequence[bytes] | KeyBatch


def encode(keys: Keys) -> KeyBatch:
    return keys if isinstance(keys, KeyBatch) else KeyBatch(keys)


class _Found(NamedTuple):
    """Where a batch's keys were when ``owner`` had changed ``version`` times."""

    owner: KeyIndex
    version: int
    slots: Slots
    none: bool  # all of them are ABSENT
    bucket: npt.NDArray[np.int64]  # the home of each key
    tags: npt.NDArray[np.uint16]  # what it carries there, never 0
    tags_there: npt.NDArray[np.uint16]  # the tags of its whole bucket


class KeyIndex:
    """Key → slot for ``slots`` slots, and slot → key. 81 to 93 bytes a slot."""

    def __init__(self, slots: int, *, tell_removed: bool = False) -> None:
        require(slots > 0, "an index needs a slot")
        buckets = 1 << max(0, (-(-slots // (_WAYS // 2)) - 1).bit_length())
        self._bucket_mask = np.int64(buckets - 1)
        # All is written once here, so that no page fault is left for the scheduler's thread.
        self._tags = np.full((buckets, _WAYS), 0, dtype=np.uint16)  # 0: the place is vacant
        self._flat_tags = self._tags.reshape(-1)
        self._flat_slots = np.full(buckets * _WAYS, 0, dtype=np.int32)  # stale where vacant
        self._place = np.full(slots, _IN_OVERFLOW, dtype=np.int32)  # of a slot's key
        self._words = np.full((slots, _WORDS), 0, dtype=np.int64)
        self._lengths = np.full(slots, 0, dtype=np.uint8)
        # The same memory as Python numbers, for one key at a time.
        self._tag_view = self._flat_tags.data
        self._slot_view = self._flat_slots.data
        self._length_view = self._lengths.data
        self._key_view = self._words.reshape(-1).view(np.uint8).data
        self._overflow: dict[bytes, int] = {}
        self._version = 0
        self._size = 0
        self._removed: list[bytes] | None = [] if tell_removed else None
        # The one length of all keys held, so that lengths need no comparing; None: they differ.
        self._length: int | None = 0
        self._absent = np.full(256, ABSENT, dtype=np.int32)

    def __len__(self) -> int:
        return self._size

    def take_removed(self) -> list[bytes]:
        """With ``tell_removed``: the keys that have left since the last call, in that order."""
        removed = self._removed or []
        self._removed = None if self._removed is None else []
        return removed

    def find(self, batch: KeyBatch) -> Slots:
        """The slot of each key, ``ABSENT`` where there is none. Not to be written to.

        The batch remembers the answer, so asking again before anything changed costs nothing.
        """
        return self._find(batch).slots

    def has_none(self, batch: KeyBatch) -> bool:
        """Whether every key is absent: what new blocks are, and cheaper than looking at slots."""
        return self._find(batch).none

    def _find(self, batch: KeyBatch) -> _Found:
        known = batch._found
        if known is not None and known.version == self._version and known.owner is self:
            return known
        hashes = batch.hashes
        bucket = hashes & self._bucket_mask
        tags = hashes.view(np.uint16)[_TAG_QUARTER::4] | _TAG_LOW
        tags_there = self._tags.take(bucket, axis=0)
        slots, none = self._search(batch, bucket, tags_there == tags[:, None])
        batch._found = _Found(self, self._version, slots, none, bucket, tags, tags_there)
        return batch._found

    def _search(
        self, batch: KeyBatch, bucket: npt.NDArray[np.int64], match: Mask
    ) -> tuple[Slots, bool]:
        """The slot of each key, and whether there is none at all.

        ``match`` says which places of its bucket each key may be in.
        """
        count = len(batch)
        if count > len(self._absent):
            self._absent = np.full(2 * count, ABSENT, dtype=np.int32)
        found: Slots = self._absent[:count].copy()
        compare_lengths = self._length is None or not batch.length
        if not compare_lengths and batch.length != self._length:
            return found, True
        none = True
        rows, ways = match.nonzero()
        if rows.size:
            places = bucket.take(rows) * _WAYS + ways
            slots = self._flat_slots.take(places)
            different = self._words.take(slots, axis=0) != batch.words.take(rows, axis=0)
            if compare_lengths:
                different[:, 0] |= self._lengths.take(slots) != batch.lengths.take(rows)
            if np.count_nonzero(different):
                equal = ~different.any(axis=1)
                rows, slots = rows[equal], slots[equal]
            found[rows] = slots
            none = not rows.size
        if self._overflow and not self._overflow.keys().isdisjoint(batch.keys):
            for row in (found == ABSENT).nonzero()[0].tolist():
                found[row] = self._overflow.get(batch.keys[row], ABSENT)
            none = False
        return found, none

    def find_one(self, key: bytes) -> int:
        """The slot of ``key`` or ``ABSENT``; for one key, several times cheaper than ``find``."""
        number = hash(key)
        first = (number & int(self._bucket_mask)) * _WAYS
        tag = (number >> 48) & 0xFFFF | 1
        tags = self._tag_view[first : first + _WAYS].tolist()
        if tag in tags:
            for way in range(_WAYS):
                if tags[way] == tag:
                    slot: int = self._slot_view[first + way]
                    start = slot * KEY_BYTES_MAX
                    if self._length_view[slot] == len(key) and (
                        self._key_view[start : start + len(key)] == key
                    ):
                        return slot
        return self._overflow.get(key, ABSENT) if self._overflow else ABSENT

    def insert(self, batch: KeyBatch, slots: Slots, where: Where) -> None:
        """Put distinct keys that are absent into distinct slots that hold none.

        ``where`` is ``slots``, or the slice that it equals when it is one run.
        """
        # The allocator has just looked, so this costs nothing unless it made room since.
        *_, bucket, tags, tags_there = self._find(batch)
        self._version += 1
        self._words[where] = batch.words
        self._lengths[where] = batch.length or batch.lengths
        if not batch.length or (self._size and batch.length != self._length):
            self._length = None
        elif not self._size:
            self._length = batch.length
        self._size += len(slots)
        while True:
            places = bucket * _WAYS + (tags_there == 0).argmax(axis=1)
            if np.count_nonzero(tags_there[:, -1]):  # else none of the buckets can be full
                fits = self._flat_tags.take(places) == 0
                self._put_in_overflow(slots[~fits])
                bucket, tags, slots, places = bucket[fits], tags[fits], slots[fits], places[fits]
                where = slots
            self._flat_tags[places] = tags
            self._flat_slots[places] = slots
            self._place[where] = places
            # Two keys of one bucket wrote to one place: the later stands, the other tries again.
            lost = self._flat_slots.take(places) != slots
            if not np.count_nonzero(lost):
                return
            bucket, tags, slots = bucket[lost], tags[lost], slots[lost]
            where = slots
            tags_there = self._tags.take(bucket, axis=0)

    def remove(self, slots: Slots) -> None:
        """Forget the keys of distinct slots that hold one."""
        self._note_removed(slots)
        self._version += 1
        self._size -= len(slots)
        places = self._place.take(slots)
        if self._overflow:
            spilled = places == _IN_OVERFLOW
            if np.count_nonzero(spilled):
                for slot in slots[spilled].tolist():
                    del self._overflow[self.key(slot)]
                places = places[~spilled]
        self._flat_tags[places] = 0

    def key(self, slot: int) -> bytes:
        """The key that ``slot`` holds, or held last."""
        padded: bytes = self._words[slot].tobytes()
        return padded[: int(self._lengths[slot])]

    def batch(self, slots: Slots) -> KeyBatch:
        """The keys of ``slots``."""
        rows = self._words.take(slots, axis=0).view(np.uint8)
        return KeyBatch.from_rows(rows, self._lengths.take(slots))

    def clear(self) -> None:
        if self._removed is not None:
            self._note_removed(self._live())
        self._version += 1
        self._flat_tags.fill(0)
        self._overflow.clear()
        self._size = 0
        self._length = 0

    def resized(self, slots: int, live: Slots) -> KeyIndex:
        """A new index of ``slots`` slots that holds what ``live`` slots hold here."""
        index = KeyIndex(slots)
        index._removed = self._removed
        for start in range(0, len(live), 1 << 16):
            part = live[start : start + (1 << 16)]
            index.insert(self.batch(part), part, part)
        return index

    def check(self, live: Slots) -> None:
        """Full recount: exactly ``live`` slots hold a key, and each key leads back to its slot."""
        require(len(live) == self._size, f"index counts {self._size} keys, {len(live)} slots do")
        held = np.sort(self._live())
        require(np.array_equal(held, np.sort(live)), "the table's slots are not the live slots")
        require(np.array_equal(self.find(self.batch(live)), live), "a key leads to another slot")

    def _live(self) -> Slots:
        """The slots that hold a key, in no order. O(slots)."""
        placed = self._flat_slots[self._flat_tags != 0]
        return np.concatenate([placed, np.array(list(self._overflow.values()), np.int32)])

    def _note_removed(self, slots: Slots) -> None:
        if self._removed is not None:
            self._removed += self.batch(slots).keys

    def _put_in_overflow(self, slots: Slots) -> None:
        self._place[slots] = _IN_OVERFLOW
        for slot in slots.tolist():
            self._overflow[self.key(slot)] = slot

"""What a slot record says, for those who look at files from outside: inspect and verify.

The engine reads and writes records on its own; this is the same format seen from Python, and the
native arithmetic that proves a record and the payload that belongs to it. docs/file-format.md has
the offsets, and a test holds the three together.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdisk import _native

RECORD: Final = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "u1"),
        ("key_length", "u1"),
        ("reserved", "<u2"),
        ("slot", "<u8"),
        ("sequence", "<u8"),
        ("epoch", "<u8"),
        ("valid_bytes", "<u8"),
        ("payload_checksum", "<u8"),
        ("key", "u1", (64,)),
        ("unused", "<u8"),
        ("checksum", "<u8"),
    ]
)
assert RECORD.itemsize == _native.record_bytes

Bytes = npt.NDArray[np.uint8]


class RecordState(enum.IntEnum):
    """What a record is worth; the values are the native module's."""

    EMPTY = 0
    VALID = 1
    VOID = 2  # proves itself, but belongs to another epoch of the file
    DAMAGED = 3


def record_states(records: Bytes, first_slot: int, epoch: int) -> Bytes:
    """The ``RecordState`` of each whole record in ``records``, of slots from ``first_slot`` on."""
    return _native.record_states(records, first_slot, epoch)


def as_records(records: Bytes) -> npt.NDArray[np.void]:
    """The same bytes by field, whole records only."""
    whole = len(records) // RECORD.itemsize * RECORD.itemsize
    return records[:whole].view(RECORD)


def payload_matches(record: Bytes, payload: Bytes) -> bool:
    """Whether ``payload``, exactly the record's valid bytes, is what was stored. Without the GIL.

    ``record`` has 128 bytes and is VALID.
    """
    return _native.payload_matches(record, payload)

"""The first page of a record file: the mark that says "ours", and which cache it belongs to.

A file is adopted, resized or deleted only when this page proves itself. All integers are
little-endian; the fields lie in the first 512 bytes, so that no power cut tears them:

    offset  bytes
         0      8  magic "KVDISKIX"
         8      4  format version, 2
        12      4  zero
        16      8  epoch: slot records of an older one are void; never 0
        24      8  bytes of a slot
        32      8  number of slots
        40      4  rank
        44      4  world size
        48     32  fingerprint of everything that must match for bytes to be reusable
        80      8  clears: the number of the last clear; a path with a lower one has missed it
        88      8  BLAKE2b, 8-byte digest, of bytes 0 to 88
        96   4000  zero

Slot records follow at offset 4096, 128 bytes each.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import Final

HEADER_BYTES: Final = 4096
RECORD_BYTES: Final = 128
RECORD_PAGE_BYTES: Final = 4096
RECORDS_PER_PAGE: Final = RECORD_PAGE_BYTES // RECORD_BYTES
FINGERPRINT_BYTES: Final = 32

_MAGIC: Final = b"KVDISKIX"
_VERSION: Final = 2
_FIELDS: Final = struct.Struct("<8sI4xQQQII32sQ")
_CHECKSUM_BYTES: Final = 8
_CONTENT_BYTES: Final = _FIELDS.size + _CHECKSUM_BYTES


@dataclass(frozen=True)
class RankHeader:
    """What the first page says. ``fingerprint`` is 32 bytes, sizes are in bytes."""

    epoch: int
    slot_bytes: int
    slot_count: int
    rank: int
    world_size: int
    fingerprint: bytes
    clears: int = 0

    def pack(self) -> bytes:
        """The page, HEADER_BYTES long."""
        fields = _FIELDS.pack(
            _MAGIC,
            _VERSION,
            self.epoch,
            self.slot_bytes,
            self.slot_count,
            self.rank,
            self.world_size,
            self.fingerprint,
            self.clears,
        )
        return (fields + _checksum(fields)).ljust(HEADER_BYTES, b"\0")


def is_marked(page: bytes) -> bool:
    """Whether a page was once our header, damaged or not."""
    return page[: len(_MAGIC)] == _MAGIC


def parse_header(page: bytes) -> RankHeader | str:
    """The header, or in a few words why this page is none."""
    if len(page) < HEADER_BYTES:
        return f"its header is cut short ({len(page)} of {HEADER_BYTES} bytes)"
    fields = page[: _FIELDS.size]
    magic, version, epoch, slot_bytes, slot_count, rank, world_size, fingerprint, clears = (
        _FIELDS.unpack(fields)
    )
    if magic != _MAGIC:
        return "it is not a kvdisk record file"
    if version != _VERSION:
        return f"it has format version {version}, this is version {_VERSION}"
    if page[_FIELDS.size : _CONTENT_BYTES] != _checksum(fields):
        return "its header is damaged (checksum)"
    if any(page[_CONTENT_BYTES:]) or 0 in (epoch, slot_bytes, slot_count):
        return "its header is damaged (impossible values)"
    return RankHeader(epoch, slot_bytes, slot_count, rank, world_size, fingerprint, clears)


def file_names(rank: int, world_size: int) -> tuple[str, str]:
    """The names of a rank's data file and record file."""
    stem = f"rank-{rank}-of-{world_size}"
    return f"{stem}.kv", f"{stem}.idx"


def record_file_bytes(slot_count: int) -> int:
    """Size of a record file: the header, then whole pages of records."""
    pages = -(-slot_count // RECORDS_PER_PAGE)
    return HEADER_BYTES + pages * RECORD_PAGE_BYTES


def slots_within(capacity_bytes: int, slot_bytes: int) -> int:
    """How many slots fit when data, records and header together may take ``capacity_bytes``.

    0 when not even one does.
    """
    room = capacity_bytes - HEADER_BYTES
    page_of_slots = RECORDS_PER_PAGE * slot_bytes + RECORD_PAGE_BYTES
    pages, rest = divmod(max(0, room), page_of_slots)
    return pages * RECORDS_PER_PAGE + max(0, rest - RECORD_PAGE_BYTES) // slot_bytes


def _checksum(fields: bytes) -> bytes:
    return hashlib.blake2b(fields, digest_size=_CHECKSUM_BYTES).digest()

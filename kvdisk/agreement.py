"""What several ranks hold alike: a block is there only when every rank has its part of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvdisk.messages import RankOpened
from kvdisk.slots import Entry


def rows_of_all(ranks: Sequence[RankOpened]) -> npt.NDArray[np.intp]:
    """The rows of ``ranks[0].restored_*`` whose key lies in the same slot in every other rank."""
    first = ranks[0]
    rows = np.arange(len(first.restored_slots))
    for other in ranks[1:]:
        _, mine, theirs = np.intersect1d(
            first.restored_slots[rows], other.restored_slots, return_indices=True
        )
        equal = (first.restored_key_lengths[rows[mine]] == other.restored_key_lengths[theirs]) & (
            first.restored_keys[rows[mine]] == other.restored_keys[theirs]
        ).all(axis=1)
        rows = rows[mine[equal]]
    return rows


def keys_not_held(entries: Iterable[Entry], opened: RankOpened) -> list[bytes]:
    """The keys of ``entries`` that a rank does not have in the same slot."""
    row_of_slot = {slot: row for row, slot in enumerate(opened.restored_slots.tolist())}
    missing = []
    for entry in entries:
        row = row_of_slot.get(entry.slot)
        if row is not None:
            length = int(opened.restored_key_lengths[row])
            if opened.restored_keys[row, :length].tobytes() == entry.key:
                continue
        missing.append(entry.key)
    return missing

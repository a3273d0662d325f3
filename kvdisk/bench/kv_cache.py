"""A KV cache whose blocks can be told apart: what the whole layer stores and loads.

The memory is laid out as serving engines do: one region per layer, each with a segment of every
block. Every block has random bytes of its own, and the first word of each 512 bytes carries which
store it belongs to, hidden under random bits. So no two blocks on the disk share a sector, nothing
can be compressed, and a loaded block can be compared, byte for byte, with the one it was stored
from.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvdisk.bench.job import Geometry
from kvdisk.layout import Layout

WORD_BYTES: Final = 8
STAMP_WORDS: Final = 512 // WORD_BYTES


class KvCache:
    """``block_count`` blocks, of which the first ``source_count`` are stored from.

    The others are loaded into. ``layout`` describes all of them.
    """

    def __init__(self, geometry: Geometry, source_count: int, target_count: int, seed: int) -> None:
        self.source_count = source_count
        self.block_count = source_count + target_count
        words = geometry.segment_bytes // WORD_BYTES
        # layers x blocks x words
        shape = (geometry.layers, self.block_count, words)
        # Whole pages, as engines allocate. numpy's own arrays begin 16 bytes into a page, and to
        # there memcpy runs at a quarter of its speed on some processors (page aliasing in "rep
        # movsb", glibc bug 30994; measured on Zen 3: 1.3 instead of 4.9 GB/s).
        memory = mmap.mmap(-1, math.prod(shape) * WORD_BYTES)
        self._words = np.frombuffer(memory, dtype=np.uint64).reshape(shape)
        generator = np.random.Generator(np.random.SFC64(seed))
        for layer in self._words:
            layer[:source_count] = generator.integers(
                0, 2**64, size=(source_count, words), dtype=np.uint64
            )
        self._words[:, source_count:] = 0  # touched now, not in the timed part
        # layers x marked words of a segment: hides the marks, which would be alike everywhere
        self._veil = generator.integers(
            0, 2**64, size=self._words[:, 0, ::STAMP_WORDS].shape, dtype=np.uint64
        )
        self.layout = Layout.from_tensors(list(self._words), block_dim=0)

    @property
    def memory_bytes(self) -> int:
        return self._words.nbytes

    def stamp(self, blocks: Sequence[int], marks: npt.NDArray[np.uint64]) -> int:
        """See ``Cache`` in caches.py: nothing to wait for."""
        for block, mark in zip(blocks, marks, strict=True):
            np.bitwise_xor(self._veil, mark, out=self._words[:, block, ::STAMP_WORDS])
        return 0

    def gather(self, block: int, staging: npt.NDArray[np.uint64]) -> None:
        """Copy a block's segments to the beginning of ``staging``."""
        segments = self._words[:, block]
        staging[: segments.size].reshape(segments.shape)[:] = segments

    def scatter(self, block: int, staging: npt.NDArray[np.uint64]) -> None:
        """Copy the beginning of ``staging`` to a block's segments."""
        segments = self._words[:, block]
        segments[:] = staging[: segments.size].reshape(segments.shape)

    def holds(self, target: int, source: int, mark: np.uint64) -> bool:
        """See ``Cache`` in caches.py."""
        loaded, stored = self._words[:, target], self._words[:, source]
        if not np.array_equal(loaded[:, ::STAMP_WORDS] ^ mark, self._veil):
            return False
        # Equal marks in both, for the comparison of all the rest in one go.
        loaded[:, ::STAMP_WORDS] = stored[:, ::STAMP_WORDS]
        return bool(np.array_equal(loaded, stored))

    def wipe(self, target: int) -> None:
        """See ``Cache`` in caches.py."""
        self._words[:, target, ::STAMP_WORDS] = 0

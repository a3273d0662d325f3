"""Blocks whose bytes follow from their id: a load is proved without keeping what was stored.

A block is one page of random words, the same for all, with every word changed by a number that is
mixed from the id. So each block is incompressible in itself, no two of them share a sector, and
each byte of a loaded block has one right value.
"""

from __future__ import annotations

import math
import mmap

import numpy as np
import numpy.typing as npt

from kvdisk.bench.job import Geometry
from kvdisk.layout import Layout
from kvdisk.replay.trace import Numbers

_WORD_BYTES = 8
_WIPED_WORDS = 64  # one in so many


class Contents:
    """``block_count`` blocks in host memory, laid out layer by layer as serving engines do."""

    def __init__(self, geometry: Geometry, block_count: int, seed: int) -> None:
        shape = (geometry.layers, block_count, geometry.segment_bytes // _WORD_BYTES)
        self._memory = mmap.mmap(-1, math.prod(shape) * _WORD_BYTES)  # whole pages
        self._words = np.frombuffer(self._memory, dtype=np.uint64).reshape(shape)
        generator = np.random.Generator(np.random.SFC64(seed))
        self._pattern = generator.integers(0, 2**64, size=(shape[0], shape[2]), dtype=np.uint64)
        self._scratch = np.empty_like(self._pattern)
        self._seed = np.uint64(seed)
        self.layout = Layout.from_tensors(list(self._words), block_dim=0)

    def marks(self, ids: Numbers) -> npt.NDArray[np.uint64]:
        """The number by which each id changes the words."""
        return mixed(ids.astype(np.uint64) ^ mixed(np.array([self._seed])))

    def write(self, block: int, mark: np.uint64) -> None:
        """Make ``block`` the content of that mark."""
        np.bitwise_xor(self._pattern, mark, out=self._words[:, block])

    def holds(self, block: int, mark: np.uint64) -> bool:
        """Whether every byte of ``block`` is that content's."""
        np.bitwise_xor(self._pattern, mark, out=self._scratch)
        return bool(np.array_equal(self._scratch, self._words[:, block]))

    def wipe(self, block: int) -> None:
        """Make the content wrong, so that a load that did nothing is noticed."""
        self._words[:, block, ::_WIPED_WORDS] = 0


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Neighbouring numbers become unlike ones: the finaliser of SplitMix64, one to one.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: npt.NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return result

"""What the whole layer stores from and loads into, on whichever device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvdisk.bench.job import Geometry
from kvdisk.bench.kv_cache import KvCache
from kvdisk.layout import Layout


class Cache(Protocol):
    """What the whole layer needs of a cache, on any device."""

    layout: Layout
    source_count: int  # blocks to store from; the others are loaded into

    def stamp(self, blocks: Sequence[int], marks: npt.NDArray[np.uint64]) -> Any:
        """Mark source ``blocks[i]`` as the content of the store ``marks[i]``.

        Returns the event that a store of them has to wait for.
        """

    def holds(self, target: int, source: int, mark: np.uint64) -> bool:
        """Whether block ``target`` is what was stored from ``source`` under ``mark``.

        ``source`` may carry a later mark by now; apart from its marks it never changes.
        """

    def wipe(self, target: int) -> None:
        """Make a loaded block's content wrong, so that a load that did nothing is noticed."""


def make_cache(
    device: str, geometry: Geometry, source_count: int, target_count: int, seed: int
) -> Cache:
    """Raises ConfigError when this machine has no such device."""
    if device == "cpu":
        return KvCache(geometry, source_count, target_count, seed)
    from kvdisk.bench.torch_cache import TorchCache  # only here: torch takes seconds to import

    return TorchCache(device, geometry, source_count, target_count, seed)

"""The cache of kv_cache.py in a GPU's memory, by torch: the same marks, written and compared there.

What always holds: what a method has changed is either ordered by the event that it returns, or done
when it returns, since loads wait for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdisk.bench.job import Geometry
from kvdisk.bench.kv_cache import STAMP_WORDS, WORD_BYTES
from kvdisk.errors import ConfigError
from kvdisk.layout import Layout


class TorchCache:
    """As ``KvCache``, on a torch device: words are int64, since torch knows no unsigned ones."""

    def __init__(
        self, device: str, geometry: Geometry, source_count: int, target_count: int, seed: int
    ) -> None:
        """Raises ConfigError when there is no torch, no such device, or too little memory there."""
        self._torch = torch = _torch_for(device)
        self.source_count = source_count
        block_count = source_count + target_count
        words = geometry.segment_bytes // WORD_BYTES
        try:
            # layers x blocks x words
            self._words = torch.zeros(
                (geometry.layers, block_count, words), dtype=torch.int64, device=device
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"device={device}: no memory for {block_count} blocks: lower iodepth."
            ) from error
        self._generator = torch.Generator(device=device).manual_seed(seed)
        self._randomise(self._words[:, :source_count])
        # layers x marked words of a segment: hides the marks, which would be alike everywhere
        self._veil = torch.empty_like(self._words[:, 0, ::STAMP_WORDS])
        self._randomise(self._veil)
        self._synchronise()
        self.layout = Layout.from_tensors(list(self._words), block_dim=0)

    def stamp(self, blocks: Sequence[int], marks: npt.NDArray[np.uint64]) -> Any:
        """See ``Cache`` in caches.py."""
        torch = self._torch
        where = torch.tensor(blocks, device=self._words.device)
        given = torch.from_numpy(marks.view(np.int64)).to(self._words.device)
        self._words[:, where, ::STAMP_WORDS] = self._veil[:, None, :] ^ given[None, :, None]
        if not self._words.is_cuda:
            return 0
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._words.device))
        return event

    def holds(self, target: int, source: int, mark: np.uint64) -> bool:
        """See ``Cache`` in caches.py."""
        loaded, stored = self._words[:, target], self._words[:, source]
        if not self._torch.equal(loaded[:, ::STAMP_WORDS] ^ int(mark), self._veil):
            return False
        # Equal marks in both, for the comparison of all the rest in one go.
        loaded[:, ::STAMP_WORDS] = stored[:, ::STAMP_WORDS]
        same = bool(self._torch.equal(loaded, stored))
        self._synchronise()
        return same

    def wipe(self, target: int) -> None:
        """See ``Cache`` in caches.py."""
        self._words[:, target, ::STAMP_WORDS] = 0
        self._synchronise()

    def _randomise(self, words: Any) -> None:
        words.random_(-(2**63), None, generator=self._generator)

    def _synchronise(self) -> None:
        if self._words.is_cuda:
            self._torch.cuda.current_stream(self._words.device).synchronize()


def _torch_for(device: str) -> Any:
    try:
        import torch
    except ImportError as error:
        raise ConfigError(f"device={device} needs torch: pip install 'kvdisk[torch]'.") from error
    if device == "cpu":  # for tests of this module
        return torch
    if not torch.cuda.is_available():
        raise ConfigError(f"device={device}: torch {torch.__version__} finds no CUDA device here.")
    count = torch.cuda.device_count()
    _, _, index = device.partition(":")
    if index and int(index) >= count:
        raise ConfigError(f"device={device}: there are {count} devices, numbered from 0.")
    return torch

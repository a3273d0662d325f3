"""The rig of ``tier_rig`` as most tests want it: keys are small numbers, options are an operator's.

A load names the generation that it must find: any other is wrong bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from kvdisk.config import TierConfig
from kvdisk.transfer import RowStatus
from tests.tier import tier_rig as whole
from tests.tier.tier_rig import PATIENCE_S, identity_of, key_of, ok

__all__ = ["PATIENCE_S", "TierRig", "identity", "name", "ok", "tier_rig"]

identity = identity_of
name = key_of


class TierRig(whole.TierRig):
    """``blocks`` blocks to store from, as many to load into."""

    def __init__(
        self, *paths: Path, blocks: int = 128, block_bytes: int = 64 << 10, **options: Any
    ) -> None:
        config = TierConfig.from_mapping(
            {
                "path": [str(path) for path in paths],
                "capacity": 16 << 20,
                "ring": "4MiB",
                "iodepth": 8,
                "store_wait": "60s",  # a busy machine refuses nothing
                **options,
            }
        )
        super().__init__(*paths, blocks=blocks, block_bytes=block_bytes, config=config)

    def submit_store(self, keys: Sequence[int], generation: int = 0, **options: Any) -> int:
        return super().submit_store(_named(keys), generation, **options)

    def submit_load(self, keys: Sequence[int], generation: int = 0) -> int:
        for key in _named(keys):
            self.legal[key] = {generation}
        return super().submit_load(_named(keys))

    def load(self, keys: Sequence[int], generation: int = 0) -> list[RowStatus]:
        return self.finish(self.submit_load(keys, generation))

    def lookup(self, keys: Sequence[int]) -> int:
        return self.tier.lookup(_named(keys))


def tier_rig(*paths: Path, **options: Any) -> AbstractContextManager[TierRig]:
    """A rig that is recounted and closed at the end."""
    return whole.closing(TierRig(*paths, **options))


def _named(keys: Iterable[int]) -> list[bytes]:
    return [key_of(key) for key in keys]

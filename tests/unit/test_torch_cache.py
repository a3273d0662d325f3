"""The bench's cache in torch memory tells blocks apart as the one in numpy memory does."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from kvdisk.bench.job import Geometry  # noqa: E402
from kvdisk.bench.torch_cache import TorchCache  # noqa: E402
from kvdisk.errors import ConfigError  # noqa: E402


@pytest.fixture
def cache() -> TorchCache:
    return TorchCache("cpu", Geometry(3, 1024, ""), 4, 4, seed=1)


def copy(cache: TorchCache, source: int, target: int) -> None:
    cache._words[:, target] = cache._words[:, source]


def test_a_loaded_block_is_what_was_stored(cache: TorchCache) -> None:
    cache.stamp([1, 2], np.array([7, 8], dtype=np.uint64))
    copy(cache, 1, 5)
    assert cache.holds(5, 1, np.uint64(7))
    copy(cache, 1, 5)
    cache.stamp([1], np.array([9], dtype=np.uint64))  # the source moves on
    assert cache.holds(5, 1, np.uint64(7))


def test_anything_else_is_not(cache: TorchCache) -> None:
    cache.stamp([0, 1], np.array([7, 7], dtype=np.uint64))
    copy(cache, 1, 5)
    assert not cache.holds(5, 0, np.uint64(7)), "another block"
    copy(cache, 1, 5)
    assert not cache.holds(5, 1, np.uint64(8)), "another mark"
    copy(cache, 1, 5)
    cache._words[2, 5, 33] ^= 1
    assert not cache.holds(5, 1, np.uint64(7)), "one bit"
    copy(cache, 1, 5)
    cache.wipe(5)
    assert not cache.holds(5, 1, np.uint64(7)), "wiped"


def test_a_device_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no CUDA device"):
        TorchCache("cuda:1", Geometry(1, 1024, ""), 1, 1, seed=1)

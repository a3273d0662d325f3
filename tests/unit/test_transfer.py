"""What the engine is opened with, by a tier and by the bench that stands for one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdisk import _native
from kvdisk.bench.job import Options, make_job
from kvdisk.bench.whole import WholeRunner
from kvdisk.config import TierConfig
from kvdisk.layout import Layout
from kvdisk.rank_file import RankFile
from kvdisk.transfer import TransferEngine, reserved_buffers

MIB = 1024**2


@pytest.mark.parametrize(
    ("buffers", "share", "reserved"),
    [(2, 0.25, 1), (3, 0.25, 1), (4, 0.25, 1), (64, 0.25, 16), (64, 0.0, 0), (2, 0.9, 1)],
)
def test_a_share_for_loads_is_at_least_one_buffer(
    buffers: int, share: float, reserved: int
) -> None:
    assert reserved_buffers(buffers, share) == reserved


def test_bench_opens_the_engine_as_a_tier_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    engine = _native.Engine

    def open_engine(options: Any) -> Any:
        opened.append(options)
        return engine(options)

    monkeypatch.setattr(_native, "Engine", open_engine)

    config = TierConfig(paths=(tmp_path,), capacity_bytes=16 * MIB, ring_bytes=32 * MIB, iodepth=8)
    file = RankFile.create_or_open(
        tmp_path, rank=0, world_size=1, slot_count=8, slot_bytes=MIB, fingerprint=bytes(32)
    )
    layout = Layout.from_tensors(np.zeros((4, MIB), dtype=np.uint8))
    TransferEngine.open(layout, file, config).close()
    file.close()
    options = Options(
        path=tmp_path, layer="whole", rw="randrw", bs="1m", size="8m", iodepth=8, ring="32m"
    )
    WholeRunner(make_job(options)).close()

    of_tier, of_bench = opened
    for name in (
        "backend",
        "force_async",
        "force_async_reads",
        "iodepth",
        "buffers",
        "rows_per_buffer",
        "load_reserve",
        "store_depth_beside_loads",
    ):
        assert getattr(of_bench, name) == getattr(of_tier, name), name

"""Two ranks: both modes across a restart, and one rank whose disk is damaged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.engines import (
    CACHED,
    MODES,
    PROMPTS,
    cached,
    direct,
    engine,
    flip_a_bit_in_every_slot,
    tokens,
)

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

TWO_RANKS = {"tensor_parallel_size": 2, "environment": {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}}


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What two ranks answer without offload; sums over ranks differ from those of one."""
    log = tmp_path_factory.mktemp("reference") / "log"
    with engine(log, model=str(model), **TWO_RANKS) as alone:
        return tokens(alone.generate(*PROMPTS))


@MODES
def test_evicted_prompts_come_back_also_after_a_restart(
    mode: Callable[..., dict[str, Any]],
    model: Path,
    reference: list[list[int]],
    tmp_path: Path,
) -> None:
    options = {"model": str(model), "kv_transfer_config": mode(tmp_path / "kv"), **TWO_RANKS}
    with engine(tmp_path / "first.log", **options) as first:
        assert tokens(first.generate(*PROMPTS)) == reference
        back = first.generate(0, 1, 2)
        assert tokens(back) == reference[:3]
        assert cached(back) == [CACHED] * 3
        assert first.metric("vllm:kvdisk_blocks_stored") >= 6 * 18
        assert first.metric("vllm:kvdisk_blocks_loaded") > 0
        assert first.metric("vllm:kvdisk_misses") == 0
    with engine(tmp_path / "second.log", **options) as second:
        back = second.generate(*PROMPTS)
        assert tokens(back) == reference
        assert cached(back) == [CACHED] * 6
        assert second.metric("vllm:kvdisk_blocks_stored") == 0


def test_a_block_that_one_rank_lost_is_computed_again_on_both(
    model: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    transfer = direct(tmp_path / "kv")
    options = {"model": str(model), "kv_transfer_config": transfer, **TWO_RANKS}
    with engine(tmp_path / "log", **options) as one:
        one.generate(*PROMPTS)
        (damaged,) = (tmp_path / "kv").glob("*/rank-1-of-2.kv")
        flip_a_bit_in_every_slot(damaged)
        back = one.generate(*PROMPTS)
        assert tokens(back) == reference
        assert cached(back)[0] < CACHED
        assert one.metric('vllm:kvdisk_misses{"reason": "corrupt"}') > 0
        one.generate(*PROMPTS)  # what was computed again is stored again
        again = one.generate(0, 1)
        assert tokens(again) == reference[:2]
        assert cached(again) == [CACHED] * 2

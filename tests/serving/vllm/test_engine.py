"""Both modes on a real engine: what left its cache comes back, and nothing changes the answer."""

from __future__ import annotations

import re
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
    save_model,
    tokens,
)

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")


@MODES
@pytest.mark.quick
def test_evicted_prompts_come_back_also_after_reset_and_restart(
    mode: Callable[..., dict[str, Any]],
    model: Path,
    reference: list[list[int]],
    tmp_path: Path,
) -> None:
    options = {"model": str(model), "kv_transfer_config": mode(tmp_path / "kv")}
    with engine(tmp_path / "first.log", **options) as first:
        assert tokens(first.generate(*PROMPTS)) == reference
        back = first.generate(0, 1, 2)
        assert tokens(back) == reference[:3]
        assert cached(back) == [CACHED] * 3
        assert first.tell("reset")
        back = first.generate(0, 3)
        assert tokens(back) == [reference[0], reference[3]]
        assert cached(back) == [CACHED] * 2
        assert first.metric("vllm:kvdisk_blocks_stored") >= 6 * 18
        assert first.metric("vllm:kvdisk_blocks_loaded") > 0
    with engine(tmp_path / "second.log", **options) as second:
        back = second.generate(*PROMPTS)
        assert tokens(back) == reference
        assert cached(back) == [CACHED] * 6
    log = (tmp_path / "second.log").read_text()
    assert max(map(int, re.findall(r"(\d+) blocks recovered", log))) >= 6 * 18


@MODES
def test_damaged_blocks_are_computed_again(
    mode: Callable[..., dict[str, Any]],
    model: Path,
    reference: list[list[int]],
    tmp_path: Path,
) -> None:
    options = {"model": str(model), "kv_transfer_config": mode(tmp_path / "kv")}
    with engine(tmp_path / "log", in_process=True, **options) as one:
        one.generate(*PROMPTS)
        for file in (tmp_path / "kv").glob("*/*.kv"):
            flip_a_bit_in_every_slot(file)
        back = one.generate(*PROMPTS)
        assert tokens(back) == reference
        assert cached(back)[0] < CACHED
        assert one.metric('vllm:kvdisk_misses{"reason": "corrupt"}') > 0
        assert tokens(one.generate(0, 1)) == reference[:2]  # alive, and no loop


@MODES
def test_other_weights_at_the_same_path_hit_nothing(
    mode: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    changing = save_model(tmp_path / "model", seed=0)
    options = {
        "model": str(changing),
        "kv_transfer_config": mode(tmp_path / "kv"),
    }
    with engine(tmp_path / "first.log", **options) as first:
        first.generate(*PROMPTS)
    (described,) = (tmp_path / "kv").glob("*/kvdisk.json")
    assert "CPU_ATTN" in described.read_text(), "the backend that vLLM chose is not told"
    save_model(changing, seed=1)
    with engine(tmp_path / "second.log", **options) as second:
        assert cached(second.generate(0, 1)) == [0, 0]


def test_chunks_of_several_blocks(model: Path, reference: list[list[int]], tmp_path: Path) -> None:
    transfer = direct(tmp_path / "kv", blocks_per_chunk=3)
    options = {"model": str(model), "kv_transfer_config": transfer, "in_process": True}
    with engine(tmp_path / "log", **options) as one:
        assert tokens(one.generate(*PROMPTS)) == reference
        back = one.generate(0, 1)
        assert tokens(back) == reference[:2]
        assert cached(back) == [CACHED] * 2

"""A model with several KV cache groups: layers that see everything beside layers with a window."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.engines import (
    CACHED,
    MODES,
    PROMPTS,
    assert_nothing_left,
    cached,
    direct,
    engine,
    flip_a_bit_in_every_slot,
    save_model,
    tokens,
)

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

WINDOW_TOKENS = 128  # four blocks
BLOCKS = {"num_gpu_blocks_override": 96}  # for both groups; the prompts take more


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two groups of two layers."""
    kinds = ["sliding_attention", "full_attention"]
    directory = tmp_path_factory.mktemp("model") / "tiny-hybrid"
    return save_model(directory, layer_types=kinds * 2, sliding_window=WINDOW_TOKENS)


@pytest.fixture(scope="module")
def reference(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    log = tmp_path_factory.mktemp("reference") / "log"
    with engine(log, model=str(model), in_process=True, **BLOCKS) as alone:
        right = tokens(alone.generate(*PROMPTS))
    assert all(len(set(answer)) > 3 for answer in right), "tokens that say nothing"
    return right


@MODES
def test_every_group_comes_back_also_after_a_restart(
    mode: Callable[..., dict[str, Any]],
    model: Path,
    reference: list[list[int]],
    tmp_path: Path,
) -> None:
    """That the tokens tell right bytes from wrong ones is shown here too, group by group."""
    options = {
        "model": str(model),
        "kv_transfer_config": mode(tmp_path / "kv"),
        "in_process": True,
        **BLOCKS,
    }
    with engine(tmp_path / "first.log", **options) as first:
        assert first.tell("groups") == 2
        assert tokens(first.generate(*PROMPTS)) == reference
        back = first.generate(0, 1)
        assert tokens(back) == reference[:2]
        assert cached(back) == [CACHED] * 2
        for group in range(2):
            assert first.tell("spoil", group=group) > 0
            assert tokens(first.generate(1)) != reference[1:2], f"group {group} does not matter"
            assert first.tell("reset")
            back = first.generate(1)  # from below: right bytes again
            assert tokens(back) == reference[1:2]
            assert cached(back) == [CACHED]
        assert first.metric("vllm:kvdisk_blocks_loaded") > 0
        assert first.metric("vllm:kvdisk_misses") == 0
        assert_nothing_left(first)
        assert first.tell("events")["wrong"] == 0
    with engine(tmp_path / "second.log", **options) as second:
        back = second.generate(*PROMPTS)
        assert tokens(back) == reference
        assert cached(back) == [CACHED] * 6


def test_damaged_blocks_are_computed_again(
    model: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    """vLLM is told of requests here, not of blocks: block numbers are of a group each."""
    options = {
        "model": str(model),
        "kv_transfer_config": direct(tmp_path / "kv"),
        "in_process": True,
        **BLOCKS,
    }
    with engine(tmp_path / "log", **options) as one:
        one.generate(*PROMPTS)
        (file,) = (tmp_path / "kv").glob("*/*.kv")
        flip_a_bit_in_every_slot(file)
        back = one.generate(*PROMPTS)
        assert tokens(back) == reference
        assert cached(back)[0] < CACHED
        assert one.metric('vllm:kvdisk_misses{"reason": "corrupt"}') > 0
        one.generate(*PROMPTS)
        again = one.generate(0, 1)
        assert tokens(again) == reference[:2]
        assert cached(again) == [CACHED] * 2
        assert_nothing_left(one)

"""Both modes on a real engine: what left its cache comes back, and nothing changes the answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.engines import below_ram, direct, engine, save_model

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

MODES = pytest.mark.parametrize("mode", [direct, below_ram], ids=["direct", "below-ram"])
CACHED = 576  # the whole blocks of a prompt
PROMPTS = range(6)  # more than the cache of 64 blocks holds; as in conftest.py


def tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def cached(answers: list[dict[str, Any]]) -> list[int]:
    return [answer["cached"] for answer in answers]


@MODES
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
    assert "6 blocks recovered" not in (tmp_path / "second.log").read_text()
    assert "recovered" in (tmp_path / "second.log").read_text()


@MODES
def test_damaged_blocks_are_computed_again(
    mode: Callable[..., dict[str, Any]],
    model: Path,
    reference: list[list[int]],
    tmp_path: Path,
) -> None:
    options = {"model": str(model), "kv_transfer_config": mode(tmp_path / "kv")}
    with engine(tmp_path / "log", **options) as one:
        one.generate(*PROMPTS)
        for file in (tmp_path / "kv").glob("*/*.kv"):
            with file.open("r+b") as opened:
                for offset in range(0, 40 << 20, 128 << 10):  # one bit of every slot
                    opened.seek(offset + 5000)
                    byte = opened.read(1)
                    opened.seek(offset + 5000)
                    opened.write(bytes([byte[0] ^ 4]))
        back = one.generate(*PROMPTS)
        assert tokens(back) == reference
        assert cached(back)[0] < CACHED
        assert one.metric('vllm:kvdisk_misses{"reason": "corrupt"}') > 0
        assert tokens(one.generate(0, 1)) == reference[:2]  # alive, and no loop


def test_other_weights_at_the_same_path_hit_nothing(model: Path, tmp_path: Path) -> None:
    changing = save_model(tmp_path / "model", seed=0)
    options = {"model": str(changing), "kv_transfer_config": direct(tmp_path / "kv")}
    with engine(tmp_path / "first.log", **options) as first:
        first.generate(*PROMPTS)
    save_model(changing, seed=1)
    with engine(tmp_path / "second.log", **options) as second:
        assert cached(second.generate(0, 1)) == [0, 0]


def test_chunks_of_several_blocks(model: Path, reference: list[list[int]], tmp_path: Path) -> None:
    transfer = direct(tmp_path / "kv", blocks_per_chunk=3)
    with engine(tmp_path / "log", model=str(model), kv_transfer_config=transfer) as one:
        assert tokens(one.generate(*PROMPTS)) == reference
        back = one.generate(0, 1)
        assert tokens(back) == reference[:2]
        assert cached(back) == [CACHED] * 2


@pytest.mark.parametrize("tier", [None, "small"], ids=["fits", "evicts-all-the-time"])
def test_stress_gives_the_same_tokens_and_leaks_nothing(
    tier: str | None, model: Path, tmp_path: Path
) -> None:
    common = {"model": str(model), "max_num_seqs": 6, "max_num_batched_tokens": 256}
    with engine(tmp_path / "alone.log", **common) as alone:
        right = alone.tell("stress", seed=7, requests=120)["tokens"]
    capacity = {"capacity": "4MiB"} if tier else {}
    transfer = direct(tmp_path / "kv", **capacity)
    with engine(tmp_path / "log", **common, kv_transfer_config=transfer) as one:
        assert one.tell("stress", seed=7, requests=120)["tokens"] == right
        one.generate(0)
        assert one.metric("vllm:kvdisk_slots_quarantined") == 0

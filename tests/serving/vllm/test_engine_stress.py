"""Many requests over shared prefixes: preempted, aborted, with a tier that evicts all the time.

Whatever is moved, the tokens are those of the engine alone; and when all have ended, nothing is
left of them: no pin, no transfer, no buffer, no slot set aside, no entry in any of our tables.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.engines import MODES, assert_nothing_left, below_ram, direct, engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

SMALL = "4MiB"  # of blocks of 128 KiB
SEED = 7


def common(model: Path) -> dict[str, Any]:
    return {"model": str(model), "max_num_seqs": 6, "max_num_batched_tokens": 256}


def right_tokens(model: Path, log: Path, requests: int) -> dict[str, list[int]]:
    with engine(log, **common(model), in_process=True) as alone:
        answers: dict[str, list[int]] = alone.tell("stress", seed=SEED, requests=requests)["tokens"]
        return answers


def check(
    right: dict[str, list[int]],
    model: Path,
    log: Path,
    transfer: dict[str, Any],
    *,
    requests: int,
    evicts: bool,
) -> None:
    options = {**common(model), "kv_transfer_config": transfer, "in_process": True}
    with engine(log, **options) as one:
        answer = one.tell("stress", seed=SEED, requests=requests)
        assert answer["tokens"] == right
        assert answer["aborted"] > requests // 20
        assert_nothing_left(one)
        events = one.tell("events")
        assert events["wrong"] == 0
        assert events["resident"] > 0
        assert (events["removed"] > 10 * events["resident"]) == evicts
        assert one.metric("vllm:num_preemptions") > 0
        assert one.metric("vllm:kvdisk_blocks_loaded") > 0
        assert one.metric("vllm:kvdisk_slots_quarantined") == 0
        misses = one.tell("metrics")
        assert {name for name, count in misses.items() if "kvdisk_misses" in name and count} <= {
            'vllm:kvdisk_misses{"reason": "absent"}'
        }


def test_a_short_one(model: Path, tmp_path: Path) -> None:
    right = right_tokens(model, tmp_path / "alone.log", 120)
    for name, options, evicts in (("fits", {}, False), ("evicts", {"capacity": SMALL}, True)):
        transfer = direct(tmp_path / name, partial_loads="on", **options)
        check(right, model, tmp_path / f"{name}.log", transfer, requests=120, evicts=evicts)


@pytest.fixture(scope="module")
def right(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    return right_tokens(model, tmp_path_factory.mktemp("right") / "log", 1200)


@MODES
@pytest.mark.timeout(1800)
def test_a_long_one(
    mode: Callable[..., dict[str, Any]],
    model: Path,
    right: dict[str, list[int]],
    tmp_path: Path,
) -> None:
    assert len(right) >= 1000
    ram = {"ram_bytes": 4 << 20} if mode is below_ram else {}
    transfer = mode(tmp_path / "kv", capacity=SMALL, partial_loads="on", **ram)
    check(right, model, tmp_path / "log", transfer, requests=1200, evicts=True)

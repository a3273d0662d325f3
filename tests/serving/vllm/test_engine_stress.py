"""Many requests over shared prefixes: preempted, aborted, with a tier that evicts all the time.

Whatever is moved, the tokens are those of the engine alone; and when all have ended, nothing is
left of them: no pin, no transfer, no buffer, no slot set aside, no entry in any of our tables.

Of a thousand requests one may be so close to a tie that the engine alone does not agree with
itself when it cuts the work into other steps. So it is asked in two ways there, and either answer
is right.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.engines import MODES, assert_nothing_left, below_ram, direct, engine

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

SMALL = "8MiB"  # of blocks of 128 KiB: nearly all leave before they are wanted again
SEED = 7


def common(model: Path) -> dict[str, Any]:
    return {"model": str(model), "max_num_seqs": 6, "max_num_batched_tokens": 256}


Tokens = dict[str, list[int]]  # by request


def right_tokens(model: Path, log: Path, requests: int, **changes: Any) -> Tokens:
    with engine(log, **{**common(model), **changes}, in_process=True) as alone:
        answers: Tokens = alone.tell("stress", seed=SEED, requests=requests)["tokens"]
        return answers


def check(
    alone: list[Tokens],
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
        got: Tokens = answer["tokens"]
        assert set(got) == set(alone[0])
        wrong = [name for name in got if all(got[name] != each[name] for each in alone)]
        assert wrong == []
        assert sum(got[name] != alone[0][name] for name in got) <= requests // 100
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
        check([right], model, tmp_path / f"{name}.log", transfer, requests=120, evicts=evicts)


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Tokens]:
    logs = tmp_path_factory.mktemp("alone")
    cuts: list[dict[str, Any]] = [{}, {"max_num_seqs": 3}]
    return [
        right_tokens(model, logs / str(number), 1200, **changes)
        for number, changes in enumerate(cuts)
    ]


@MODES
@pytest.mark.timeout(1800)
def test_a_long_one(
    mode: Callable[..., dict[str, Any]],
    model: Path,
    alone: list[Tokens],
    tmp_path: Path,
) -> None:
    assert len(alone[0]) >= 1000
    below = {"ram_bytes": 4 << 20, "capacity": SMALL}  # more than the RAM tier, or it has all
    options = below if mode is below_ram else {"capacity": SMALL}
    transfer = mode(tmp_path / "kv", partial_loads="on", **options)
    check(alone, model, tmp_path / "log", transfer, requests=1200, evicts=True)

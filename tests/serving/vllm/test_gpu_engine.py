"""Both modes on a real engine on a GPU: what left its cache comes back, byte for byte.

Float32 with one attention backend gives the same tokens however the work is cut; the half-precision
one is compared by the bytes that lie in the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.vllm.engines import MODES, PROMPTS, cached, engine, tokens

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")
torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

EXACT = {"dtype": "float32", "attention_backend": "TRITON_ATTN"}
HALF = {"dtype": "bfloat16", "attention_backend": "FLASH_ATTN"}
CACHE = {"block_size": 16, "num_gpu_blocks_override": 128, "gpu_memory_utilization": 0.1}
CACHE |= {"kv_cache_memory_bytes": 1 << 30}  # nothing is measured: engines may start side by side
CACHED = 592  # the whole blocks of a prompt of 600 tokens
REQUESTS = 500


@MODES
def test_an_evicted_prompt_comes_back_with_the_same_tokens(
    mode: Callable[..., dict[str, Any]], model: Path, tmp_path: Path
) -> None:
    common = {"model": str(model), **EXACT, **CACHE}
    with engine(tmp_path / "alone.log", **common) as alone:
        right = tokens(alone.generate(*PROMPTS))
    with engine(tmp_path / "log", **common, kv_transfer_config=mode(tmp_path / "kv")) as one:
        assert tokens(one.generate(*PROMPTS)) == right
        back = one.generate(0, 1, 2)
        assert tokens(back) == right[:3]
        assert cached(back) == [CACHED] * 3
        assert one.tell("reset")
        back = one.generate(3, 0)
        assert tokens(back) == [right[3], right[0]]
        assert cached(back) == [CACHED] * 2
    with engine(tmp_path / "again.log", **common, kv_transfer_config=mode(tmp_path / "kv")) as one:
        back = one.generate(*PROMPTS)
        assert tokens(back) == right
        assert cached(back) == [CACHED] * len(PROMPTS)


@MODES
@pytest.mark.parametrize("precision", [HALF, EXACT], ids=["flash-bf16", "triton-float32"])
def test_the_bytes_that_come_back_are_those_that_left(
    mode: Callable[..., dict[str, Any]], precision: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    options = {"model": str(model), **precision, **CACHE, "in_process": True}
    with engine(tmp_path / "log", **options, kv_transfer_config=mode(tmp_path / "kv")) as one:
        one.generate(0)
        before = one.tell("blocks")
        assert len(before) >= CACHED // 16
        one.generate(*PROMPTS[1:])
        (back,) = one.generate(0)
        assert back["cached"] == CACHED
        after = one.tell("blocks")
        same = [block for block in before if after.get(block) == before[block]]
        assert len(same) >= CACHED // 16  # those behind were computed, in another batch
        assert len(set(before.values())) == len(before), "blocks all alike show nothing"


@MODES
@pytest.mark.timeout(900)
def test_many_requests_with_preemptions_and_aborts(
    mode: Callable[..., dict[str, Any]], model: Path, tmp_path: Path
) -> None:
    """On a GPU a token may depend on how the work is cut into steps, with no tier at all.

    So the engine alone is asked three times, with other steps and another cache: what it does not
    agree with itself about may come out in either way.
    """
    common = {"model": str(model), **EXACT, **CACHE, "num_gpu_blocks_override": 96}
    common |= {"max_num_seqs": 6, "max_num_batched_tokens": 256}
    others = [{}, {"max_num_batched_tokens": 512}, {"num_gpu_blocks_override": 400}]
    alone: list[dict[str, list[int]]] = []
    for number, changes in enumerate(others):
        with engine(tmp_path / f"alone-{number}.log", **{**common, **changes}) as one:
            alone.append(one.tell("stress", seed=11, requests=REQUESTS)["tokens"])
    transfer = mode(tmp_path / "kv", capacity="16MiB")
    with engine(tmp_path / "log", **common, in_process=True, kv_transfer_config=transfer) as one:
        answer = one.tell("stress", seed=11, requests=REQUESTS)["tokens"]
        assert set(answer) == set(alone[0])
        assert len(answer) > 0.8 * REQUESTS
        wrong = [
            number
            for number, tokens_of_it in answer.items()
            if all(tokens_of_it != each.get(number) for each in alone)
        ]
        assert wrong == []
        assert sum(answer[number] != alone[0][number] for number in answer) <= REQUESTS // 50
        left = one.tell("leftovers")
        assert {name: count for name, count in left.items() if count} == {}
        assert one.metric("vllm:num_preemptions") > 0
        assert one.metric("vllm:kvdisk_blocks_loaded") > 0

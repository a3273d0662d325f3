"""The model behind the time to first token: by hand, and against a plainer one."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.config import PartialLoads
from kvdisk.replay.ttft import Demand, Server, Ttft, model_ttft

SECOND = 10**9
TOKEN_BYTES = 131072


def numbers(*values: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(values, dtype=np.int64)


def served(
    demand: Demand, *, rate: float = 1000, mode: PartialLoads = "off", queue: bool = True
) -> Ttft:
    server = Server(
        prefill_rate=rate, token_bytes=TOKEN_BYTES, partial_loads=mode, loads_queue=queue
    )
    return model_ttft(demand, server)


def test_time_to_first_token_by_hand() -> None:
    found = served(
        Demand(
            arrivals_ns=numbers(0, SECOND, 10 * SECOND),
            hit_tokens=numbers(0, 0, 500),
            load_ns=numbers(0, 0, SECOND // 2),
            rest_tokens=numbers(2000, 1000, 0),
        )
    )
    # 2 s; then 1 s of waiting and 1 s of its own; then a load of half a second and one token.
    assert found.mean_s == pytest.approx((2.0 + 2.0 + 0.501) / 3)
    assert found.p50_s == pytest.approx(2.0)
    assert found.busy == pytest.approx(3.001 / 10)
    assert found.loaded_tokens == 500


def test_who_loads_lets_others_go_before_it_until_it_is_ready() -> None:
    found = served(
        Demand(
            arrivals_ns=numbers(0, 1, 2 * SECOND),
            hit_tokens=numbers(1000, 0, 0),
            load_ns=numbers(SECOND, 0, 0),
            rest_tokens=numbers(1000, 2000, 1000),
        )
    )
    # The second, which ends at 2 s, is computed while the first is loaded; that ends at 3, and the
    # third at 4.
    assert found.mean_s == pytest.approx((3 + 2 + 2) / 3)


@pytest.mark.parametrize(("queue", "mean_s"), [(True, (1 + 2 + 3) / 3), (False, 1)])
def test_loads_share_the_disk_or_have_their_measured_times(queue: bool, mean_s: float) -> None:
    found = served(
        Demand(
            arrivals_ns=numbers(0, 0, 0),
            hit_tokens=numbers(10, 10, 10),
            load_ns=numbers(SECOND, SECOND, SECOND),
            rest_tokens=numbers(0, 0, 0),
        ),
        rate=1e6,
        queue=queue,
    )
    assert found.mean_s == pytest.approx(mean_s, rel=1e-4)


@st.composite
def demands(draw: st.DrawFn) -> Demand:
    """Some hundred ms apart; at most 4 s of loading or computing for each."""
    count = draw(st.integers(1, 30))

    def drawn(most: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        return numbers(*draw(st.lists(st.integers(0, most), min_size=count, max_size=count)))

    hits = drawn(4000)
    return Demand(
        arrivals_ns=np.cumsum(drawn(SECOND // 2)),
        hit_tokens=hits,
        load_ns=np.where(hits > 0, drawn(4 * SECOND), 0),
        rest_tokens=drawn(4000),
    )


def plainly(demand: Demand) -> float:
    """Mean, in seconds, of a server that looks at what has arrived only when it is free, and then
    loads all that it has not loaded.
    """
    left = dict(enumerate(demand.arrivals_ns.tolist()))
    ready: dict[int, int] = {}  # when
    now = disk_free = total = 0
    while left or ready:
        for number in [each for each, at in left.items() if at <= now]:
            start = max(now, disk_free)
            if demand.hit_tokens[number]:
                disk_free = start + int(demand.load_ns[number])
                ready[number] = disk_free
            else:
                ready[number] = now
            del left[number]
        waiting = [number for number, at in ready.items() if at <= now]
        if not waiting:
            now = min(*ready.values(), *left.values(), sys.maxsize)
            continue
        number = min(waiting)
        del ready[number]
        computed = max(1, int(demand.rest_tokens[number]))
        now += computed * SECOND // 1000
        total += now - int(demand.arrivals_ns[number])
    return total / SECOND / len(demand.arrivals_ns)


@settings(deadline=None)
@given(demands())
def test_loading_all_of_each_hit_is_as_written_down_plainly(demand: Demand) -> None:
    found = served(demand)
    assert found.mean_s == pytest.approx(plainly(demand))
    assert found.loaded_tokens == demand.hit_tokens.sum()


@settings(deadline=None)
@given(demands(), st.sampled_from(["auto", "on"]), st.booleans())
def test_what_is_not_loaded_is_computed(demand: Demand, mode: PartialLoads, queue: bool) -> None:
    found = served(demand, mode=mode, queue=queue)
    all_tokens = demand.hit_tokens + demand.rest_tokens
    assert 0 <= found.loaded_tokens <= demand.hit_tokens.sum()
    computed = int(all_tokens.sum()) - found.loaded_tokens
    span = max(1, int(demand.arrivals_ns[-1] - demand.arrivals_ns[0]))
    assert found.busy * span >= computed * SECOND / 1000 * (1 - 1e-9)
    assert found.mean_s * len(all_tokens) >= computed / 1000 * (1 - 1e-9)


def trickle(rate: float, hit: int, disk: float) -> Demand:
    """Two thousand prompts at random times, ``rate`` a second; ``disk`` in tokens a second."""
    chance = np.random.default_rng(7)
    arrivals = np.cumsum(chance.exponential(SECOND / rate, 2000)).astype(np.int64)
    hits = np.rint(chance.exponential(hit, 2000)).astype(np.int64)
    return Demand(
        arrivals_ns=arrivals,
        hit_tokens=hits,
        load_ns=np.rint(hits * (SECOND / disk)).astype(np.int64),
        rest_tokens=np.rint(chance.exponential(2000, 2000)).astype(np.int64),
    )


@pytest.mark.parametrize("disk", [0.01, 0.1, 0.4, 0.8, 3.0])
@pytest.mark.parametrize("rate", [0.3, 1.5, 3.0])
def test_prompts_that_come_at_random_wait_no_longer_with_a_tier(disk: float, rate: float) -> None:
    demand = trickle(rate, 8000, disk * 40_000)
    nothing = np.zeros_like(demand.hit_tokens)
    without = served(
        Demand(
            arrivals_ns=demand.arrivals_ns,
            hit_tokens=nothing,
            load_ns=nothing,
            rest_tokens=demand.hit_tokens + demand.rest_tokens,
        ),
        rate=40_000,
    )
    found = served(demand, rate=40_000, mode="auto")
    assert found.mean_s <= 1.05 * without.mean_s
    assert found.busy < without.busy

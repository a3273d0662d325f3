"""What of a hit is loaded is the planner's to say, and a bug in it is nobody's end."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext, get_offload_block_hash
from vllm.v1.kv_offload.cpu.policies.lru import LRUCachePolicy
from vllm.v1.kv_offload.tiering.base import TransferJob

from kvdisk.load_plan import LoadPlanner
from kvdisk.serving.vllm import ram_tier
from kvdisk.serving.vllm.connector import KVDiskConnector
from kvdisk.serving.vllm.partial_loads import PartialLoads
from kvdisk.serving.vllm.secondary_tier import KVDiskTier
from kvdisk.serving.vllm.tiering_connector import KVDiskTieringConnector
from kvdisk.serving.vllm.waiting import Waiting
from kvdisk.transfer import Direction
from tests.serving.vllm.chunks import broken, key, secondary_tier
from tests.unit.overlapping_server import computes

pytestmark = pytest.mark.quick

CHUNK = 16
HIT = 4096
TOKENS = 5000


class Scheduler:
    """vLLM's half: it finds ``HIT`` tokens, or as many as it is told to load at the most."""

    def __init__(self) -> None:
        groups = [SimpleNamespace(tokens_per_chunk=CHUNK)]
        self.config = SimpleNamespace(kv_group_configs=groups)
        self.asked: list[int | None] = []

    def get_num_new_matched_tokens(
        self, request: Any, computed: int, max_num_new_tokens: int | None = None
    ) -> tuple[int, bool]:
        self.asked.append(max_num_new_tokens)
        most = HIT if max_num_new_tokens is None else min(HIT, max_num_new_tokens)
        found = most // CHUNK * CHUNK
        return found, found > 0


class Planner(LoadPlanner):
    """One that has made up its mind."""

    def __init__(self, wanted: int) -> None:
        super().__init__("on", token_bytes=1.0, deadline_s=2)
        self.wanted = wanted
        self.asked: list[tuple[int, int, int, int]] = []

    def tokens_to_load(
        self,
        request_id: str,
        hit: int,
        rest: int,
        now_s: float,
        *,
        free_tokens: int = 0,
        behind: Iterable[float] = (),
        room_tokens: float = 0,
    ) -> int:
        self.asked.append((hit, free_tokens, rest))
        return self.wanted


def connector(planner: LoadPlanner | None) -> Any:
    made = object.__new__(KVDiskConnector)
    made.connector_scheduler = Scheduler()
    made._max_loadable_tokens = lambda *_: None
    made.planner, made._requests = planner, {}
    return made


REQUEST = SimpleNamespace(
    request_id="one", num_tokens=TOKENS, block_hashes=[b"first"], skip_reading_prefix_cache=False
)


@pytest.mark.parametrize(
    ("wanted", "loaded"),
    [(HIT, HIT), (HIT + 5, HIT), (1000, 992), (3, CHUNK), (0, 0)],
)
def test_as_much_is_loaded_as_is_wanted(wanted: int, loaded: int) -> None:
    made = connector(Planner(wanted))
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (loaded, bool(loaded))
    assert made.connector_scheduler.asked[0] is None


def test_a_bug_in_the_planner_costs_the_split_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    planner = Planner(16)
    monkeypatch.setattr(planner, "tokens_to_load", broken)
    made = connector(planner)
    for _ in range(3):
        assert made.get_num_new_matched_tokens(REQUEST, 0) == (HIT, True)
    assert made.planner is None
    assert len([text for text in caplog.messages if "please report it" in text]) == 1


class RamTier:
    """vLLM's half above the disk: brings up what the disk has, and finds it the next time.

    What it has is in ``chunks``, the oldest first, which goes when there are too many.
    """

    def __init__(self, tier: KVDiskTier) -> None:
        self.tier = tier
        self.chunks: list[int] = []
        self._policy = LRUCachePolicy(99)
        self._policy.get = lambda key: key in self._there() or None  # type: ignore
        self.room = 99
        self.silent = False
        self.context = ReqContext("one")
        self.keys = [key(number) for number in range(CHUNKS)]
        for number in range(CHUNKS):
            self.context.set_offload_key_position(key(number), (1 + number) * CHUNK)
        self._req_status = {"one": SimpleNamespace(req_context=self.context)}
        group = SimpleNamespace(tokens_per_chunk=CHUNK, hashes_per_chunk=1, group_idx=0)
        self.config = SimpleNamespace(kv_group_configs=[group])
        self.manager = SimpleNamespace(primary_tier=self)

    def _there(self) -> list[Any]:
        return [self.keys[number] for number in self.chunks if number < CHUNKS]

    def touch(self, keys: list[Any], context: ReqContext) -> None:
        assert context is self.context
        assert not {*keys}.difference(self._there())
        touched = [n for n in self.chunks if n < CHUNKS and self.keys[n] in keys]
        self.chunks = [n for n in self.chunks if n not in touched] + touched

    def get_num_new_matched_tokens(
        self, request: Any, computed: int, max_num_new_tokens: int | None = None
    ) -> tuple[int | None, bool]:
        if self.silent:
            return None, False
        found, later = 0, False
        for number in range(computed // CHUNK, CHUNKS):
            if number not in self.chunks:
                answer = self.tier.lookup(key(number), self.context)
                if answer is LookupResult.MISS or (answer is LookupResult.HIT and not self.room):
                    break
                later = True
                if answer is LookupResult.HIT:
                    self.chunks = [*self.chunks, number][-self.room :]
            found += CHUNK
        return (None, False) if later else (found, found > 0)


CHUNKS = 8


@pytest.mark.parametrize(
    ("in_ram", "asked"),  # of the disk alone, and of RAM behind the end of that
    [(set(), (8, 0)), ({6, 7}, (6, 2)), ({0, 1}, (6, 0)), ({0, 3, 5}, (5, 0)), ({1, 7}, (6, 1))],
)
@pytest.mark.parametrize("wanted", [0, CHUNK, 3 * CHUNK, CHUNKS * CHUNK])
def test_as_much_is_brought_up_as_is_wanted(
    tmp_path: Path, wanted: int, in_ram: set[int], asked: tuple[int, ...]
) -> None:
    planner = Planner(wanted)
    made, ram = tiering_connector(planner, tmp_path)
    assert made.get_num_new_matched_tokens(LONG, 0) == (0, False)
    assert planner.asked == [(0, 0, LONG.num_tokens)]
    made._tier.allowances.settled("one")
    store_everything(ram)
    ram.chunks = list(in_ram)
    on_disk = [number for number in range(CHUNKS) if number not in in_ram]
    found = made.get_num_new_matched_tokens(LONG, 0)[0]
    assert planner.asked[1:] == [(*(CHUNK * count for count in asked), 5)]
    assert set(ram.chunks) == in_ram | set(on_disk[: wanted // CHUNK])
    prefix = next(number for number in range(CHUNKS + 1) if number not in ram.chunks)
    assert found == (None if wanted else prefix * CHUNK)
    assert made.get_num_new_matched_tokens(LONG, 0) == (prefix * CHUNK, prefix > 0)
    assert len(planner.asked) == 2, "asked once"
    made._tier.shutdown()


def test_of_what_is_found_without_the_disk_nothing_is_computed(tmp_path: Path) -> None:
    """Neither of what the GPU has, nor of what the RAM tier has behind it."""
    planner = Planner(0)
    made, ram = tiering_connector(planner, tmp_path)
    ram.chunks = [2, 3, 4]
    assert made.get_num_new_matched_tokens(LONG, 2 * CHUNK) == (3 * CHUNK, True)
    assert planner.asked == [(0, 0, 3 * CHUNK + 5)]
    made._tier.shutdown()


def test_a_request_that_vllm_does_not_look_up_keeps_its_chance(tmp_path: Path) -> None:
    """vLLM answers so while stores of a preempted request are under way."""
    planner = Planner(CHUNKS * CHUNK)
    made, ram = tiering_connector(planner, tmp_path)
    store_everything(ram)
    ram.silent = True
    assert made.get_num_new_matched_tokens(LONG, 0) == (None, False)
    ram.silent = False
    assert made.get_num_new_matched_tokens(LONG, 0) == (None, False)
    assert made.get_num_new_matched_tokens(LONG, 0) == (CHUNKS * CHUNK, True)
    assert len(planner.asked) == 1
    made._tier.shutdown()


def test_one_that_waits_for_room_is_not_looked_up(tmp_path: Path) -> None:
    planner = Planner(0)
    made, _ = tiering_connector(planner, tmp_path)
    made._tier.allowances.must_wait = lambda request_id: request_id == "one"
    assert made.get_num_new_matched_tokens(LONG, 0) == (None, False)
    assert not planner.asked
    made._tier.shutdown()


def test_what_is_brought_up_does_not_take_the_place_of_the_rest_of_its_prompt(
    tmp_path: Path,
) -> None:
    """A RAM tier is always full, and what is left of a prompt is the oldest in it."""
    made, ram = tiering_connector(Planner(CHUNKS * CHUNK), tmp_path)
    store_everything(ram)
    ram.chunks, ram.room = [0, 1, 2, 3, 4, 5, 100, 101, 102], 9
    assert made.get_num_new_matched_tokens(LONG, 0) == (None, False)
    assert made.get_num_new_matched_tokens(LONG, 0) == (CHUNKS * CHUNK, True)
    assert 100 not in ram.chunks
    made._tier.shutdown()


def test_what_both_tiers_give_is_not_computed(tmp_path: Path) -> None:
    """The planner's books, from the first question to the last block."""
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=1e6)
    computes(planner, 100, 1.0)
    planner.measured_loads(1e9, time.monotonic())
    made, ram = tiering_connector(planner, tmp_path)
    store_everything(ram)
    ram.chunks = [0, 1, 7]
    for alone in (True, False):
        planner.arrived("one")
        assert made.get_num_new_matched_tokens(LONG, 0)[0] == (None if alone else CHUNKS * CHUNK)
        if alone:  # five chunks are promised and none has begun, two and one are there
            assert (planner._work.to_load, planner._work.to_compute) == (5 * CHUNK, 5)
            planner.load_began("one", 5 * CHUNK)
            planner.load_ended("one")
            assert made.get_num_new_matched_tokens(LONG, 0)[0] == CHUNKS * CHUNK
        made._tier.allowances.settled("one")
        planner.settled("one", 5)
        planner.step_began({"one": 5}, 0.0)
        assert (planner._work.to_load, planner._work.to_compute) == (0, 0)
        planner.gone("one")
        assert planner.idle
    made._tier.shutdown()


def test_what_finds_no_place_above_the_disk_is_not_promised_any_more(tmp_path: Path) -> None:
    """Else the disk counts as busy with it for as long as vLLM passes the request over."""
    planner = LoadPlanner("auto", token_bytes=1.0, deadline_s=1e6)
    computes(planner, 100, 1.0)
    planner.measured_loads(1e9, time.monotonic())
    made, ram = tiering_connector(planner, tmp_path)
    store_everything(ram)
    ram.room = 0
    planner.arrived("one")
    assert made.get_num_new_matched_tokens(LONG, 0) == (0, False)
    assert (planner._work.to_load, planner._work.to_compute) == (0, LONG.num_tokens)
    made._tier.shutdown()


LONG = SimpleNamespace(
    request_id="one",
    num_tokens=CHUNKS * CHUNK + 5,
    block_hashes=[get_offload_block_hash(key(number)) for number in range(CHUNKS)],
)


def tiering_connector(planner: LoadPlanner, directory: Path) -> tuple[Any, RamTier]:
    made: Any = object.__new__(KVDiskTieringConnector)
    made._max_loadable_tokens = lambda *_: None
    rows = np.zeros((4 * CHUNKS, 4096), np.uint8)
    made.planner, made._requests = planner, {}
    made._tier = secondary_tier(directory, rows)
    made.connector_scheduler = RamTier(made._tier)
    made.waiting = Waiting()
    ram = made.connector_scheduler
    made._ram = ram_tier.RamTier(ram, ram.config.kv_group_configs, len(rows), lambda _: ram.context)
    return made, ram


def store_everything(ram: RamTier) -> None:
    keys, chunks = [key(number) for number in range(CHUNKS)], np.arange(CHUNKS)
    ram.tier.submit_store(TransferJob(1, keys, chunks, False, ram.context))
    ram.tier._wait_for_jobs()


class Base:
    """Stands for vLLM's connector behind ours."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def get_num_new_matched_tokens(self, request: Any, computed: int) -> tuple[int, bool]:
        self.called.append("get_num_new_matched_tokens")
        return HIT, True

    def on_new_request(self, request: Any) -> None:
        self.called.append("on_new_request")

    def build_connector_meta(self, scheduler_output: Any) -> str:
        self.called.append("build_connector_meta")
        return "meta"

    def update_connector_output(self, connector_output: Any) -> None:
        self.called.append("update_connector_output")

    def take_events(self) -> list[str]:
        self.called.append("take_events")
        return ["event"]

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        self.called.append("request_finished")
        return False, None


class Told(PartialLoads, Base):
    pass


@pytest.mark.parametrize("works", [True, False], ids=["works", "is-broken"])
def test_each_of_vllms_calls_reaches_vllm_too(works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Told()
    rates = {Direction.LOAD: iter([None, 1000.0]), Direction.STORE: iter([None, 500.0])}
    made.plan_loads(
        SimpleNamespace(  # type: ignore[arg-type]
            partial_loads="on", load_deadline_ns=2 * 10**9, evict_waiting_last=True
        ),
        1.0,
        lambda direction: next(rates[direction]),
    )
    planner = made.planner
    assert planner is not None
    if not works:
        for name in ("arrived", "step_began", "step_ended", "gone"):
            monkeypatch.setattr(planner, name, broken)
    made.on_new_request(REQUEST)
    assert made.get_num_new_matched_tokens(REQUEST, CHUNK) == (HIT, True)
    assert made.build_connector_meta(SimpleNamespace(num_scheduled_tokens={})) == "meta"
    for _ in range(2):
        made.update_connector_output(SimpleNamespace(finished_recving={"one"}))
    assert made.take_events() == ["event"]
    assert made.request_finished(REQUEST, []) == (False, None)
    assert made.called == [
        "on_new_request",
        "get_num_new_matched_tokens",
        "build_connector_meta",
        *["update_connector_output"] * 2,
        "take_events",
        "request_finished",
    ]
    if works:  # the rate has come through: as much as the disk gives until half the deadline
        computes(planner, 1, 0.1)
        planner.arrived("two")
        assert planner.tokens_to_load("two", HIT, 0, time.monotonic()) == 1000
        assert planner._store_rate == 500
        assert made.load_within_s() == 2.0


def test_what_is_left_to_compute_follows_from_what_the_gpu_has_when_a_request_goes_on() -> None:
    """It may have computed the same prefix for another request since this one was looked at."""
    made = Told()
    left: list[int] = []
    made.planner = SimpleNamespace(settled=lambda _, tokens: left.append(tokens))  # type: ignore[assignment]
    for on_gpu, done in ((0, 0), (CHUNK, 0), (CHUNK, 2 * CHUNK)):
        request = SimpleNamespace(request_id="one", num_tokens=TOKENS, num_computed_tokens=done)
        made.get_num_new_matched_tokens(request, on_gpu)
        made.settled(request, 3 * CHUNK)
    assert left == [TOKENS - 3 * CHUNK, TOKENS - 4 * CHUNK, TOKENS - 2 * CHUNK]

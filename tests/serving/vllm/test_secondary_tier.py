"""``KVDiskTier`` by itself, on real files: what of it vLLM's own tests cannot say."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.kv_offload.base import LookupResult, ReqContext
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob

from kvdisk.messages import Transfer
from kvdisk.serving.vllm.allowances import Look
from kvdisk.serving.vllm.secondary_tier import KVDiskTier
from kvdisk.testing import Faults, SimulatedDisk, simulated_config, simulated_tier
from tests.serving.vllm.chunks import REQUEST, TOKENS, broken, key, secondary_tier

pytestmark = pytest.mark.quick

ROW_BYTES = 4096


@dataclass
class Rig:
    """A tier below a RAM tier of 32 rows, whose chunk of a number lies in the row of it."""

    tier: KVDiskTier
    rows: npt.NDArray[np.uint8]
    jobs: int = 0

    def store(self, *numbers: int) -> int:
        self.tier.submit_store(self._job(numbers, is_load=False))
        return self.jobs

    def load(self, *numbers: int, request: ReqContext = REQUEST) -> int:
        self.tier.submit_load(self._job(numbers, is_load=True, request=request))
        return self.jobs

    def finished(self) -> list[JobResult]:
        self.tier._wait_for_jobs()
        return list(self.tier.get_finished_jobs())

    def hits(self, *numbers: int, request: ReqContext = REQUEST) -> list[bool]:
        found = [self.tier.lookup(key(number), request) for number in numbers]
        return [each is LookupResult.HIT for each in found]

    def _job(
        self, numbers: tuple[int, ...], *, is_load: bool, request: ReqContext = REQUEST
    ) -> TransferJob:
        self.jobs += 1
        keys = [key(number) for number in numbers]
        return TransferJob(self.jobs, keys, np.array(numbers), is_load, request)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rows = np.random.default_rng(1).integers(0, 256, (32, ROW_BYTES), dtype=np.uint8)
    tier = secondary_tier(tmp_path, rows)
    yield Rig(tier, rows)
    tier.shutdown()


def flip(root: Path, block: bytes) -> None:
    """Changes a byte of ``block`` where it is stored."""
    (file,) = root.glob("*/rank-0-of-1.kv")
    content = bytearray(file.read_bytes())
    at = content.index(block)
    with file.open("r+b") as stored:
        stored.seek(at + 100)
        stored.write(bytes([content[at + 100] ^ 1]))


class TestDamage:
    @pytest.mark.parametrize("bad", [0, 2])
    def test_what_was_loaded_is_named_and_the_rest_is_no_hit_any_more(
        self, rig: Rig, tmp_path: Path, bad: int
    ) -> None:
        """Else the same load is tried for ever."""
        before = rig.rows.copy()
        rig.store(0, 1, 2)
        assert [each.success for each in rig.finished()] == [True]
        flip(tmp_path, before[bad].tobytes())
        rig.rows[:] = 0
        rig.load(0, 1, 2)
        (result,) = rig.finished()
        good = [number for number in range(3) if number != bad]
        assert not result.success
        assert result.successful_keys == [key(number) for number in good]
        assert (rig.rows[good] == before[good]).all()
        assert rig.hits(0, 1, 2) == [number != bad for number in range(3)]
        assert rig.hits(bad, request=ReqContext("fresh")) == [False]
        rig.store(bad)
        assert rig.finished()[0].success
        assert rig.hits(bad) == [True]

    def test_events_name_what_is_stored_and_nothing_else(self, rig: Rig) -> None:
        disk = SimulatedDisk()
        rig.tier._tier.close()
        rig.tier._tier = simulated_tier(disk, rig.rows, simulated_config(64, ROW_BYTES))
        rig.store(0)
        disk.faults = Faults()
        assert rig.finished()[0].success
        disk.faults = Faults(store_error=1.0)
        rig.store(1)
        assert not rig.finished()[0].success
        assert [event.keys for event in rig.tier.take_events()] == [[key(0)]]

    def test_a22_a_request_waits_in_vain_once(self, rig: Rig) -> None:
        """A block that does not come in time stays on the disk, but this request computes it."""
        disk = SimulatedDisk()
        rig.tier._tier.close()
        rig.tier._tier = simulated_tier(disk, rig.rows, simulated_config(64, ROW_BYTES))
        rig.tier.on_new_request(REQUEST)
        rig.store(0)
        assert rig.finished()[0].success
        disk.faults = Faults(timeout=1.0)
        rig.load(0)
        assert not rig.finished()[0].success
        assert rig.hits(0) == [False]
        assert rig.hits(0, request=ReqContext("other")) == [True]
        rig.tier.on_request_finished(REQUEST)
        assert rig.hits(0) == [True]
        rig.load(0)  # ends after its request: nothing is left over
        rig.finished()
        assert not rig.tier.allowances


def delay(rig: Rig) -> SimulatedDisk:
    """No store ends until the disk's faults are taken away."""
    disk = SimulatedDisk(faults=Faults(delay=1.0))
    rig.tier._tier.close()
    rig.tier._tier = simulated_tier(disk, rig.rows, simulated_config(64, ROW_BYTES))
    return disk


class TestReset:
    def test_nothing_of_before_is_served_and_jobs_under_way_end(self, rig: Rig) -> None:
        rig.store(0)
        assert rig.finished()[0].success
        job, late = rig.store(1), rig.load(0)
        rig.tier.drain_jobs()
        assert {each.job_id for each in rig.tier.get_finished_jobs()} == {job, late}
        assert rig.hits(0, 1) == [False, False]
        rig.store(2)
        assert rig.finished()[0].success
        assert rig.hits(2) == [True]


class TestFailsafe:
    @pytest.mark.parametrize("call", ["contains", "store", "load", "poll", "stats"])
    def test_an_exception_turns_everything_into_misses(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        rig.store(0, 1)
        assert rig.finished()[0].success
        jobs = [rig.load(0)]
        monkeypatch.setattr(rig.tier._tier, call, broken)
        rig.hits(1)
        jobs += [rig.store(2), rig.load(1)]
        rig.tier.get_stats()
        finished = rig.finished() + rig.finished()
        assert sorted(each.job_id for each in finished) == jobs, "each once"
        assert rig.tier._held_rows == 0
        monkeypatch.undo()
        assert rig.hits(0, 1) == [False, False]
        job = rig.load(0)
        assert [(each.job_id, each.success) for each in rig.finished()] == [(job, False)]
        rig.tier.touch([key(0)], REQUEST)
        rig.tier.drain_jobs()  # it cannot forget what is on the disk, and says so

    def test_loads_under_way_are_told_as_ended(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[str] = []
        plan = SimpleNamespace(
            load_within_s=lambda: None, load_began=lambda *_: None, load_ended=told.append
        )
        rig.tier.load_listener = plan  # type: ignore[assignment]
        rig.store(0)
        rig.finished()
        rig.load(0)
        monkeypatch.setattr(rig.tier._tier, "contains", broken)
        rig.hits(0)
        assert told == [REQUEST.req_id]


def positioned(name: str, *numbers: int, keys_of_a_chunk: int = 1) -> ReqContext:
    """A request whose chunk of a number ends where vLLM says."""
    request = ReqContext(name)
    for number in numbers:
        request.set_offload_key_position(key(number), (1 + number // keys_of_a_chunk) * TOKENS)
    return request


def look_at(rig: Rig, request: ReqContext, *numbers: int) -> Look:
    with rig.tier.allowances.looking(request.req_id) as look:
        for number in numbers:
            rig.tier.lookup(key(number), request)
    return look


def test_a_request_gets_no_more_from_the_disk_than_it_is_allowed(rig: Rig) -> None:
    """Up to a token of it, however often and for however many groups it is asked for."""
    rig.store(*range(6))
    assert all(result.success for result in rig.finished())
    asking = positioned("asking", *range(6), keys_of_a_chunk=2)  # of two groups
    for _ in range(2):
        assert rig.hits(*range(6), request=asking) == [True] * 6
    look = look_at(rig, asking, *range(6))
    rig.tier.allowances.allow("asking", look, TOKENS + 1)
    assert "asking" in rig.tier.allowances
    for _ in range(2):
        assert rig.hits(*range(6), request=asking) == [True] * 4 + [False] * 2
    assert rig.hits(5, request=ReqContext("other")) == [True]
    rig.tier.allowances.allow("asking", look, 0)
    assert rig.hits(0, request=asking) == [False]
    rig.tier.on_request_finished(asking)
    assert "asking" not in rig.tier.allowances
    assert rig.hits(*range(6), request=asking) == [True] * 6


@pytest.mark.parametrize("group_tokens", [(TOKENS, 2 * TOKENS), (2 * TOKENS, TOKENS)])
def test_groups_with_chunks_of_two_sizes_have_all_of_a_hit(
    tmp_path: Path, group_tokens: tuple[int, int]
) -> None:
    """Counted in the larger chunks, half of a prefix was allowed where all of it was wanted."""
    tier = secondary_tier(tmp_path, np.zeros((64, ROW_BYTES), np.uint8), group_tokens)
    with tier.allowances.looking("asking") as look:
        for end in range(TOKENS, 7 * TOKENS, TOKENS):
            look.told(end, True)
    parts = look.parts(0, 6 * TOKENS, tier.allowances.room_tokens)
    assert parts.hit == 6 * TOKENS
    tier.allowances.allow("asking", look, parts.hit)
    assert tier.allowances.may_have("asking", 6 * TOKENS)
    assert tier.token_bytes * 2 * TOKENS == 3 * ROW_BYTES
    tier.shutdown()


def test_a_chunk_takes_a_row_for_each_group(tmp_path: Path) -> None:
    """Room is a quarter of the rows."""
    for group_tokens, chunks in (((TOKENS,), 16), ((TOKENS, TOKENS), 8)):
        rows = np.zeros((64, ROW_BYTES), np.uint8)
        tier = secondary_tier(tmp_path / str(chunks), rows, group_tokens)
        assert tier.allowances.room_tokens == chunks * TOKENS
        tier.shutdown()


def test_looking_brings_nothing_up_and_tells_what_is_on_the_disk(rig: Rig) -> None:
    rig.store(0, 1, 4)
    rig.finished()
    asking = positioned("asking", *range(6))
    with rig.tier.allowances.looking("asking") as look:
        answers = [rig.tier.lookup(key(number), asking) for number in (0, 1, 2, 4, 4)]
    retry, miss = LookupResult.RETRY, LookupResult.MISS
    assert answers == [retry, retry, miss, retry, retry]
    assert look.on_disk == {TOKENS, 2 * TOKENS, 5 * TOKENS}
    assert look.missing_end == 3 * TOKENS
    assert rig.tier._tier.stats().counters.keys_looked_up == 0, "it will be looked up again"
    assert rig.hits(0, request=asking) == [True]


def test_a_request_waits_for_the_disk_once(rig: Rig) -> None:
    """Else two whose chunks push each other out of the RAM tier may be brought up for ever."""
    rig.store(*range(4))
    rig.finished()
    asking, other = positioned("asking", *range(4)), ReqContext("other")
    for request in (asking, other):
        rig.tier.on_new_request(request)
    rig.tier.allowances.allow("asking", look_at(rig, asking, *range(4)), 4 * TOKENS)
    assert rig.hits(0, 1, request=asking) == [True, True]
    rig.load(0, 1, request=asking)
    assert rig.hits(2, request=asking) == [True]  # the first load has not ended
    assert rig.finished()[0].success
    assert rig.hits(0, 1, 2, request=asking) == [False] * 3
    assert rig.hits(0, request=other) == [True]
    rig.tier.allowances.settled("asking")
    assert rig.hits(0, request=asking) == [False]
    assert look_at(rig, asking, 0).on_disk, "preempted, it is asked for anew"
    assert rig.hits(0, request=asking) == [True]
    rig.load(0, request=asking)
    rig.finished()
    for request in (asking, other):
        rig.tier.on_request_finished(request)
    assert rig.hits(0, request=asking) == [True]
    assert not rig.tier.allowances


def test_who_is_passed_over_keeps_its_room_until_all_of_its_loads_have_ended(rig: Rig) -> None:
    rig.store(*range(4))
    rig.finished()
    asking = positioned("asking", *range(4))
    allowances = rig.tier.allowances
    room = allowances.rows_left
    rig.tier.on_new_request(asking)
    allowances.allow("asking", look_at(rig, asking, *range(4)), 4 * TOKENS)

    def rows_left() -> int:
        for _ in range(4):
            allowances.must_wait("other")
            allowances.step_ended()
        return allowances.rows_left

    rig.load(0, 1, request=asking)
    rig.load(2, 3, request=asking)
    assert rows_left() == room - 4
    ended = [job for job in rig.tier._jobs.values() if job.is_load]
    rig.tier._load_ended(ended[0], whole=True)
    assert rows_left() == room - 4
    rig.finished()
    assert rows_left() == room


def test_the_head_of_a_prefix_is_stored_first_and_no_more_than_half_of_the_rows_waits(
    rig: Rig,
) -> None:
    """vLLM hands its keys over as a set; the tail is what finds no room, or is evicted."""
    chunks = range(24)
    shuffled = np.random.default_rng(3).permutation(chunks).tolist()
    before = rig.rows.copy()
    job = rig._job(tuple(shuffled), is_load=False, request=positioned("storing", *chunks))
    rig.tier.submit_store(job)
    (result,) = rig.finished()
    assert not result.success
    assert result.transfer_bytes == 16 * ROW_BYTES
    assert rig.hits(*chunks) == [True] * 16 + [False] * 8
    rig.rows[:] = 0
    rig.load(*range(16))
    assert rig.finished()[0].success
    assert (rig.rows[:16] == before[:16]).all()


def test_a_store_that_would_hold_too_many_rows_holds_none(rig: Rig) -> None:
    """vLLM keeps all rows of a store until it ends, also those that were refused."""
    disk = delay(rig)
    taken = [rig.store(*range(10)), rig.store(*range(10, 16))]
    refused = rig.store(16)
    (result,) = rig.tier.get_finished_jobs()
    assert (result.job_id, result.success) == (refused, False)
    assert rig.tier._tier.stats().counters.refusals == {"queue": 1}
    disk.faults = Faults()
    assert {each.job_id for each in rig.finished()} == {*taken}
    rig.store(16)
    assert rig.finished()[0].success
    assert rig.hits(*range(17)) == [True] * 17
    assert rig.tier._held_rows == 0


def test_a_store_holds_no_more_rows_than_the_operator_says(tmp_path: Path) -> None:
    rows = np.zeros((32, ROW_BYTES), np.uint8)
    rig = Rig(secondary_tier(tmp_path, rows, store_queue=f"{4 * ROW_BYTES}B"), rows)
    disk = delay(rig)
    rig.store(0, 1, 2)
    refused = [rig.store(3, 4), rig.store(3, 4, 5, 6)]
    taken = rig.store(3)
    assert [each.job_id for each in rig.tier.get_finished_jobs()] == refused
    disk.faults = Faults()
    assert {each.job_id: each.success for each in rig.finished()} == {1: True, taken: True}
    rig.tier.shutdown()


def test_what_has_ended_holds_no_rows_though_vllm_has_not_asked_yet(rig: Rig) -> None:
    disk = delay(rig)
    first = rig.store(*range(16))
    disk.faults = Faults()
    second = rig.store(16)
    assert {each.job_id: each.success for each in rig.finished()} == {first: True, second: True}


def test_what_is_being_stored_already_is_stored_once(rig: Rig) -> None:
    """For two prompts with one beginning that vLLM has evicted between them."""
    disk = delay(rig)
    rig.store(0)
    rig.store(0, 1)
    disk.faults = Faults()
    assert [each.success for each in rig.finished()] == [True, True]
    (first, second) = rig.tier.take_events()
    assert [first.keys, second.keys] == [[key(0)], [key(1)]]
    assert rig.hits(0, 1) == [True, True]


def test_rows_that_are_stored_or_brought_up_are_told_to_the_tier_above(rig: Rig) -> None:
    told: list[int] = []
    rig.tier.above = SimpleNamespace(changes=told.append)  # type: ignore[assignment]
    rig.store(0, 1, 2)
    rig.finished()
    assert told == [3]
    rig.load(0, 1)
    rig.finished()
    assert told == [3, 2]


def test_loads_are_told_to_whoever_plans_them(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, int]] = []

    class Plan:
        def load_began(self, request_id: str, tokens: int) -> None:
            told.append(("began", request_id, tokens))

        def load_ended(self, request_id: str) -> None:
            told.append(("ended", request_id, 0))

        def load_within_s(self) -> float:
            return 3.5

    rig.tier.load_listener = Plan()  # type: ignore[assignment]
    rig.store(0, 1, 2)
    rig.finished()
    assert told == []
    submitted: list[Transfer] = []
    submit = rig.tier._tier._worker.submit
    monkeypatch.setattr(
        rig.tier._tier._worker,
        "submit",
        lambda transfer, event: [submitted.append(transfer), submit(transfer, event=event)],
    )
    rig.load(0, 1, 2)
    rig.finished()
    assert told == [("began", REQUEST.req_id, 3 * TOKENS), ("ended", REQUEST.req_id, 0)]
    assert [transfer.within_s for transfer in submitted] == [3.5]


@pytest.mark.parametrize("what", ["stored", "load_ended"])
def test_a_bug_amid_what_has_ended_leaves_no_job_behind(
    what: str, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by an attack: vLLM waited for the job for ever, and kept its rows."""
    jobs = {rig.store(0, 1)}
    if what == "load_ended":
        assert rig.finished()[0].success
        jobs = {rig.load(0, 1), rig.load(1)}
    events, allowances = rig.tier._events, rig.tier.allowances
    monkeypatch.setattr(events if what == "stored" else allowances, what, broken)
    finished = rig.finished()
    while len(finished) < len(jobs):
        finished += rig.finished()
    assert rig.tier.broken
    assert {each.job_id for each in finished} == jobs
    assert not any(each.success for each in finished)
    assert not rig.tier._jobs

"""How much of the disk a waiting request may have brought up: the arithmetic, without vLLM."""

from __future__ import annotations

import random

import pytest

from kvdisk.serving.vllm.allowances import Allowances, Look, Parts

CHUNK = 16


def look(on_disk: set[int], missing: int | None = None) -> Look:
    """Chunks by number."""
    found = Look(CHUNK)
    for number in on_disk:
        found.told((1 + number) * CHUNK, True)
    if missing is not None:
        found.told((1 + missing) * CHUNK, False)
        found.told((9 + missing) * CHUNK, False)
    return found


@pytest.mark.parametrize(
    ("on_disk", "missing", "computed", "room", "parts"),
    [
        ({0, 1, 2, 3}, 4, 0, 99, (4, 0, 0, 4)),
        ({0, 1, 2, 3}, None, 0, 99, (4, 0, 4, 0)),
        ({0, 1}, 4, 0, 99, (2, 0, 2, 4)),
        ({2, 3}, 4, 0, 99, (2, 2, 0, 4)),
        ({1, 3}, 6, 0, 99, (2, 2, 2, 2)),
        ({1, 3}, 6, 2, 99, (1, 1, 2, 2)),
        ({1, 3}, 6, 0, 1, (1, 1, 1, 5)),  # what lies behind the second of them is of no use
        ({1, 3}, 6, 0, 0, (0, 1, 0, 7)),
        (set(), 6, 2, 99, (0, 4, 0, 2)),
    ],
)
def test_a_prompt_is_split_by_where_its_chunks_are(
    on_disk: set[int], missing: int | None, computed: int, room: int, parts: tuple[int, ...]
) -> None:
    found = look(on_disk, missing).parts(computed * CHUNK, 8 * CHUNK, room * CHUNK)
    assert found == Parts(*(CHUNK * count for count in parts))


def test_the_parts_add_up_and_none_is_negative() -> None:
    """Also where the GPU's part ends within a chunk, and where vLLM's answers say little."""
    chance = random.Random(2)
    for _ in range(3000):
        prompt = chance.randrange(1, 200)
        computed = chance.randrange(prompt)
        found = look(set(chance.sample(range(14), chance.randrange(14))))
        found.missing_end = chance.choice([None, *range(CHUNK, 15 * CHUNK, CHUNK)])
        parts = found.parts(computed, prompt, chance.choice([0, CHUNK, 70, 1e9]))
        amounts = (parts.hit, parts.above, parts.free, parts.rest)
        assert min(amounts) >= 0, (found, computed, prompt, parts)
        if max(found.on_disk, default=0) <= prompt:
            assert sum(amounts) == prompt - computed, (found, computed, prompt, parts)


def test_no_more_is_allowed_than_there_is_room_for() -> None:
    allowances = Allowances(CHUNK, 2, 16)  # two keys for each chunk
    whole = look({0, 1, 2, 3, 4, 5, 6, 7})
    assert allowances.room_tokens == 8 * CHUNK
    allowances.allow("first", whole, 3 * CHUNK)
    allowances.allow("second", whole, 4 * CHUNK + 1)
    assert allowances.room_tokens == 0
    allowances.allow("first", whole, CHUNK)
    assert allowances.room_tokens == 2 * CHUNK
    allowances.allow("more than there is room for", whole, 8 * CHUNK)
    assert allowances.room_tokens == 0
    for request in ("first", "more than there is room for", "first", "unknown"):
        allowances.settled(request)
    allowances.gone("second")
    assert allowances.room_tokens == 8 * CHUNK
    assert not allowances


def test_a_hit_that_is_not_to_be_split_waits_for_room() -> None:
    """Alone it may take more than that, so that somebody always goes on."""
    allowances = Allowances(CHUNK, 1, 4, whole=True)
    long, short = look({0, 1, 2, 3, 4, 5}), look({0})
    assert allowances.room_tokens > 1e12
    assert not allowances.wait_for_room("long", long)
    allowances.allow("long", long, 6 * CHUNK)
    assert allowances.wait_for_room("short", short)
    allowances.settled("long")
    assert not allowances.wait_for_room("short", short)
    allowances.allow("short", short, CHUNK)
    assert not allowances.wait_for_room("middle", look({0, 1, 2}))
    assert allowances.wait_for_room("long", long)
    assert not Allowances(CHUNK, 1, 0).wait_for_room("long", long), "it is split instead"


def test_who_waits_for_room_is_not_looked_at_again_until_there_is_some() -> None:
    """Found by an attack: 256 that waited were looked up in each step, which took 0.25 s."""
    allowances = Allowances(CHUNK, 1, 4, whole=True)
    large, small = look({0, 1, 2}), look({0, 1})
    allowances.allow("first", small, 2 * CHUNK)
    assert not allowances.must_wait("large"), "it may have nothing on the disk"
    assert allowances.wait_for_room("large", large)
    assert allowances.wait_for_room("small", small)
    for _ in range(9):
        assert allowances.must_wait("large")
        assert allowances.must_wait("small")
        assert not allowances.must_wait("new")
    assert not allowances.must_wait("small"), "the large one was not asked for"
    assert allowances.must_wait("large")
    allowances.settled("first")
    assert not allowances.must_wait("large"), "there is room"
    assert allowances.must_wait("small")
    assert not allowances.wait_for_room("large", large)
    allowances.allow("large", large, 3 * CHUNK)
    assert not allowances.must_wait("small")
    for each in ("large", "small"):
        allowances.gone(each)
    assert not allowances


def test_in_a_step_no_more_is_looked_at_while_somebody_waits_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found by an attack: a burst of 1,000 was looked at in one step, which took 0.5 s. Who comes
    first is looked at first, and who needs no room does not wait behind those who do.
    """
    monkeypatch.setattr("kvdisk.serving.vllm.allowances._STEP_CHUNKS", 8)
    allowances = Allowances(CHUNK, 1, 4, whole=True)
    allowances.arrived("first")
    allowances.must_wait("other")
    allowances.allow("first", look({0, 1, 2}), 3 * CHUNK)
    allowances.load_began("first")
    looked_at: list[list[str]] = []
    queue = [*(f"hit {number}" for number in range(5)), "no hit"]
    for _ in range(4):
        allowances.step_ended()
        allowances.must_wait("other")
        looked_at.append([])
        for each in [*queue]:
            if not allowances.must_wait(each):
                looked_at[-1].append(each)
                with allowances.looking(each) as found:
                    for end in (CHUNK, 2 * CHUNK, 3 * CHUNK)[: 3 * each.startswith("hit")]:
                        found.told(end, True)
                if found.on_disk:
                    assert allowances.wait_for_room(each, found)
                else:
                    queue.remove(each)
        assert not allowances.must_wait("first"), "it was looked at before"
    assert looked_at == [["hit 0", "hit 1"], ["hit 2", "hit 3"], ["hit 4", "no hit"], []]


@pytest.mark.parametrize("end", ["it has its turn", "it is aborted", "it is asked for no more"])
def test_who_waits_for_room_is_not_overtaken(end: str) -> None:
    """Found by an attack: small hits that came later took the room of a large one for ever."""
    allowances = Allowances(CHUNK, 1, 4, whole=True)
    large, small = look({0, 1, 2}), look({0, 1})
    allowances.allow("small 1", small, 2 * CHUNK)
    for _ in range(9):
        assert allowances.wait_for_room("large", large)
        assert allowances.wait_for_room("small 2", small)
        assert allowances.wait_for_room("small 3", small)
    allowances.settled("small 1")
    if end == "it has its turn":
        assert not allowances.wait_for_room("large", large)
        allowances.allow("large", large, 3 * CHUNK)
        assert allowances.wait_for_room("small 2", small)
        allowances.settled("large")
    elif end == "it is aborted":
        allowances.gone("large")
    else:
        assert allowances.wait_for_room("small 4", small), "it may be asked for yet"
    assert not allowances.wait_for_room("small 2", small)
    for each in ("large", "small 2", "small 3", "small 4"):
        allowances.gone(each)
    assert not allowances


def test_of_several_groups_each_takes_room() -> None:
    allowances = Allowances(CHUNK, 2, 16, whole=True)
    allowances.allow("first", look({0, 1, 2, 3}), 4 * CHUNK)
    assert not allowances.wait_for_room("four", look({0, 1, 2, 3}))
    assert allowances.wait_for_room("five", look({0, 1, 2, 3, 4}))


def test_who_is_gone_leaves_nothing_to_another_of_his_name() -> None:
    """Who waited behind the next in turn, and comes again, does so for the first time."""
    allowances = Allowances(CHUNK, 1, 4, whole=True)
    allowances.allow("first", look({0, 1}), 2 * CHUNK)
    assert allowances.wait_for_room("large", look({0, 1, 2}))
    for _ in range(2):
        assert allowances.wait_for_room("small", look({0}))
        allowances.gone("small")


def test_who_comes_in_the_name_of_another_has_all_chances() -> None:
    allowances = Allowances(CHUNK, 1, 4)
    allowances.arrived("one")
    allowances.allow("one", look({0, 1, 2}), CHUNK)
    allowances.cut("one", 2 * CHUNK)
    allowances.load_ended("one", whole=True)
    allowances.arrived("one")
    assert "one" not in allowances
    assert allowances.may_have("one", 3 * CHUNK)
    assert allowances.cut_token("one") is None
    assert allowances.room_tokens == 4 * CHUNK


def test_a_chunk_is_allowed_at_least_and_never_one_that_is_not_there() -> None:
    allowances = Allowances(CHUNK, 1, 100)
    for tokens, end in ((0, 0), (1, 1), (CHUNK + 1, 5), (99 * CHUNK, 5)):
        allowances.allow("one", look({0, 4}), tokens)
        assert [allowances.may_have("one", n * CHUNK) for n in range(1, 8)] == [
            n <= end for n in range(1, 8)
        ]


def test_who_waited_in_vain_never_waits_again() -> None:
    allowances = Allowances(CHUNK, 1, 100)
    allowances.arrived("one")
    allowances.load_ended("one", whole=False)
    with allowances.looking("one"):
        assert not allowances.may_have("one", CHUNK)
    allowances.arrived("one")  # another request of that name
    assert allowances.may_have("one", CHUNK)
    allowances.gone("one")
    allowances.load_ended("one", whole=False)
    assert not allowances


def test_nothing_behind_what_was_not_stored_until_the_engine_offers_all_anew() -> None:
    allowances = Allowances(CHUNK, 1, 100)
    allowances.cut("ended already", CHUNK)
    assert not allowances
    allowances.arrived("one")
    assert allowances.cut_token("one") is None
    allowances.cut("one", 3 * CHUNK)
    allowances.cut("one", 5 * CHUNK)
    assert allowances.cut_token("one") == 3 * CHUNK
    allowances.reset()
    assert allowances.cut_token("one") is None
    allowances.cut("one", CHUNK)
    allowances.gone("one")
    assert allowances.cut_token("one") is None
    assert not allowances


def test_a_hit_that_is_not_to_be_split_is_all_of_its_parts() -> None:
    parts = look({0, 1, 2}).parts(0, 4 * CHUNK, Allowances(CHUNK, 1, 1, whole=True).room_tokens)
    assert parts.hit == 3 * CHUNK


@pytest.mark.parametrize("load", ["ended", "under way", "refused"])
def test_who_is_passed_over_keeps_no_room_that_others_need(load: str) -> None:
    """Found by attacks: one whose adapter had no room held it for 400 steps, and one for which
    nothing could be brought up for ever. Nor who was asked for and found no place on the device.
    """
    allowances = Allowances(CHUNK, 1, 4)
    for each in ("first", "passed over"):
        allowances.arrived(each)
        allowances.must_wait("other")
        allowances.allow(each, look({0, 1}), 2 * CHUNK)
        if load != "refused":
            allowances.load_began(each)
        if load == "ended":
            allowances.load_ended(each, whole=True)
    for _ in range(2):
        assert allowances.rows_left == 0
        allowances.step_ended()
        allowances.step_ended()  # nobody was asked for in between
        allowances.must_wait("other")
    assert allowances.rows_left == (0 if load == "under way" else 4)
    for each in ("first", "passed over"):
        assert (each in allowances) == (load != "refused"), "it waits for the disk once"
        allowances.gone(each)
    assert not allowances


def test_who_finds_no_place_on_the_device_keeps_no_room_of_who_comes_first() -> None:
    """Found by an attack: the most urgent waited for ever for the room of the least urgent, which
    was asked for after it in each step.
    """
    allowances = Allowances(CHUNK, 1, 4, whole=True)
    for each in ("urgent", "other"):
        allowances.arrived(each)
    allowances.must_wait("other")
    allowances.allow("other", look({0, 1, 2}), 3 * CHUNK)
    allowances.load_began("other")
    waited = []
    for step in range(6):
        allowances.step_ended()
        if step == 2:
            allowances.load_ended("other", whole=True)
        allowances.must_wait("other")
        waited.append(
            allowances.must_wait("urgent") or allowances.wait_for_room("urgent", look({0, 1}))
        )
        allowances.must_wait("other")
    assert waited == [True] * 3 + [False] * 3, "it may be taken in the step after"


def test_who_is_allowed_nothing_has_nothing_to_give_back() -> None:
    allowances = Allowances(CHUNK, 1, 4)
    allowances.allow("computed", look({0, 1}), 0)
    for _ in range(4):
        allowances.must_wait("other")
        allowances.step_ended()
    assert "computed" in allowances, "it need not be looked at again"

"""What of vLLM's RAM tier is evicted, and what is stored there: vLLM's own, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

from vllm.v1.kv_offload.base import ReqContext, get_offload_block_hash, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

from kvdisk.serving.vllm.ram_tier import RamTier
from kvdisk.serving.vllm.waiting import Waiting
from tests.serving.vllm.pools import BLOCK_TOKENS, hashes

pytestmark = pytest.mark.quick

SOMEBODY = ReqContext("somebody")


def group(index: int = 0, blocks: int = 1) -> Any:
    """Whose chunks are of so many blocks."""
    return SimpleNamespace(
        group_idx=index,
        tokens_per_chunk=blocks * BLOCK_TOKENS,
        hashes_per_chunk=blocks,
        sliding_window_size_in_chunks=None,
    )


class Rig:
    """A RAM tier, and who waits for what of it."""

    def __init__(self, rows: int, *groups: Any, policy: str = "lru") -> None:
        self.vllms = CPUOffloadingManager(rows, policy)
        self.waiting = Waiting()
        self.on_device: dict[str, int] = {}  # so many tokens of each
        self.ram = RamTier(self.vllms, groups or [group()], rows, ReqContext)

    def store(self, prompt: list[bytes]) -> None:
        keys = [make_offload_key(each, 0) for each in prompt]
        assert self.vllms.prepare_store(keys, SOMEBODY) is not None
        self.vllms.complete_store(keys, SOMEBODY)

    def hold(self, prompt: list[bytes]) -> None:
        """As long as it is read."""
        self.vllms.prepare_load([make_offload_key(each, 0) for each in prompt], SOMEBODY)

    def touch(self) -> None:
        self.ram.evict_waiting_last(self.waiting, lambda name: self.on_device.get(name, 0))

    def evicted(self, rows: int) -> str:
        """What goes for so many new rows, in its order."""
        output = self.vllms.prepare_store(keys_of(hashes("new", rows)), SOMEBODY)
        assert output is not None
        found = [get_offload_block_hash(key).rstrip(b".").decode() for key in output.evicted_keys]
        return " ".join(found)

    def fitting(self, prompt: list[bytes], *groups: int, reserved: int = 0) -> tuple[int, ...]:
        """How many chunks of a prompt are stored, of each group."""
        own = ReqContext("own")
        keys = [make_offload_key(each, number) for number in groups or [0] for each in prompt]
        for at, key in enumerate(keys):
            own.set_offload_key_position(key, (at % len(prompt) + 1) * BLOCK_TOKENS)
        kept = self.ram.fitting(self.waiting, keys, own, reserved)
        assert [*kept.keys] == [key for key in keys if key in kept.keys], "in vLLM's order"
        return tuple(sum(key in kept.keys for key in keys_of(prompt, n)) for n in groups or [0])


def keys_of(prompt: Sequence[bytes], group: int = 0) -> list[Any]:
    return [make_offload_key(each, group) for each in prompt]


def test_what_waits_is_evicted_last_and_of_that_first_what_the_device_has_too() -> None:
    """There what came last is the first to go, so its rows are kept for longer."""
    rig = Rig(7)
    for name, count in (("a", 3), ("b", 3), ("x", 1)):
        rig.store(hashes(name, count))
    for name in "ab":
        rig.waiting.arrived(name, hashes(name, 3))
        rig.on_device[name] = 2 * BLOCK_TOKENS
    rig.touch()
    assert rig.evicted(7) == "x0 a1 a0 b1 b0 b2 a2"


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_what_nobody_waits_for_takes_no_place_of_what_does(policy: str) -> None:
    """Unless the policy learns from each use."""
    rig = Rig(8, policy=policy)
    rig.store(hashes("a", 4))
    rig.waiting.arrived("a", hashes("a", 4))
    rig.touch()
    assert rig.fitting(hashes("n", 6)) == ((4,) if policy == "lru" else (6,))


def test_of_two_groups_as_much_is_stored() -> None:
    """vLLM offers one group after the other; of use is what both have."""
    rig = Rig(64, group(0), group(1))
    rig.store(hashes("a", 32))
    rig.waiting.arrived("a", hashes("a", 32))
    rig.touch()
    assert rig.fitting(hashes("n", 24), 0, 1) == (16, 16)


@pytest.mark.parametrize(
    ("each", "reserved", "fitting"), [(3, 3, 5), (4, 0, 4)], ids=["two rows are free", "none is"]
)
def test_what_is_there_of_an_offer_takes_no_room_and_is_none(
    each: int, reserved: int, fitting: int
) -> None:
    """vLLM does not evict it for the rest of it, but what waits."""
    rig = Rig(8)
    for name in "an":
        rig.store(hashes(name, each))
    rig.waiting.arrived("a", hashes("a", each))
    rig.touch()
    assert rig.fitting(hashes("n", 9), reserved=reserved) == (fitting,)


def test_of_what_waits_only_what_could_be_evicted_is_kept() -> None:
    """A row that is read is beside those that vLLM counts."""
    rig = Rig(8)
    for name in "ab":
        rig.store(hashes(name, 4))
    rig.hold(hashes("a", 2))
    rig.waiting.arrived("a", hashes("a", 4))
    rig.touch()
    assert rig.fitting(hashes("n", 9)) == (4,)


def test_what_is_found_begins_where_the_device_ends() -> None:
    prompt = hashes("a", 8)
    rig = Rig(8)
    rig.store(prompt[5:7])
    found = [rig.ram.found_tokens("a", prompt, n * BLOCK_TOKENS) for n in (5, 6, 7, 8)]
    assert found == [n * BLOCK_TOKENS for n in (7, 7, 7, 8)]


def test_no_less_is_found_than_the_device_has() -> None:
    """Its part ends within a chunk."""
    prompt = hashes("a", 8)
    rig = Rig(8, group(blocks=2))
    assert rig.ram.found_tokens("a", prompt, 3 * BLOCK_TOKENS) == 3 * BLOCK_TOKENS
    rig.store(prompt[3:6:2])
    assert rig.ram.found_tokens("a", prompt, 3 * BLOCK_TOKENS) == 6 * BLOCK_TOKENS


def test_of_a_large_tier_more_must_change_before_it_is_touched_again() -> None:
    rig = Rig(2048)
    rig.store(hashes("x", 2044))
    rig.store(hashes("a", 4))
    rig.touch()
    rig.waiting.arrived("a", hashes("a", 4))
    room: list[int] = []
    for changes in (255, 1):
        rig.ram.changes(changes)
        rig.ram.step_ended()
        rig.touch()
        room += rig.fitting(hashes("n", 2048))
    assert room == [2048, 2044]


def test_behind_as_much_as_is_looked_at_nobody_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvdisk.serving.vllm.ram_tier._LOOKED_MAX", 10)
    monkeypatch.setattr("kvdisk.serving.vllm.ram_tier._LOOKS_PER_REQUEST", 1)
    rig = Rig(8)
    for name in "abcd":
        rig.waiting.arrived(name, hashes(name, 8))
    asked: list[str] = []
    rig.ram.evict_waiting_last(rig.waiting, lambda name: asked.append(name) or 0)
    assert asked == ["a", "b"]

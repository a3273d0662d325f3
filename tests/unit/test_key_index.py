"""Many keys at once must be found as one by one, whatever they are and however they collide."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvdisk.free_slots import FreeSlots, run_count
from kvdisk.key_index import ABSENT, KEY_BYTES_MAX, KeyBatch, KeyIndex


def slots(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32)


def put(index: KeyIndex, keys: list[bytes], *numbers: int) -> None:
    index.insert(KeyBatch(keys), slots(*numbers), slots(*numbers))


def find(index: KeyIndex, keys: list[bytes]) -> list[int]:
    found = index.find(KeyBatch(keys)).tolist()
    assert found == [index.find_one(key) for key in keys]
    return found


class TestIndex:
    @pytest.mark.parametrize("collide", [False, True])
    def test_equals_a_dict(self, collide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """With every hash equal all keys share a bucket and a tag, so the overflow takes most."""
        if collide:
            monkeypatch.setattr(
                KeyBatch, "hashes", property(lambda batch: np.full(len(batch), 7, dtype=np.int64))
            )
            monkeypatch.setattr("kvdisk.key_index.hash", lambda key: 7, raising=False)
        generator = random.Random(3)
        size = 200
        index, model = KeyIndex(size), dict[bytes, int]()
        lengths = [36] if generator.random() < 0.5 else [1, 8, 35, 36, 64]
        keys = list(
            {
                generator.randbytes(generator.choice([*lengths, 36])).rstrip(b"\0") or b"k"
                for _ in range(500)
            }
        )
        for _ in range(600):
            batch = generator.sample(keys, generator.randrange(1, 30))
            free = [slot for slot in range(size) if slot not in model.values()]
            new = [key for key in batch if key not in model][: len(free)]
            if generator.random() < 0.6 and new:
                chosen = generator.sample(free, len(new))
                put(index, new, *chosen)
                model |= dict(zip(new, chosen, strict=True))
            else:
                index.remove(slots(*(model.pop(key) for key in batch if key in model)))
            assert find(index, keys) == [model.get(key, ABSENT) for key in keys]
            assert len(index) == len(model)
            index.check(slots(*model.values()))
        assert bool(index._overflow) == collide

    def test_keys_that_differ_in_trailing_zeros_or_length_only(self) -> None:
        index = KeyIndex(8)
        keys = [b"\0", b"\0\0", b"a", b"a\0", b"a\0\0", b"x" * 63, b"x" * 64]
        put(index, keys[::2], 0, 1, 2, 3)
        assert find(index, keys) == [0, ABSENT, 1, ABSENT, 2, ABSENT, 3]
        put(index, keys[1::2], 5, 6, 7)
        assert find(index, keys) == [0, 5, 1, 6, 2, 7, 3]
        assert [index.key(slot) for slot in (0, 5, 1, 6, 2, 7, 3)] == keys

    def test_length_is_relearned_once_empty(self) -> None:
        index = KeyIndex(4)
        put(index, [b"aa"], 0)
        put(index, [b"bbb"], 1)
        index.remove(slots(0, 1))
        put(index, [b"cccc"], 1)
        assert find(index, [b"aa", b"bbb", b"cccc"]) == [ABSENT, ABSENT, 1]
        index.clear()
        assert find(index, [b"cccc"]) == [ABSENT]

    def test_a_batch_does_not_remember_what_has_changed(self) -> None:
        index, other = KeyIndex(4), KeyIndex(4)
        batch = KeyBatch([b"a", b"b"])
        assert index.find(batch).tolist() == [ABSENT, ABSENT]
        put(index, [b"b"], 2)
        assert index.find(batch).tolist() == [ABSENT, 2]
        assert other.find(batch).tolist() == [ABSENT, ABSENT]
        index.remove(slots(2))
        assert index.find(batch).tolist() == [ABSENT, ABSENT]

    def test_resized(self) -> None:
        index = KeyIndex(300)
        keys = [b"%d" % number for number in range(300)]
        put(index, keys, *range(300))
        index.remove(slots(*range(100, 300)))
        small = index.resized(100, slots(*range(100)))
        assert find(small, keys) == [*range(100), *[ABSENT] * 200]
        assert find(small.resized(9999, slots(*range(100))), keys) == find(small, keys)

    def test_check_notices_damage(self) -> None:
        index = KeyIndex(8)
        put(index, [b"a", b"b"], 0, 1)
        index.check(slots(0, 1))
        with pytest.raises(AssertionError):
            index.check(slots(0))
        with pytest.raises(AssertionError):
            index.check(slots(0, 2))
        index._words[1] += 1
        with pytest.raises(AssertionError, match="leads to another slot"):
            index.check(slots(0, 1))


class TestBatch:
    @pytest.mark.parametrize("key", [b"", b"x" * (KEY_BYTES_MAX + 1)])
    def test_impossible_keys(self, key: bytes) -> None:
        with pytest.raises(AssertionError, match="1 to 64 bytes"):
            KeyBatch([b"good", key])

    def test_rows_as_the_native_engine_takes_them_and_back(self) -> None:
        keys = [b"one", b"three", b"f" * 64, b"z\0"]
        batch = KeyBatch(keys)
        assert batch.rows.shape == (4, KEY_BYTES_MAX)
        assert batch.rows[1].tobytes() == b"three".ljust(64, b"\0")
        assert batch.lengths.tolist() == [3, 5, 64, 2]
        back = KeyBatch.from_rows(batch.rows, batch.lengths)
        assert list(back.keys) == keys
        assert (back.hashes == batch.hashes).all()
        assert list(back[1:3].keys) == keys[1:3]
        assert list(batch[2:].pick(np.array([1, 0])).keys) == [b"z\0", b"f" * 64]
        with pytest.raises(AssertionError):
            KeyBatch.from_rows(batch.rows, np.array([3, 5, 65, 2], dtype=np.uint8))

    def test_distinct(self) -> None:
        assert KeyBatch([b"a", b"b"]).distinct
        assert not KeyBatch([b"a", b"a"]).distinct
        assert len(KeyBatch([])) == 0


class TestFreeSlots:
    def test_a_new_tier_gives_one_run(self) -> None:
        free = FreeSlots(1000)
        assert free.take(64).tolist() == list(range(64))
        assert free.take(936).tolist() == list(range(64, 1000))

    def test_what_comes_back_together_goes_out_as_a_run(self) -> None:
        free = FreeSlots(100)
        free.take(100)
        free.add(slots(17, 15, 16, 14))
        free.add(slots(40, 42, 44))
        free.add(slots(60, 61, 62, 63, 64, 65))
        free.add(slots(80))
        assert free.take(6).tolist() == [60, 61, 62, 63, 64, 65]
        assert free.take(4).tolist() == [14, 15, 16, 17]
        assert free.take(3).tolist() == [40, 42, 44]
        assert free.take(1).tolist() == [80]
        assert len(free) == 0

    def test_gives_each_slot_once(self) -> None:
        generator = random.Random(9)
        free, out = FreeSlots(700), set[int]()
        for _ in range(3000):
            if generator.random() < 0.5 and len(free):
                taken = free.take(generator.randrange(1, min(len(free), 90) + 1)).tolist()
                assert taken == sorted(taken)
                assert not out & set(taken)
                out |= set(taken)
            elif out:
                back = generator.sample(sorted(out), generator.randrange(1, len(out) + 1))
                free.add(slots(*back))
                out -= set(back)
            assert len(free) == 700 - len(out)
            assert set(free.view().tolist()) == set(range(700)) - out

    def test_refuses_nonsense(self) -> None:
        free = FreeSlots(2)
        with pytest.raises(AssertionError, match="free"):
            free.take(3)
        with pytest.raises(AssertionError, match="freed"):
            free.add(slots(0))

    def test_run_count(self) -> None:
        assert run_count(slots()) == 0
        assert run_count(slots(4)) == 1
        assert run_count(slots(4, 5, 7, 8, 9, 11)) == 3

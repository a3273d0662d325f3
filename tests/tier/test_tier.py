"""What a developer relies on: DiskTier on real files."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import select
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdisk import disk_path, memory, room
from kvdisk.config import TierConfig
from kvdisk.errors import BusyError, ConfigError, DeviceError, KVDiskError
from kvdisk.layout import Layout
from kvdisk.metrics import MISS_REASONS, prometheus_collector
from kvdisk.rank_file import HeaderProbe, RankFile
from kvdisk.scheduler import TierScheduler
from kvdisk.tier import DiskTier
from kvdisk.transfer import Direction, RowStatus, TransferEngine
from kvdisk.worker import TierWorker
from tests.tier.rig import PATIENCE_S, TierRig, identity, name, ok, tier_rig

KEYS = list(range(100))


def test_what_was_stored_comes_back_also_after_a_restart(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        assert rig.lookup(KEYS) == 0
        assert rig.load(KEYS) == [RowStatus.MISS] * 100
        assert rig.store(KEYS) == ok(100)
        assert rig.lookup(KEYS) == 100
        assert rig.lookup([*KEYS[:40], 999, *KEYS[41:]]) == 40
        assert rig.load(KEYS) == ok(100)
    with tier_rig(tmp_path / "kv") as rig:
        assert rig.tier.stats().counters.restored == 100
        assert rig.load(KEYS) == ok(100)


def test_slots_spread_over_paths_and_come_back(tmp_path: Path) -> None:
    paths = [tmp_path / f"disk{i}" for i in range(3)]
    with tier_rig(*paths, capacity=24 << 20) as rig:
        assert rig.store(KEYS) == ok(100)
        assert rig.load(KEYS) == ok(100)
        stored = [stats["rows_stored"] for stats in rig.tier.stats().engines.values()]
        assert sum(stored) == 100
        assert all(stored), "a path was left out"
    with tier_rig(*paths, capacity=24 << 20) as rig:
        assert rig.load(KEYS) == ok(100)


def test_a_key_that_is_here_costs_no_write(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        rig.store(KEYS)
        written = rig.tier.stats().engine_sum("rows_stored")
        assert rig.store(KEYS) == ok(100)
        assert rig.tier.stats().engine_sum("rows_stored") == written
        assert rig.tier.stats().counters.blocks_already_there == 100


def test_a_full_tier_gives_up_the_oldest(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        slots = rig.tier.stats().slots.total
        for first in range(0, 4 * slots, 100):
            assert rig.store(range(first, first + 100)) == ok(100)
            assert rig.load(range(first, first + 100)) == ok(100)
        assert rig.lookup([0]) == 0
        assert rig.tier.stats().slots.evicted > 2 * slots


def test_each_transfer_ends_once_and_its_source_is_free_no_later(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        ids = [rig.submit_store(KEYS), rig.submit_store(KEYS[:50]), rig.submit_store([])]
        for transfer_id in ids:
            rig.finish(transfer_id)
            assert transfer_id in rig.source_free
        assert sorted(rig.source_free) == sorted(ids)
        assert rig.results[ids[1]].statuses.tolist() == [RowStatus.BUSY] * 50
        assert not len(rig.results[ids[2]].statuses)


def test_drop_forgets_keys_and_clear_everything_for_good(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        rig.store(KEYS)
        assert rig.tier.drop([name(3), name(4), name(1000)]) == 2
        assert rig.lookup(KEYS) == 3
        assert rig.tier.clear()
        assert rig.lookup(KEYS) == 0
        assert rig.load(KEYS) == [RowStatus.MISS] * 100
        assert rig.store(KEYS, generation=1) == ok(100)
        assert rig.load(KEYS, generation=1) == ok(100)
        assert rig.tier.clear()
        assert rig.store(KEYS[:10], generation=2) == ok(10)
    with tier_rig(tmp_path / "kv") as rig:
        assert rig.tier.stats().counters.restored == 10
        assert rig.load(KEYS[:10], generation=2) == ok(10)


def test_clear_is_repeatable_and_survives_a_close_right_after(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        rig.store(KEYS)
        assert [rig.tier.clear() for _ in range(3)] == [True] * 3
    with tier_rig(tmp_path / "kv") as rig:
        assert rig.lookup(KEYS) == 0


def test_a_selector_sees_results(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        poller = select.poll()
        poller.register(rig.tier.fileno(), select.POLLIN)
        transfer_id = rig.submit_store(KEYS)
        until = time.monotonic() + PATIENCE_S
        while transfer_id not in rig.results:
            assert time.monotonic() < until
            poller.poll(1000 * PATIENCE_S)
            rig.poll()
        rig.poll()
        assert poller.poll(0) == []  # quiet when nothing happens


def test_close_ends_what_is_under_way_and_refuses_what_comes_after(tmp_path: Path) -> None:
    rig = TierRig(tmp_path / "kv")
    ids = [rig.submit_store(KEYS), rig.submit_store([1000])]
    assert rig.close() == 0
    assert all(transfer_id in rig.results for transfer_id in ids)
    assert rig.close() == 0
    with pytest.raises(KVDiskError, match="closed"):
        rig.tier.store([b"x"], [0])
    with pytest.raises(KVDiskError, match="closed"):
        rig.tier.load([b"x"], [0])


def test_close_during_a_clear_lets_go_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier is closed while the clear's thread opens the engine anew."""
    open_engine, slow = TransferEngine.open, threading.Event()
    opening, go_on = threading.Event(), threading.Event()

    def open_slowly(*arguments: Any, **options: Any) -> TransferEngine:
        if slow.is_set():
            opening.set()
            assert go_on.wait(PATIENCE_S)
        return open_engine(*arguments, **options)

    monkeypatch.setattr(TransferEngine, "open", open_slowly)
    rig = TierRig(tmp_path / "kv")
    assert rig.store(KEYS) == ok(100)
    slow.set()
    assert not rig.tier.clear(timeout_s=0)
    assert opening.wait(PATIENCE_S)
    rig.close(0)
    slow.clear()
    go_on.set()
    until = time.monotonic() + PATIENCE_S
    while True:
        assert time.monotonic() < until, "the closed tier keeps its files"
        with contextlib.suppress(BusyError), tier_rig(tmp_path / "kv") as again:
            assert again.lookup(KEYS) == 0
            break
    assert rig.tier.closed  # it is still there, so nothing was left to garbage collection


def test_a_store_that_may_not_wait_is_taken_when_there_is_a_buffer(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv", store_wait="0ms") as rig:
        for first in range(0, 100, 10):
            assert rig.store(KEYS[first : first + 10]) == ok(10)
        assert rig.load(KEYS) == ok(100)


def test_a_block_that_there_is_not_is_an_error_and_costs_nothing(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv", blocks=8) as rig:
        key, blocks = name(1), 2 * rig.blocks.count
        with pytest.raises(ValueError, match="there are 16 blocks"):
            rig.tier.store([key], [blocks])
        assert rig.store([1]) == ok(1)
        with pytest.raises(ValueError, match="there are 16 blocks"):
            rig.tier.load([key], [blocks])
        assert rig.load([1]) == ok(1)


def test_second_touch_and_write_budget(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "a", admission="second-touch") as rig:
        assert rig.store(KEYS) == [RowStatus.REFUSED] * 100
        assert rig.store(KEYS) == ok(100)
        assert rig.tier.stats().counters.refusals == {"admission": 100}
    with tier_rig(tmp_path / "b", write_budget=24 * 10 * (64 << 10)) as rig:
        statuses = rig.store(KEYS)
        assert statuses == ok(10) + [RowStatus.REFUSED] * 90  # the head of the prefix


def test_the_second_opener_is_told_who_has_it(tmp_path: Path) -> None:
    with (
        tier_rig(tmp_path / "kv"),
        pytest.raises(BusyError, match=r"in use by this process itself: close the tier"),
    ):
        TierRig(tmp_path / "kv")


def test_a_forked_child_leaves_the_tier_to_its_parent(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        assert rig.store(KEYS) == ok(100)
        child = os.fork()
        if child == 0:
            try:
                os._exit(rig.tier.close())
            finally:
                os._exit(100)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert rig.load(KEYS) == ok(100)
        assert rig.store(range(200, 230)) == ok(30)


@pytest.mark.parametrize("key", ["text", "t\u00e9xt", memoryview(b"m"), bytearray(b"a"), 7, None])
def test_a_key_that_is_none_is_refused_before_it_costs_a_slot(tmp_path: Path, key: Any) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        tier = rig.tier
        before = tier.stats()
        for call in (tier.store, tier.load):
            with pytest.raises(TypeError, match="a key is bytes, not"):
                call([b"good", key], [0, 1])
        with pytest.raises(TypeError, match="a key is bytes, not"):
            tier.store([b"good"], [0], prefix=[key])
        for ask in (tier.lookup, tier.readable, tier.touch, tier.drop):
            with pytest.raises(TypeError, match="a key is bytes, not"):
                ask([key])
        assert tier.stats().slots == before.slots
        assert tier.stats().open_transfers == 0


def test_bad_input_is_refused_at_open_and_loses_nothing(tmp_path: Path) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        rig.store(KEYS)
    for options, text in (
        ({"capacity": "1MiB", "block_bytes": 4 << 20}, "too small"),
        ({"ring": "64KiB"}, "ring"),
        ({"eviction": "lfu"}, "eviction"),
        ({"admission": "first-touch"}, "admission"),
        ({"colour": "blue"}, "unknown option"),
    ):
        with pytest.raises(ConfigError, match=text):
            TierRig(tmp_path / "kv", **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="does not exist"):
        TierRig(tmp_path / "not" / "mounted" / "kv")
    with tier_rig(tmp_path / "kv") as rig:
        assert rig.load(KEYS) == ok(100)
        with pytest.raises(ValueError, match="block ids"):
            rig.tier.store([b"a", b"b"], [0])


def test_health_and_the_opening_line_say_what_an_operator_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "kvdisk"), tier_rig(tmp_path / "kv") as rig:
        health = rig.tier.health()
        assert health.status == "ok"
        assert health.facts["recovered"] == 0
        line = next(text for text in caplog.messages if "recovered" in text)
        backend = str(health.facts["backend"])
        for part in (str(tmp_path / "kv"), "slots of 64.00 KiB", "KiB of memory", backend):
            assert part in line


def test_too_little_locked_memory_is_told_once_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = TransferEngine.stats
    said = "the buffers could not be registered with io_uring (...): raise it (ulimit -l)"
    monkeypatch.setattr(
        TransferEngine, "stats", lambda engine: real(engine) | {"backend_note": said}
    )
    with tier_rig(tmp_path / "kv") as rig:
        rig.store(KEYS)
    (line,) = [each for each in caplog.records if "registered" in each.getMessage()]
    assert line.levelno == logging.WARNING
    assert str(tmp_path / "kv") in line.getMessage()


def test_more_slots_than_memory_has_room_for_are_refused_by_either_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A terabyte in small blocks is gigabytes of keys and records: said at open, not by the OOM."""
    config = TierConfig(paths=(tmp_path,), capacity_bytes=1 << 40, ring_bytes=1 << 20)
    layout = Layout.from_tensors([np.zeros((4, 4096), dtype=np.uint8)])
    little = memory.MemoryHeadroom(8 << 30, "MemAvailable of this machine")
    monkeypatch.setattr(memory, "memory_headroom", lambda _: little)
    monkeypatch.setattr(room, "room_for", lambda *_: True)
    with pytest.raises(ConfigError, match=r"capacity.*slots take.*GiB.*8\.00 GiB"):
        TierScheduler(config, layout.block_bytes)
    with pytest.raises(ConfigError, match=r"capacity.*slots take.*1\.00 MiB for the ring"):
        TierWorker.open(layout, identity(layout), config)
    assert list(tmp_path.iterdir()) == [], "nothing was made"


def test_a_capacity_beyond_the_disk_is_refused_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> None:
        raise AssertionError("memory was looked at before the disk")

    monkeypatch.setattr(memory, "memory_headroom", never)
    layout = Layout.from_tensors([np.zeros((4, 4096), dtype=np.uint8)])
    root = tmp_path / "kv"
    config = TierConfig(paths=(root,), capacity_bytes=8 << 40, ring_bytes=1 << 20)
    for open_it in (DiskTier.open, TierWorker.open):
        with pytest.raises(DeviceError, match=r"8\.00 TiB more needed.* free.*lower capacity"):
            open_it(layout, identity(layout), config)
    assert not root.exists()


@pytest.mark.parametrize("step", ["self_test", "engine", "label", "second path"])
def test_an_open_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise DeviceError("it is broken", errno=5)

    target, function = {
        "self_test": (disk_path, "self_test"),
        "engine": (TransferEngine, "open"),
        "label": (disk_path, "label_namespace"),
        "second path": (disk_path, "self_test"),
    }[step]
    paths = [tmp_path / "kv"]
    if step == "second path":
        paths.append(tmp_path / "busy")
        holder = TierRig(paths[1])
    else:
        monkeypatch.setattr(target, function, fail)
    with pytest.raises((DeviceError, BusyError)):
        TierRig(*paths)
    assert not paths[0].exists()
    if step == "second path":
        holder.close()


def test_metrics_have_every_reason_before_it_happens_and_true_counts(tmp_path: Path) -> None:
    registry = pytest.importorskip("prometheus_client").CollectorRegistry()
    with tier_rig(tmp_path / "kv") as rig:
        registry.register(prometheus_collector(rig.tier.stats, lambda: rig.tier.health().status))
        for reason in MISS_REASONS:
            assert registry.get_sample_value("kvdisk_misses_total", {"reason": reason}) == 0
        rig.store(KEYS)
        rig.load([*KEYS, 2000])
        value = registry.get_sample_value
        assert value("kvdisk_stored_blocks_total") == 100
        assert value("kvdisk_stored_bytes_total") == 100 * (64 << 10)
        assert value("kvdisk_loaded_blocks_total") == 100
        assert value("kvdisk_misses_total", {"reason": "absent"}) == 1
        assert value("kvdisk_slots_resident") == 100
        assert value("kvdisk_transfers_open") == 0
        assert value("kvdisk_load_seconds_bucket", {"le": "+Inf"}) == 100
        assert value("kvdisk_load_seconds_count") == 100
        assert value("kvdisk_health", {"state": "ok"}) == 1


def split_config(root: Path) -> TierConfig:
    return TierConfig.from_mapping({"path": str(root), "capacity": "16MiB", "ring": "4MiB"})


class TestSplit:
    """A scheduler and two ranks, with every message pickled on its way."""

    @pytest.fixture
    def caches(self) -> list[np.ndarray]:
        random = np.random.default_rng(5)
        return [random.integers(0, 256, (2, 64, 8192), dtype=np.uint8) for _ in range(2)]

    def open(self, root: Path, caches: list[np.ndarray]) -> tuple[TierScheduler, list[TierWorker]]:
        layouts = [Layout.from_tensors(list(cache)) for cache in caches]
        config = split_config(root)
        scheduler = TierScheduler(config, layouts[0].block_bytes, world_size=2)
        workers = [
            TierWorker.open(layout, identity(layout), config, rank=rank, world_size=2)
            for rank, layout in enumerate(layouts)
        ]
        for worker in workers:
            scheduler.attach(pickle.loads(pickle.dumps(worker.take_opened())))
        return scheduler, workers

    def run(self, scheduler: TierScheduler, workers: list[TierWorker], transfer) -> list[int]:
        for worker in workers:
            worker.submit(pickle.loads(pickle.dumps(transfer)))
        until = time.monotonic() + PATIENCE_S
        while True:
            for worker in workers:
                worker.wait(0.05)
                scheduler.apply(pickle.loads(pickle.dumps(worker.poll())))
            for result in scheduler.take_finished():
                assert result.transfer_id == transfer.id
                return result.statuses.tolist()
            assert time.monotonic() < until

    def test_blocks_of_both_ranks_come_back_also_after_a_restart(
        self, tmp_path: Path, caches: list[np.ndarray]
    ) -> None:
        keys = [name(i) for i in range(20)]
        before = [cache[:, :20].copy() for cache in caches]
        scheduler, workers = self.open(tmp_path / "kv", caches)
        statuses = self.run(scheduler, workers, scheduler.store(keys, np.arange(20)))
        assert statuses == [RowStatus.OK] * 20
        for worker in workers:
            worker.close()
        scheduler, workers = self.open(tmp_path / "kv", caches)
        assert scheduler.lookup(keys) == 20
        statuses = self.run(scheduler, workers, scheduler.load(keys, np.arange(30, 50)))
        assert statuses == [RowStatus.OK] * 20
        for cache, right in zip(caches, before, strict=True):
            assert np.array_equal(cache[:, 30:50], right)
        for worker in workers:
            worker.close()

    def test_a_block_that_one_rank_lost_is_a_miss_for_all(
        self, tmp_path: Path, caches: list[np.ndarray]
    ) -> None:
        keys = [name(i) for i in range(8)]
        scheduler, workers = self.open(tmp_path / "kv", caches)
        transfer = scheduler.store(keys, np.arange(8))
        self.run(scheduler, workers, transfer)
        file = next((tmp_path / "kv").glob("*/rank-1-of-2.kv"))
        with file.open("r+b") as opened:
            opened.seek(int(transfer.slots[5]) * scheduler.placement.slot_bytes)
            opened.write(b"\xff" * 4096)
        statuses = self.run(scheduler, workers, scheduler.load(keys, np.arange(8, 16)))
        assert statuses == [1, 1, 1, 1, 1, RowStatus.CORRUPT, 1, 1]
        assert scheduler.lookup(keys) == 5  # for every rank, from now on
        assert scheduler.counters.blocks_loaded == 7
        assert scheduler.counters.misses == {"corrupt": 1}
        scheduler.check()
        for worker in workers:
            worker.close()

    def test_only_what_both_ranks_have_comes_back(
        self, tmp_path: Path, caches: list[np.ndarray]
    ) -> None:
        keys = [name(i) for i in range(16)]
        scheduler, workers = self.open(tmp_path / "kv", caches)
        self.run(scheduler, workers, scheduler.store(keys, np.arange(16)))
        for worker in workers:
            worker.close()
        records = next((tmp_path / "kv").glob("*/rank-0-of-2.idx"))
        with records.open("r+b") as opened:
            opened.seek(4096 + 3 * 128)
            opened.write(b"\0" * 128)
        scheduler, workers = self.open(tmp_path / "kv", caches)
        assert scheduler.readable(keys).sum() == 15
        for worker in workers:
            worker.close()

    def test_a_rank_that_ends_is_waited_for_and_brings_back_what_it_has(
        self, tmp_path: Path, caches: list[np.ndarray]
    ) -> None:
        keys = [name(i) for i in range(16)]
        scheduler, workers = self.open(tmp_path / "kv", caches)
        self.run(scheduler, workers, scheduler.store(keys, np.arange(16)))
        under_way = scheduler.load(keys, np.arange(30, 46))
        workers[0].submit(under_way)  # the other rank ends before it gets it
        workers[1].close()
        scheduler.detach(1)
        assert scheduler.lookup(keys) == 0
        assert not len(scheduler.store([b"new"], [0]))
        until = time.monotonic() + PATIENCE_S
        results = {}
        while under_way.id not in results and time.monotonic() < until:
            workers[0].wait(0.05)
            scheduler.apply(workers[0].poll())
            results.update({each.transfer_id: each for each in scheduler.take_finished()})
        assert (results[under_way.id].statuses == RowStatus.TIMED_OUT).all()
        records = next((tmp_path / "kv").glob("*/rank-1-of-2.idx"))
        with records.open("r+b") as opened:
            opened.seek(4096 + 3 * 128)
            opened.write(b"\0" * 128)
        layout = Layout.from_tensors(list(caches[1]))
        config = split_config(tmp_path / "kv")
        workers[1] = TierWorker.open(layout, identity(layout), config, rank=1, world_size=2)
        assert scheduler.attach(pickle.loads(pickle.dumps(workers[1].take_opened())))
        assert scheduler.readable(keys).sum() == 15
        present = [key for key in keys if scheduler.contains([key])]
        statuses = self.run(scheduler, workers, scheduler.load(present, np.arange(30, 45)))
        assert statuses == [RowStatus.OK] * 15
        scheduler.check()
        for worker in workers:
            worker.close()

    def test_a8_a_crash_between_the_ranks_of_a_clear_clears_both(
        self, tmp_path: Path, caches: list[np.ndarray]
    ) -> None:
        keys = [name(i) for i in range(16)]
        scheduler, workers = self.open(tmp_path / "kv", caches)
        self.run(scheduler, workers, scheduler.store(keys, np.arange(16)))
        workers[0].clear(scheduler.clear())  # and the other one never hears of it
        while workers[0].poll().cleared == []:
            workers[0].wait(1.0)
        for worker in workers:
            worker.close()
        scheduler, workers = self.open(tmp_path / "kv", caches)
        assert scheduler.needs_clear
        assert scheduler.lookup(keys) == 0
        assert not len(scheduler.store(keys, np.arange(16))), "rank 1 may hold them from before"
        scheduler.take_finished()
        message = scheduler.clear()
        until = time.monotonic() + PATIENCE_S
        for worker in workers:
            worker.clear(message)
        while not scheduler.ready:
            assert time.monotonic() < until
            for worker in workers:
                worker.wait(0.05)
                scheduler.apply(worker.poll())
        assert scheduler.cleared(message.id)
        self.run(scheduler, workers, scheduler.store(keys, np.arange(16)))
        for worker in workers:
            worker.close()
        scheduler, workers = self.open(tmp_path / "kv", caches)
        assert scheduler.lookup(keys) == 16
        for worker in workers:
            worker.close()

    def test_ranks_that_do_not_fit_are_refused(
        self, tmp_path: Path, caches: list[np.ndarray]
    ) -> None:
        scheduler, workers = self.open(tmp_path / "kv", caches)
        opened = workers[0].take_opened()
        with pytest.raises(ConfigError, match="here twice"):
            scheduler.attach(opened)
        other = TierScheduler(split_config(tmp_path / "kv"), 1 << 20, world_size=2)
        with pytest.raises(ConfigError, match="same configuration"):
            other.attach(opened)
        for worker in workers:
            worker.close()


def test_a_path_that_fails_at_open_is_left_out_when_there_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    paths = [tmp_path / "good", tmp_path / "bad"]
    with tier_rig(*paths, capacity=16 << 20) as rig:
        rig.store(KEYS)
        on_good = rig.tier._scheduler.placement.path_of(
            rig.tier._scheduler._allocator.find([name(key) for key in KEYS])
        )
    real = RankFile.create_or_open

    def failing(directory: Path, **options):
        if directory.parent.name == "bad":
            raise DeviceError("it is broken", errno=5)
        return real(directory, **options)

    monkeypatch.setattr(RankFile, "create_or_open", failing)
    with tier_rig(*paths, capacity=16 << 20) as rig:
        assert any("it is broken" in text for text in caplog.messages)
        assert rig.tier.health().status == "degraded"
        right = [RowStatus.OK if path == 0 else RowStatus.MISS for path in on_good.tolist()]
        assert rig.load(KEYS) == right
        for first in range(200, 800, 30):
            statuses = rig.store(range(first, first + 30))
        # Slots of the lost path are put aside, so in the end none of them is handed out any more.
        assert statuses == ok(30)
        assert rig.lookup(range(770, 800)) == 30
    with pytest.raises(DeviceError, match="it is broken"):
        TierRig(tmp_path / "bad")


def test_a_disk_that_is_not_mounted_does_not_stop_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "not" / "mounted" / "kv"
    with tier_rig(tmp_path / "kv", missing) as rig:
        assert any("left out" in text and str(missing.parent) in text for text in caplog.messages)
        assert rig.tier.health().status == "degraded"
        assert RowStatus.OK in rig.store(KEYS)
    with pytest.raises(ConfigError, match="does not exist"):
        TierRig(missing, tmp_path / "nor" / "this" / "kv")


def test_a_probe_that_hangs_costs_no_processor_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier_rig(tmp_path / "kv") as rig:
        path = rig.tier._worker._paths[0]
        let_go = threading.Event()

        real_probe = HeaderProbe.__call__

        def hang(probe: HeaderProbe) -> int:
            let_go.wait(PATIENCE_S)
            return real_probe(probe)

        monkeypatch.setattr(HeaderProbe, "__call__", hang)
        path._health._lanes[Direction.LOAD].sit_out(time.monotonic() - 10, "test")
        tends = 0
        real_tend = path.tend

        def tend(now_s: float) -> list[int]:
            nonlocal tends
            tends += 1
            return real_tend(now_s)

        monkeypatch.setattr(path, "tend", tend)
        rig.tier.poll()
        rig.tier.wait(0.3)
        rig.tier.wait(0.3)
        assert tends < 10
        let_go.set()
        until = time.monotonic() + PATIENCE_S
        while rig.tier.health().status != "ok":
            assert time.monotonic() < until
            rig.tier.wait(0.1)
            rig.poll()


def test_directions_and_statuses_pickle() -> None:
    assert pickle.loads(pickle.dumps(Direction.LOAD)) is Direction.LOAD

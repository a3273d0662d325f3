"""What an engine on a CUDA device does, on a driver without a device: one case per function.

Run as a program, ``cuda_cases.py LIBRARY CASE``: the fake driver stays loaded, so each case has a
process of its own. In the fake, device memory is host memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvdisk.errors import ConfigError, DeviceError
from kvdisk.layout import Layout
from kvdisk.transfer import RowStatus, TransferEngine, TransferResult

SLOTS = 64
SEGMENTS = (4096, 4096, 24, 8192)  # 16408 bytes: a block does not fill its slot
SLOT_BYTES = 20480
NOT_READY = 600
BROKEN = 700

fake: Any = None


class Device:
    """2 * SLOTS blocks, the lower half to store from, the upper to load into, and an engine."""

    def __init__(self, device: Any, **options: Any) -> None:
        self.cache = [np.zeros((2 * SLOTS, size), dtype=np.uint8) for size in SEGMENTS]
        host = Layout.from_tensors(self.cache)
        layout = Layout(host.regions, host.block_count, host.block_bytes, device, host.owners)
        directory = tempfile.gettempdir()
        nameless = os.O_RDWR | os.O_TMPFILE
        self.data_fd, self.record_fd = (os.open(directory, nameless, 0o600) for _ in "ab")
        os.ftruncate(self.data_fd, SLOTS * SLOT_BYTES)
        self.engine = TransferEngine(
            layout,
            data_fd=self.data_fd,
            record_fd=self.record_fd,
            slot_bytes=SLOT_BYTES,
            slot_count=SLOTS,
            **{"iodepth": 8, "buffers": 16, "load_reserve": 4, "rows_per_buffer": 2, **options},
        )

    def fill(self, seed: int) -> None:
        random = np.random.default_rng(seed)
        for segment in self.cache:
            segment[:SLOTS] = random.integers(0, 256, segment[:SLOTS].shape, dtype=np.uint8)
            segment[SLOTS:] = 0xA5

    def wait(self, transfer_id: int | None, limit_s: float = 30.0) -> TransferResult:
        assert transfer_id is not None
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            self.engine.wait(1.0)
            for result in self.engine.poll().finished:
                if result.transfer_id == transfer_id:
                    return result
        raise AssertionError("a transfer did not end")

    def store(self, items: list[int], **options: Any) -> TransferResult:
        return self.wait(self.engine.submit_store(keys(items), items, items, **options))

    def load(self, items: list[int]) -> TransferResult:
        targets = [SLOTS + item for item in items]
        return self.wait(self.engine.submit_load(keys(items), items, targets))

    def holds(self, item: int) -> bool:
        return all((segment[item] == segment[SLOTS + item]).all() for segment in self.cache)


@contextlib.contextmanager
def opened(device: Any, **options: Any) -> Iterator[Device]:
    made = Device(device, **options)
    try:
        yield made
    finally:
        made.engine.close()
        os.close(made.data_fd)
        os.close(made.record_fd)


def keys(items: list[int]) -> list[bytes]:
    return [b"block-%d" % item for item in items]


def shuffled(seed: int) -> list[int]:
    return [int(item) for item in np.random.default_rng(seed).permutation(SLOTS)]


def live(kind: str, device: int = 0) -> int:
    return int(fake.fake_cuda_live(kind.encode(), device))


def nothing_left() -> bool:
    kinds = ("stream", "event", "registration", "memory", "module")
    return not any(map(live, kinds)) and not live("context", 0) and not live("context", 1)


def blocks_come_back_whole() -> None:
    fake.fake_cuda_reset(1, 300)
    for backend in ("uring", "threads"):
        with opened("cuda:0", backend=backend, shards=2) as device:
            assert device.engine.stats()["copier"] == "cuda"
            for seed in range(5):
                device.fill(seed)
                assert device.store(shuffled(seed)).ok
                assert device.load(shuffled(seed + 100)).ok
                assert all(device.holds(item) for item in range(SLOTS))
        assert nothing_left()


def threads_choose_the_device_first() -> None:
    """Scenario A32: in each engine thread the resolved device comes first, and it alone is used."""
    for given, index in (("cuda:1", 1), (1, 1), ("cuda", 0), ("cuda:0", 0)):
        fake.fake_cuda_reset(2, 0)
        with opened(given, shards=3) as device:
            device.fill(1)
            assert device.store([1, 2, 3]).ok
            assert live("context", index) == 3, "one for each shard"
            assert live("context", 1 - index) == 0, "a context on another device"
        assert fake.fake_cuda_unprepared_threads() == 0
        assert nothing_left()


def host_memory_makes_no_call() -> None:
    fake.fake_cuda_reset(3, 0)
    with opened("cpu") as device:
        device.fill(1)
        assert device.store([1]).ok
        assert device.load([1]).ok
    assert fake.fake_cuda_calls(b"") == 0


def what_is_not_there_is_said() -> None:
    fake.fake_cuda_reset(4, 0)
    for given, words in (("cuda:7", "no device cuda:7"), ("gpu", "cpu, cuda or cuda:N")):
        with pytest.raises(ConfigError, match=words):
            Device(given)
    fake.fake_cuda_fail(b"cuMemHostRegister", 0, 2, 0)
    with pytest.raises(DeviceError, match="cuMemHostRegister: CUDA_ERROR_OUT_OF_MEMORY"):
        Device("cuda:0")
    assert nothing_left()


def a_store_waits_for_its_event() -> None:
    fake.fake_cuda_reset(5, 100)
    fake.fake_cuda_make_event.restype = ctypes.c_void_p
    with opened("cuda:0") as device:
        device.fill(1)
        event = fake.fake_cuda_make_event(NOT_READY)
        waiting = device.engine.submit_store(keys([1]), [1], [1], event=event)
        assert device.store([2]).ok, "a store behind one that waits"
        device.cache[0][1] = 77  # the producer's last write
        fake.fake_cuda_set_event(ctypes.c_void_p(event), 0)
        assert device.wait(waiting).ok
        assert device.load([1, 2]).ok
        assert device.holds(1)
        assert device.holds(2)

        class Recorded:
            cuda_event = event

        assert device.store([3], event=Recorded()).ok
        assert not device.engine._events, "an event is kept although its source is free"
        Recorded.cuda_event = 0
        with pytest.raises(ValueError, match="never recorded"):
            device.store([3], event=Recorded())


def an_event_that_never_comes_or_fails_ends_its_store_alone() -> None:
    """Scenario A4: a timeout, no buffer held, no core burnt."""
    fake.fake_cuda_reset(6, 0)
    fake.fake_cuda_make_event.restype = ctypes.c_void_p
    with opened("cuda:0") as device:
        device.fill(1)
        never, broken = fake.fake_cuda_make_event(NOT_READY), fake.fake_cuda_make_event(BROKEN)
        before = time.process_time()
        stuck = device.engine.submit_store(keys([1]), [1], [1], event=never, timeout_s=1.0)
        assert device.store([2], event=broken).statuses.tolist() == [RowStatus.COPY_FAILED]
        assert device.engine.stats()["ring_used"] == 0
        assert device.wait(stuck).statuses.tolist() == [RowStatus.TIMED_OUT]
        assert time.process_time() - before < 0.5
        assert device.store([1, 2]).ok


def a_load_writes_only_after_its_event() -> None:
    """A block that is still in use on the caller's stream: the last use comes first."""
    fake.fake_cuda_reset(10, 0)
    fake.fake_cuda_make_event.restype = ctypes.c_void_p
    with opened("cuda:0") as device:
        device.fill(1)
        assert device.store([1, 2]).ok
        event = fake.fake_cuda_make_event(NOT_READY)
        waiting = device.engine.submit_load(keys([1]), [1], [SLOTS + 1], event=event)
        assert device.store([3]).ok, "stores do not wait for it"
        assert not device.engine.poll().finished
        for segment in device.cache:
            segment[SLOTS + 1] = 77
        fake.fake_cuda_set_event(ctypes.c_void_p(event), 0)
        assert device.wait(waiting).ok
        assert device.holds(1)
    with opened("cpu") as device, pytest.raises(ValueError, match="no event"):
        device.engine.submit_load(keys([1]), [1], [1], event=event)


def a_driver_that_fails_fails_rows() -> None:
    fake.fake_cuda_reset(7, 100)
    with opened("cuda:0") as device:
        device.fill(1)
        assert device.store([1, 2, 3]).ok
        fake.fake_cuda_fail(b"cuLaunchKernel", 0, 1, 0)
        result = device.store([4])
        assert result.statuses.tolist() == [RowStatus.COPY_FAILED]
        assert result.errors.tolist() == [5]  # EIO
        fake.fake_cuda_fail(b"cuLaunchKernel", 0, 1, 0)
        assert device.load([1]).statuses.tolist() == [RowStatus.COPY_FAILED]
        assert device.load([1]).ok, "the slot is as good as before"
        assert device.holds(1)
        fake.fake_cuda_break(BROKEN)
        for _ in range(3):
            assert device.load([2]).statuses.tolist() == [RowStatus.COPY_FAILED]
            assert device.store([5]).statuses.tolist() == [RowStatus.COPY_FAILED]
        assert device.engine.stats()["ring_used"] == 0


def closing_leaves_a_hanging_device_behind() -> None:
    fake.fake_cuda_reset(8, 0)
    with opened("cuda:0") as device:
        device.fill(1)
        assert device.store([1]).ok
        fake.fake_cuda_freeze(1)
        stuck = device.engine.submit_load(keys([1]), [1], [SLOTS + 1])
        time.sleep(0.2)
        assert device.engine.close(0.5) == 1  # the device hangs until told otherwise
        (result,) = device.engine.poll().finished
        assert result.transfer_id == stuck
        assert result.statuses.tolist() == [RowStatus.TIMED_OUT]
        fake.fake_cuda_freeze(0)
        until = time.monotonic() + 10
        while not nothing_left() and time.monotonic() < until:
            time.sleep(0.01)
        assert nothing_left(), "the thread gives everything back when the device goes on"


def a_waiting_engine_does_not_spin() -> None:
    """A slow device: the engine sleeps while a copy of some 100 ms is under way."""
    fake.fake_cuda_reset(9, 400_000)
    with opened("cuda:0") as device:
        device.fill(1)
        before, started = time.process_time(), time.monotonic()
        for item in range(8):
            assert device.store([item]).ok
        busy = time.process_time() - before
        assert busy < 0.2 * (time.monotonic() - started), busy


def main() -> None:
    global fake
    library, case = sys.argv[1:]
    # Its name is the driver's, so that whoever asks for the driver after this finds it.
    fake = ctypes.CDLL(library)
    fake.fake_cuda_live.restype = ctypes.c_int64
    fake.fake_cuda_calls.restype = ctypes.c_uint64
    function: Callable[[], None] = globals()[case]
    function()


if __name__ == "__main__":
    main()

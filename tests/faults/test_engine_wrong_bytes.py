"""A1, A2, A21, A27: short transfers, failing items and alignment never become wrong bytes."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
from pathlib import Path

import pytest
from disks import file_size_limit, tmpfs
from rig import ok, rig

from kvdisk.rank_file import RankFile
from kvdisk.transfer import RowStatus

KIB, MIB = 1 << 10, 1 << 20
BACKENDS = ["uring", "threads"]


@pytest.mark.root
@pytest.mark.parametrize("backend", BACKENDS)
def test_a1_disk_full_in_the_middle_of_a_block(tmp_path: Path, backend: str) -> None:
    with (
        tmpfs(tmp_path, size_mib=8) as mount,
        rig(mount / "kv", slots=8, slot_bytes=3 * MIB, backend=backend, direct=False) as disk,
    ):
        # One after the other: at once, four writes could each get a part and none the whole.
        statuses = [disk.store([item])[0] for item in range(4)]
        assert statuses == [*ok(2), RowStatus.FAILED, RowStatus.FAILED]
        errors = [result.errors[0] for result in disk.results.values()]
        assert errors == [0, 0, errno.ENOSPC, errno.ENOSPC]
        loaded = disk.load([0, 1, 2, 3])
        assert [s is RowStatus.OK for s in loaded] == [s is RowStatus.OK for s in statuses]
        assert disk.engine.stats()["store_ios_short"] > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_a1_write_across_the_file_size_limit(tmp_path: Path, backend: str) -> None:
    with rig(tmp_path / "kv", slots=4, slot_bytes=64 * KIB, backend=backend, direct=False) as disk:
        with file_size_limit(96 * KIB):
            statuses = disk.store([0, 1, 2])
        assert statuses == [RowStatus.OK, RowStatus.FAILED, RowStatus.FAILED]
        assert set(disk.results[1].errors) == {0, errno.EFBIG}
        assert disk.load([0, 1, 2]) == [RowStatus.OK, RowStatus.MISS, RowStatus.MISS]
        assert disk.store([1, 2], generation=1) == ok(2)
        assert disk.load([1, 2], generation=1) == ok(2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cut_bytes", [1, 512, 4096, 40 * KIB])
def test_a1_file_cut_in_the_middle_of_a_stored_block(
    tmp_path: Path, backend: str, cut_bytes: int
) -> None:
    with rig(tmp_path / "kv", slots=4, slot_bytes=64 * KIB, backend=backend) as disk:
        assert disk.store([0, 1, 2, 3]) == ok(4)
        os.truncate(disk.path, 3 * 64 * KIB + cut_bytes)
        statuses = disk.load([0, 1, 2, 3])
        assert statuses[:3] == ok(3)
        assert statuses[3] in (RowStatus.FAILED, RowStatus.CORRUPT)


def test_a1_merged_blocks_fail_one_by_one(tmp_path: Path) -> None:
    """Eight neighbours in one I/O, the file cut behind the fifth: five are good."""
    with rig(tmp_path / "kv", slots=8, slot_bytes=16 * KIB, rows_per_buffer=8) as disk:
        assert disk.store(range(8)) == ok(8)
        os.truncate(disk.path, 5 * 16 * KIB)
        statuses = disk.load(range(8))
        assert statuses == ok(5) + [RowStatus.FAILED] * 3
        assert disk.engine.stats()["ios_split"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_a2_failing_item_and_the_batch_behind_it(tmp_path: Path, backend: str) -> None:
    """Item 3 of each batch lies beyond the end of the file; the next batch follows at once."""
    chooser = random.Random(2)
    with rig(
        tmp_path / "kv", slots=64, slot_bytes=16 * KIB, backend=backend, buffers=9, load_reserve=1
    ) as disk:
        assert disk.store(range(64)) == ok(64)
        os.truncate(disk.path, 63 * 16 * KIB)
        for _ in range(300):
            chosen = chooser.sample(range(63), 15)
            first = [*chosen[:3], 63, *chosen[3:7]]
            second = chosen[7 : 7 + chooser.randrange(1, 8)]
            ids = disk.submit_load(first), disk.submit_load(second)
            statuses = disk.finish(ids[0])
            assert statuses == [*ok(3), RowStatus.FAILED, *ok(4)]
            disk.check(first, statuses)
            assert disk.finish(ids[1]) == ok(len(second))
            disk.check(second, ok(len(second)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a21_failing_writes_give_every_buffer_back(tmp_path: Path, backend: str) -> None:
    with rig(
        tmp_path / "kv",
        slots=8,
        slot_bytes=64 * KIB,
        backend=backend,
        buffers=4,
        load_reserve=1,
        direct=False,
    ) as disk:
        with file_size_limit(4 * KIB):
            for round_ in range(100):
                statuses = disk.store([round_ % 7 + 1])
                assert statuses == [RowStatus.FAILED]
                assert disk.engine.stats()["ring_free"] == 4
        for round_ in range(100):
            assert disk.store([round_ % 8], generation=round_) == ok(1)
            assert disk.load([round_ % 8], generation=round_) == ok(1)
        stats = disk.engine.stats()
        assert (stats["rows_failed"], stats["rows_stored"], stats["rows_loaded"]) == (100, 100, 100)


def _round_trip_misaligned(path: Path, misalign_bytes: int, direct: bool) -> None:
    with rig(
        path, slots=16, slot_bytes=64 * KIB, misalign_bytes=misalign_bytes, direct=direct
    ) as disk:
        assert disk.store(range(16)) == ok(16)
        assert disk.load(range(16)) == ok(16)


@pytest.mark.parametrize("misalign_bytes", [0, 64, 512])
def test_a27_blocks_of_any_alignment(tmp_path: Path, misalign_bytes: int) -> None:
    _round_trip_misaligned(tmp_path / "kv", misalign_bytes, direct=True)


@pytest.mark.root
@pytest.mark.parametrize("misalign_bytes", [0, 64, 512])
def test_a27_blocks_of_any_alignment_on_tmpfs(tmp_path: Path, misalign_bytes: int) -> None:
    with tmpfs(tmp_path, size_mib=16) as mount:
        _round_trip_misaligned(mount / "kv", misalign_bytes, direct=True)


def _cached_pages(descriptor: int, size_bytes: int) -> int:
    """Pages of a file in the page cache, by mincore(2)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with mmap.mmap(descriptor, size_bytes) as mapped:
        view = (ctypes.c_char * size_bytes).from_buffer(mapped)
        present = (ctypes.c_ubyte * (size_bytes // mmap.PAGESIZE))()
        answer = libc.mincore(ctypes.byref(view), ctypes.c_size_t(size_bytes), present)
        del view
        assert answer == 0, os.strerror(ctypes.get_errno())
        return sum(page & 1 for page in present)


def test_a27_direct_mode_leaves_the_page_cache_alone(tmp_path: Path) -> None:
    with RankFile.create_or_open(tmp_path / "kv", 0, 1, 64, MIB, bytes(32)) as files:
        if not files.direct:
            pytest.skip(f"this file system has no O_DIRECT: {files.reason}")
        assert files.reason
    with rig(tmp_path / "kv.data", slots=64, slot_bytes=MIB) as disk:
        assert disk.store(range(64)) == ok(64)
        assert disk.load(range(64)) == ok(64)
        size_bytes = 64 * MIB
        with open(disk.path, "r+b") as file:
            assert _cached_pages(file.fileno(), size_bytes) <= 16


def test_a11_stored_key_is_compared_in_full(tmp_path: Path) -> None:
    """Keys that share their first bytes, or differ in length alone, are different keys."""
    with rig(tmp_path / "kv", slots=2, slot_bytes=16 * KIB) as disk:
        assert disk.finish(disk.engine.submit_store([b"12345678-a"], [0], [0])) == ok(1)
        for other in (b"12345678-b", b"12345678", b"12345678-a\0"):
            loading = disk.engine.submit_load([other], [0], [2])
            assert disk.finish(loading) == [RowStatus.MISS]

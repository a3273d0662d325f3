"""Opening a rank's files: what is kept, what is set aside, and the space for real.

Real files throughout. Includes A15, A16, A20, A27 and A28; test_rank_file_safety.py has the rest.
"""

from __future__ import annotations

import errno
import fcntl
import inspect
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_files import (
    FINGERPRINT,
    NAMES,
    SLOT,
    answer_of,
    as_root,
    fill_records,
    names_in,
    open_rank,
    other_process,
    record_of,
    records_in,
)

from kvdisk import direct_mode, rank_file, rank_pages, reserve
from kvdisk.errors import BusyError, ConfigError, DeviceError
from kvdisk.probe.direct import DirectoryAnswers
from kvdisk.rank_header import RankHeader, parse_header, record_file_bytes, slots_within

HEADER = RankHeader(7, SLOT, 40, 0, 1, FINGERPRINT)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "root" / "namespace"


# A new file, and one that is opened again -------------------------------------------------------


def test_a_new_file_has_its_space_and_its_header(directory: Path) -> None:
    with open_rank(directory) as opened:
        data, record = (directory / name for name in NAMES)
        assert opened.record_offset == 4096
        assert data.stat().st_size == 40 * SLOT
        assert record.stat().st_size == record_file_bytes(40) == 3 * 4096
        assert data.stat().st_blocks * 512 >= 40 * SLOT
        assert opened.reserved_bytes == data.stat().st_size + record.stat().st_size
        header = parse_header(record.read_bytes()[:4096])
        assert header == RankHeader(opened.epoch, SLOT, 40, 0, 1, FINGERPRINT)
        assert not any(records_in(directory)[0])
        assert opened.notes == ()
    assert opened.closed
    opened.close()


def test_an_opened_file_keeps_epoch_and_records(directory: Path) -> None:
    with open_rank(directory) as first:
        epoch = first.epoch
    fill_records(directory, 40)
    with open_rank(directory) as second:
        assert second.epoch == epoch
        assert second.notes == ()
    assert records_in(directory)[:40] == [record_of(slot) for slot in range(40)]


def test_a_bumped_epoch_is_on_disk(directory: Path) -> None:
    with open_rank(directory) as opened:
        before = opened.epoch
        assert opened.bump_epoch(1) == opened.epoch == before + 1
        header = parse_header((directory / NAMES[1]).read_bytes()[:4096])
        assert isinstance(header, RankHeader)
        assert header.epoch == before + 1
    with open_rank(directory) as again:
        assert again.epoch == before + 1


def test_a_failed_bump_leaves_the_epoch(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: int) -> None:
        raise OSError(errno.EIO, "fsync")

    with open_rank(directory) as opened:
        before = opened.epoch
        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(DeviceError, match="write header") as caught:
            opened.bump_epoch(1)
        assert (caught.value.errno, opened.epoch) == (errno.EIO, before)


def test_growing_keeps_all_records_and_adds_empty_ones(directory: Path) -> None:
    open_rank(directory).close()
    fill_records(directory, 40)
    with open_rank(directory, slot_count=100) as opened:
        assert opened.slot_count == 100
    assert (directory / NAMES[0]).stat().st_size == 100 * SLOT
    assert records_in(directory) == [record_of(s) for s in range(40)] + [bytes(128)] * 88


def test_shrinking_keeps_the_survivors_and_forgets_the_rest_for_good(directory: Path) -> None:
    open_rank(directory).close()
    fill_records(directory, 40)
    with open_rank(directory, slot_count=5) as opened:
        assert opened.reserved_bytes == 5 * SLOT + 8192
    assert (directory / NAMES[0]).stat().st_size == 5 * SLOT
    assert records_in(directory) == [record_of(s) for s in range(5)] + [bytes(128)] * 27
    open_rank(directory, slot_count=40).close()
    assert records_in(directory)[5:] == [bytes(128)] * 59


def test_unlink_and_persist(directory: Path) -> None:
    with open_rank(directory) as opened:
        opened.unlink()
        assert names_in(directory) == []
    open_rank(directory).close()
    fill_records(directory, 40)
    with open_rank(directory, persist=False) as nameless:
        assert names_in(directory) == []
        assert "persist=False" in nameless.notes[0]
        assert os.fstat(nameless.data_fd).st_size == 40 * SLOT
        assert os.fstat(nameless.record_fd).st_size == 3 * 4096
        with open(f"/proc/self/fd/{nameless.record_fd}", "rb") as records:
            assert not any(records.read()[4096:])
        nameless.bump_epoch(1)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rank": 1}, "ranks count from 0"),
        ({"rank": -1}, "ranks count from 0"),
        ({"slot_count": 0}, "raise capacity"),
        ({"slot_bytes": 512}, "multiple of 4096"),
        ({"slot_bytes": 0}, "multiple of 4096"),
        ({"fingerprint": b"short"}, "5 bytes, not 32"),
    ],
)
def test_senseless_arguments(directory: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        open_rank(directory, **changes)
    assert not directory.exists()


@given(st.integers(0, 2**44), st.integers(1, 4096).map(lambda pages: pages * 4096))
def test_slots_fill_a_capacity_and_never_exceed_it(capacity: int, slot_bytes: int) -> None:
    count = slots_within(capacity, slot_bytes)
    assert count == 0 or count * slot_bytes + record_file_bytes(count) <= capacity
    assert (count + 1) * slot_bytes + record_file_bytes(count + 1) > capacity


# Damage (A15) -----------------------------------------------------------------------------------


def test_a_header_cut_at_any_byte_or_with_any_byte_changed_is_none() -> None:
    page = HEADER.pack()
    assert parse_header(page) == HEADER
    for length in range(4096):
        assert isinstance(parse_header(page[:length]), str)
    for position in range(4096):
        damaged = bytearray(page)
        damaged[position] ^= 0x01
        assert isinstance(parse_header(bytes(damaged)), str)


def _newer_version(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[8] = 99
    path.write_bytes(content)


def _random(path: Path) -> None:
    path.write_bytes(os.urandom(20000))


def _other_rank(path: Path) -> None:
    path.write_bytes(RankHeader(7, SLOT, 40, 1, 2, FINGERPRINT).pack())


@pytest.mark.parametrize(
    "damage",
    [
        *[lambda path, n=n: os.truncate(path, n) for n in (1, 7, 8, 87, 88, 96, 512, 4095)],
        _newer_version,
        _random,
        _other_rank,
    ],
)
def test_a_damaged_record_file_is_set_aside_and_the_start_is_cold(
    directory: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with open_rank(directory) as opened:
        epoch = opened.epoch
    fill_records(directory, 40)
    damage(directory / NAMES[1])
    content = (directory / NAMES[1]).read_bytes()
    with open_rank(directory) as opened:
        assert opened.epoch > epoch
        assert any("set aside as rank-0-of-1.idx.damaged-1" in note for note in opened.notes)
    assert (directory / f"{NAMES[1]}.damaged-1").read_bytes() == content
    assert "set aside" in caplog.text
    assert records_in(directory) == [bytes(128)] * 64
    caplog.clear()
    with open_rank(directory) as again:
        assert again.notes == ()
    assert caplog.text == ""


def test_an_empty_record_file_is_as_good_as_none(directory: Path) -> None:
    open_rank(directory).close()
    os.truncate(directory / NAMES[1], 0)
    with open_rank(directory) as opened:
        assert opened.slot_count == 40
    assert names_in(directory) == sorted(NAMES)


def test_damaged_files_are_numbered(directory: Path) -> None:
    for _ in range(3):
        open_rank(directory).close()
        _random(directory / NAMES[1])
    open_rank(directory).close()
    damaged = [name for name in names_in(directory) if "damaged" in name]
    assert damaged == [f"{NAMES[1]}.damaged-{number}" for number in (1, 2, 3)]


@pytest.mark.parametrize("length", [4096, 4097, 4096 + 127, 4096 + 128, 8191])
def test_a_record_file_cut_among_its_records_keeps_the_rest(directory: Path, length: int) -> None:
    open_rank(directory).close()
    fill_records(directory, 40)
    os.truncate(directory / NAMES[1], length)
    with open_rank(directory, slot_count=30) as opened:
        assert opened.notes == ()
    kept = min(30, (length - 4096) // 128)
    assert records_in(directory)[:kept] == [record_of(slot) for slot in range(kept)]
    assert (directory / NAMES[1]).stat().st_size == record_file_bytes(30)


def test_a_foreign_data_file_is_set_aside_whole(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / NAMES[0]).write_bytes(b"somebody's")
    with open_rank(directory) as opened:
        assert "not our mark" in opened.notes[0]
    assert (directory / f"{NAMES[0]}.damaged-1").read_bytes() == b"somebody's"


def test_a_lost_data_file_voids_the_records(directory: Path) -> None:
    with open_rank(directory) as opened:
        epoch = opened.epoch
    (directory / NAMES[0]).unlink()
    with open_rank(directory) as opened:
        assert opened.epoch == epoch + 1
    with open_rank(directory) as again:
        assert again.epoch == epoch + 1


def test_another_slot_size_starts_over_in_the_same_space(directory: Path) -> None:
    open_rank(directory).close()
    fill_records(directory, 40)
    with open_rank(directory, slot_bytes=4096) as opened:
        assert "its slots have 8192 bytes, now 4096" in opened.notes[0]
    assert names_in(directory) == sorted(NAMES)
    assert records_in(directory) == [bytes(128)] * 64


@pytest.mark.parametrize("change", [{"slot_bytes": 4096}, {"persist": False}])
def test_dropped_blocks_leave_the_number_of_clears(directory: Path, change: dict[str, Any]) -> None:
    with open_rank(directory) as opened:
        opened.bump_epoch(3)
    with open_rank(directory, **change) as opened:  # or a path that was away knew of more clears
        assert opened.header.clears == 3


@pytest.mark.parametrize("change", [{"slot_count": 9}, {"slot_count": 99}, {"slot_bytes": 4096}])
def test_what_cannot_be_undone_waits_for_finish(directory: Path, change: dict[str, Any]) -> None:
    open_rank(directory).close()
    fill_records(directory, 40)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with open_rank(directory, **change, finish=False) as opened:
        opened.undo()
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    with open_rank(directory, **change, finish=False) as opened:
        opened.finish()
        header = opened.header
    after = {path: path.read_bytes() for path in directory.iterdir()}
    assert parse_header(after[directory / NAMES[1]][:4096]) == header
    assert len(after[directory / NAMES[0]]) == header.slot_count * header.slot_bytes
    with open_rank(directory, **change) as again:
        assert again.header == header
    assert {path: path.read_bytes() for path in directory.iterdir()} == after


@pytest.mark.parametrize("change", [{"slot_count": 9}, {"slot_count": 99}, {"slot_bytes": 4096}])
def test_a_disk_that_fails_in_the_last_step_leaves_files_that_open(
    directory: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    open_rank(directory).close()
    fill_records(directory, 40)

    def fail(*_: object) -> None:
        raise DeviceError("write header", errno=errno.EIO)

    with open_rank(directory, **change, finish=False) as opened, monkeypatch.context() as patch:
        patch.setattr(rank_file, "write_header", fail)
        with pytest.raises(DeviceError):
            opened.finish()
        opened.undo()
    with open_rank(directory) as again:
        assert not any("set aside" in note for note in again.notes)
    kept = {9: 9}.get(change.get("slot_count", 0), 40)
    assert records_in(directory)[:40] == [
        record_of(slot) if slot < kept else bytes(128) for slot in range(40)
    ]


def test_an_unreadable_header_is_set_aside(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_rank(directory).close()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "preadv")

    monkeypatch.setattr(rank_file, "read_page", fail)
    with open_rank(directory) as opened:
        assert "cannot be read" in opened.notes[0]


LOST_ON_DISK = ("EIO", "ENODATA", "EREMOTEIO", "EILSEQ", "EBADMSG", "EUCLEAN")


@pytest.mark.parametrize("name", LOST_ON_DISK)
def test_a_bad_sector_among_the_records_does_not_keep_a_cache_from_shrinking(
    directory: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    open_rank(directory).close()
    fill_records(directory, 40)
    real = rank_pages.read_page

    def fail(file: int, offset: int) -> bytes:
        if offset:
            raise OSError(getattr(errno, name), "a bad sector")
        return real(file, offset)

    monkeypatch.setattr(rank_pages, "read_page", fail)
    with open_rank(directory, slot_count=9) as opened:
        assert opened.slot_count == 9
    assert records_in(directory) == [bytes(128)] * 32


@pytest.mark.parametrize("number", [errno.ENOMEM, errno.EINTR])
def test_a_header_that_the_machine_cannot_read_just_now_is_not_damaged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    open_rank(directory).close()

    def fail(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(rank_file, "read_page", fail)
        with pytest.raises(DeviceError):
            open_rank(directory)
    assert names_in(directory) == sorted(NAMES)


@pytest.mark.parametrize("change", [{"slot_bytes": 4096}, {"persist": False}])
def test_a_kill_while_blocks_are_dropped_leaves_a_data_file_that_is_ours(
    directory: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any]
) -> None:
    """On a file system without attributes only the record file says so."""
    monkeypatch.setattr(os, "getxattr", refuse_attributes)
    monkeypatch.setattr(os, "setxattr", refuse_attributes)
    open_rank(directory).close()
    for name in ("ftruncate", "pwritev"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, dying_after(getattr(os, name)))
            with pytest.raises(Killed), open_rank(directory, **change, finish=False) as opened:
                opened.finish()
        with open_rank(directory) as again:
            assert not any("set aside" in note for note in again.notes)


class Killed(BaseException):
    pass


def dying_after(real: Callable[..., Any]) -> Callable[..., Any]:
    """The process is gone once ``finish`` has made the call."""

    def call(*args: Any) -> Any:
        answer = real(*args)
        if "finish" in {frame.function for frame in inspect.stack()}:
            raise Killed
        return answer

    return call


def refuse_attributes(*_: object) -> bytes:
    raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))


# Space (A16, A20, A28) --------------------------------------------------------------------------


@contextmanager
def small_tmpfs(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


@as_root
@pytest.mark.root
def test_missing_space_is_said_in_numbers_and_nothing_is_left(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "mount", "8m") as mount:
        mount.chmod(0o700)
        directory = mount / "namespace"
        with pytest.raises(DeviceError) as caught:
            open_rank(directory, slot_count=64 * 1024**2 // SLOT)
        assert caught.value.errno == errno.ENOSPC
        for part in ("64.00 MiB more needed", " MiB free", "lower capacity"):
            assert part in str(caught.value)
        assert names_in(mount) == []

        with open_rank(directory, slot_count=512) as opened:  # 4 MiB
            assert opened.file_system == "tmpfs"
        fill_records(directory, 40)
        with pytest.raises(DeviceError, match="more needed"):
            open_rank(directory, slot_count=2048)
        assert (directory / NAMES[0]).stat().st_size == 512 * SLOT
        assert records_in(directory)[:40] == [record_of(slot) for slot in range(40)]

        free = os.statvfs(mount)
        (mount / "another tenant").write_bytes(bytes(free.f_bfree * free.f_frsize))
        with open_rank(directory, slot_count=512) as opened:  # its space is its own
            assert "full" in opened.reason
            opened.bump_epoch(1)
        with open_rank(directory, slot_count=100) as opened:
            assert opened.reserved_bytes == 100 * SLOT + record_file_bytes(100)


@as_root
@pytest.mark.root
def test_a_restart_after_a_kill_needs_no_second_space(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "mount", "640k") as mount:
        mount.chmod(0o700)
        for _ in range(5):
            with other_process(mount / "namespace") as child:  # 332 KiB
                assert answer_of(child)[0] == "open"
        assert names_in(mount / "namespace") == sorted(NAMES)


def test_blocks_that_a_killed_growth_left_behind_the_end_go(directory: Path) -> None:
    open_rank(directory).close()
    before = (directory / NAMES[0]).stat()
    keep_size = ["fallocate", "--keep-size", "--length", str(10 * before.st_size)]
    subprocess.run([*keep_size, str(directory / NAMES[0])], check=True)
    assert (directory / NAMES[0]).stat().st_blocks > 5 * before.st_blocks
    open_rank(directory).close()
    assert (directory / NAMES[0]).stat().st_blocks == before.st_blocks


def test_without_fallocate_zeros_are_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, size_bytes: int, start: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    monkeypatch.setattr(reserve, "allocate", refuse)
    with open_rank(directory) as opened:
        assert any("writing zeros" in note for note in opened.notes)
    data = directory / NAMES[0]
    assert data.stat().st_size == 40 * SLOT
    assert data.stat().st_blocks * 512 >= 40 * SLOT
    data.write_bytes(b"x" * 40 * SLOT)
    with open_rank(directory, slot_count=50):
        assert data.read_bytes() == b"x" * 40 * SLOT + bytes(10 * SLOT)
    with pytest.raises(DeviceError, match="ext4 or xfs"):
        open_rank(directory, slot_count=60, direct="require")
    assert data.stat().st_size == 50 * SLOT


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EDQUOT, "raise the quota of user"),
        (errno.EFBIG, "ulimit -f"),
        # There is room, says the file system: then something else says no.
        (errno.ENOSPC, "a quota of this directory, or another limit"),
    ],
)
def test_a_refused_reservation_says_what_to_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def refuse(file: int, size_bytes: int, start: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(reserve, "allocate", refuse)
    with pytest.raises(DeviceError, match=says) as caught:
        open_rank(directory)
    assert caught.value.errno == number
    assert not directory.exists()


def test_what_is_kept_back_for_the_system_is_nobody_s_room(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root does not get it everywhere, and a cache in it leaves the machine nothing to live on."""
    words = list(os.statvfs("/"))
    page_bytes = 4096
    words[1:5] = [page_bytes, 1 << 20, 1 << 19, 10]  # f_frsize, f_blocks, f_bfree, f_bavail
    monkeypatch.setattr(os, "fstatvfs", lambda _: os.statvfs_result(words))
    with pytest.raises(DeviceError, match=r"40\.00 KiB free \(another 2\.00 GiB kept back"):
        open_rank(directory)
    assert not directory.parent.exists()


# What a failed opening leaves -------------------------------------------------------------------


def test_a_failed_opening_leaves_no_directory(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reserve, "allocate", full)
    with pytest.raises(DeviceError):
        open_rank(directory)
    assert not directory.parent.exists()
    directory.parent.mkdir()
    with pytest.raises(DeviceError):
        open_rank(directory)
    assert names_in(directory.parent) == []


def test_a_failed_opening_leaves_what_was_there_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_rank(directory).close()
    (directory / NAMES[1]).write_bytes(b"damaged" * 1000)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(reserve, "allocate", full)
        with pytest.raises(DeviceError):
            open_rank(directory)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before
    with open_rank(directory) as opened:
        assert "set aside" in opened.notes[0]


def test_an_opening_that_fails_later_is_undone_beside_another_rank(directory: Path) -> None:
    with open_rank(directory, rank=0, world_size=2) as other:
        with open_rank(directory, rank=1, world_size=2) as opened:
            opened.undo()
        assert names_in(directory) == sorted([other.data_path.name, other.record_path.name])
    with open_rank(directory, rank=0, world_size=2) as again:
        again.undo()  # made nothing
        assert len(names_in(directory)) == 2


def full(file: int, size_bytes: int, start: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


# O_DIRECT (A27) ---------------------------------------------------------------------------------


def is_direct(file: int) -> bool:
    return bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)


def test_the_mode_is_what_the_descriptors_say(directory: Path) -> None:
    with open_rank(directory, direct="off") as opened:
        assert not opened.direct
        assert "direct=off" in opened.reason
        assert not is_direct(opened.data_fd)
    with open_rank(directory) as opened:
        assert is_direct(opened.data_fd) is is_direct(opened.record_fd) is opened.direct
        assert opened.alignment in (512, 1024, 2048, 4096)
        assert opened.reason
        assert opened.file_system


@pytest.mark.parametrize(
    ("answers", "step"),
    [
        (DirectoryAnswers(0, open_direct_errno=errno.EINVAL), "open refused"),
        (DirectoryAnswers(0, 0, errno.EINVAL), "the first write refused"),
    ],
)
def test_a_refusal_is_buffered_mode_or_an_error_where_required(
    directory: Path, monkeypatch: pytest.MonkeyPatch, answers: DirectoryAnswers, step: str
) -> None:
    monkeypatch.setattr(direct_mode, "probe_directory", lambda _: answers)
    with open_rank(directory) as opened:
        assert not opened.direct
        assert not is_direct(opened.data_fd)
        assert f"{step} O_DIRECT (EINVAL)" in opened.reason
    with pytest.raises(DeviceError, match="direct=require") as caught:
        open_rank(directory, direct="require")
    assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize(
    "answers",
    [
        DirectoryAnswers(errno.EROFS),
        DirectoryAnswers(0, 0, errno.EIO),
        DirectoryAnswers(0, 0, 0, 512, same_bytes=False),
    ],
)
def test_a_directory_that_cannot_be_written_is_an_error_at_open(
    directory: Path, monkeypatch: pytest.MonkeyPatch, answers: DirectoryAnswers
) -> None:
    monkeypatch.setattr(direct_mode, "probe_directory", lambda _: answers)
    with pytest.raises(DeviceError):
        open_rank(directory)
    assert not directory.parent.exists()


@pytest.mark.parametrize("new", [True, False])
def test_our_own_file_has_the_last_word_on_direct(
    directory: Path, monkeypatch: pytest.MonkeyPatch, new: bool
) -> None:
    if not new:
        open_rank(directory).close()
    full = DirectoryAnswers(0, 0, errno.ENOSPC)
    monkeypatch.setattr(direct_mode, "probe_directory", lambda _: full)
    for name, real in (("preadv", os.preadv), ("pwritev", os.pwritev)):

        def refuse_direct(file: int, buffers: Any, offset: int, real: Any = real) -> int:
            if is_direct(file):
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return int(real(file, buffers, offset))

        monkeypatch.setattr(os, name, refuse_direct)
    with open_rank(directory) as opened:
        assert not opened.direct
        assert not is_direct(opened.data_fd)
        assert "the record file refused a direct" in opened.reason
        assert opened.notes == ()
    with pytest.raises(DeviceError, match="direct=require"):
        open_rank(directory, direct="require")


def test_no_descriptor_leaks(directory: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    open_rank(directory).close()
    before = count()
    open_rank(directory).close()
    _random(directory / NAMES[1])
    open_rank(directory, persist=False).close()
    with pytest.raises(DeviceError):
        open_rank(directory, slot_count=1 << 40)
    with open_rank(directory), pytest.raises(BusyError):
        open_rank(directory)
    assert count() == before

"""Opening a rank's files: nobody else's, nobody else at the same time, with the space for real.

Real files throughout. Includes A9, A15 to A17, A20, A27, A28 and A34.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk import direct_mode, rank_file, reserve
from kvdisk.errors import BusyError, ConfigError, DeviceError
from kvdisk.private_files import lock_holder
from kvdisk.probe.direct import DirectoryAnswers
from kvdisk.rank_file import RankFile
from kvdisk.rank_header import RankHeader, parse_header, record_file_bytes, slots_within

SLOT = 8192
FINGERPRINT = bytes(range(32))
NAMES = ("rank-0-of-1.kv", "rank-0-of-1.idx")
HEADER = RankHeader(7, SLOT, 40, 0, 1, FINGERPRINT)

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "root" / "namespace"


def open_rank(directory: Path, **changes: Any) -> RankFile:
    options: dict[str, Any] = {
        "rank": 0,
        "world_size": 1,
        "slot_count": 40,
        "slot_bytes": SLOT,
        "fingerprint": FINGERPRINT,
        **changes,
    }
    return RankFile.create_or_open(directory, **options)


def record_of(slot: int) -> bytes:
    return bytes([slot + 1]) * 128


def fill_records(directory: Path, slot_count: int) -> None:
    """What an engine would have written: a recognisable record for each slot."""
    with (directory / NAMES[1]).open("r+b") as file:
        file.seek(4096)
        file.write(b"".join(map(record_of, range(slot_count))))


def records_in(directory: Path) -> list[bytes]:
    content = (directory / NAMES[1]).read_bytes()[4096:]
    return [content[at : at + 128] for at in range(0, len(content), 128)]


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


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
        assert opened.bump_epoch() == opened.epoch == before + 1
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
            opened.bump_epoch()
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
        nameless.bump_epoch()


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


# Modes, and what others may have planted (A34) --------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_only_the_owner_may_read_under_any_umask(directory: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        open_rank(directory).close()
    finally:
        os.umask(before)
    assert mode_of(directory) == mode_of(directory.parent) == 0o700
    assert [mode_of(directory / name) for name in NAMES] == [0o600, 0o600]


def test_loose_modes_of_our_own_are_tightened(directory: Path) -> None:
    open_rank(directory).close()
    directory.chmod(0o777)
    for name in NAMES:
        (directory / name).chmod(0o000 if name == NAMES[1] else 0o666)
    open_rank(directory).close()
    assert mode_of(directory) == 0o700
    assert [mode_of(directory / name) for name in NAMES] == [0o600, 0o600]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["symlink", "dangling", "hard link", "fifo", "directory"])
def test_planted_files_are_refused_untouched(directory: Path, name: str, kind: str) -> None:
    directory.mkdir(parents=True)
    precious = directory.parent / "precious"
    precious.write_bytes(b"untouched")
    precious.chmod(0o644)
    planted = directory / name
    if kind == "symlink":
        planted.symlink_to(precious)
    elif kind == "dangling":
        planted.symlink_to(directory.parent / "to-be-made")
    elif kind == "hard link":
        planted.hardlink_to(precious)
    elif kind == "fifo":
        os.mkfifo(planted)
    else:
        planted.mkdir()
    with pytest.raises(ConfigError, match=r"a symbolic link|2 hard links|a FIFO|a directory"):
        open_rank(directory)
    assert precious.read_bytes() == b"untouched"
    assert mode_of(precious) == 0o644
    assert names_in(directory.parent) == ["namespace", "precious"]
    assert names_in(directory) == [name]


def test_a_planted_socket_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.mkdir(parents=True)
    monkeypatch.chdir(directory)  # the name of a socket must be short
    with socket.socket(socket.AF_UNIX) as planted:
        planted.bind(NAMES[0])
    with pytest.raises(ConfigError, match="is a socket"):
        open_rank(directory)


def test_a_namespace_that_is_a_link_or_a_file_is_refused(directory: Path) -> None:
    directory.parent.mkdir()
    directory.symlink_to(directory.parent)
    with pytest.raises(ConfigError, match="a symbolic link, not a directory"):
        open_rank(directory)
    directory.unlink()
    directory.write_text("")
    with pytest.raises(ConfigError, match="a file, not a directory"):
        open_rank(directory)
    with pytest.raises(ConfigError, match="not a directory"):
        open_rank(directory / "below-a-file")


def test_a_world_writable_root_needs_the_sticky_bit(directory: Path) -> None:
    directory.parent.mkdir()
    directory.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="writable for everyone"):
        open_rank(directory)
    directory.parent.chmod(0o1777)
    open_rank(directory).close()


def test_a_root_is_made_but_nothing_above_it(directory: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: make it, or mount the disk"):
        open_rank(directory / "not-mounted" / "root" / "namespace")
    assert not directory.parent.exists()


@as_root
@pytest.mark.root
@pytest.mark.parametrize("foreign", ["root", "namespace", "file", "link"])
def test_what_belongs_to_another_user_is_refused(directory: Path, foreign: str) -> None:
    open_rank(directory).close()
    where = directory
    if foreign == "link":
        where = directory.parent.with_name("link") / directory.name
        where.parent.symlink_to(directory.parent)
        os.lchown(where.parent, 65534, 65534)
    else:
        targets = {"root": directory.parent, "namespace": directory, "file": directory / NAMES[0]}
        os.chown(targets[foreign], 65534, 65534)
    with pytest.raises(ConfigError, match="65534"):
        open_rank(where)


# One user at a time (A9, A17) -------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from kvdisk.errors import BusyError
from kvdisk.rank_file import RankFile
rank, world = int(sys.argv[2]), int(sys.argv[3])
try:
    opened = RankFile.create_or_open(Path(sys.argv[1]), rank, world, 40, 8192, bytes(range(32)))
except BusyError as error:
    print("busy", error.holder, flush=True)
else:
    print("open", opened.data_path.name, flush=True)
    sys.stdin.read()
"""


@contextmanager
def other_process(
    directory: Path, rank: int = 0, world: int = 1
) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), str(rank), str(world)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(rank_file.__file__).parents[1])},
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def answer_of(child: subprocess.Popen[str]) -> list[str]:
    assert child.stdout is not None
    assert select.select([child.stdout], [], [], 60)[0], "no answer from the other process"
    return child.stdout.readline().split()


def test_a_second_opener_is_told_who_holds_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = directory.parent.with_name("link")
    link.symlink_to(directory.parent)
    with open_rank(directory):
        fill_records(directory, 40)
        before = (directory / NAMES[1]).read_bytes()
        monkeypatch.chdir(directory.parent)
        for path in (directory, link / directory.name, Path(directory.name)):
            with pytest.raises(BusyError, match=f"in use by process {os.getpid()}") as caught:
                open_rank(path, slot_count=2)
            assert caught.value.holder == os.getpid()
            assert NAMES[0] in str(caught.value)
        with other_process(directory) as child:
            assert answer_of(child) == ["busy", str(os.getpid())]
        assert (directory / NAMES[1]).read_bytes() == before
        assert (directory / NAMES[0]).stat().st_size == 40 * SLOT
    open_rank(directory).close()


def test_the_lock_ends_with_a_killed_holder(directory: Path) -> None:
    with other_process(directory) as child:
        assert answer_of(child) == ["open", NAMES[0]]
        with pytest.raises(BusyError) as caught:
            open_rank(directory)
        assert caught.value.holder == child.pid
        child.send_signal(signal.SIGKILL)
        child.wait()
        with open_rank(directory) as opened:
            assert opened.notes == ()
    assert names_in(directory) == sorted(NAMES)


def test_ranks_lie_side_by_side_and_a_clash_is_refused(directory: Path) -> None:
    with (
        other_process(directory, 0, 4) as a,
        other_process(directory, 1, 4) as b,
        other_process(directory, 2, 4) as c,
        other_process(directory, 3, 4) as d,
    ):
        names = sorted(answer_of(child)[1] for child in (a, b, c, d))
        assert names == [f"rank-{rank}-of-4.kv" for rank in range(4)]
    with other_process(directory) as a, other_process(directory) as b:
        answers = [answer_of(a), answer_of(b)]
        assert sorted(answer[0] for answer in answers) == ["busy", "open"]


def test_a_deleted_record_file_does_not_free_the_data_file(directory: Path) -> None:
    with open_rank(directory):
        (directory / NAMES[1]).unlink()
        with pytest.raises(BusyError):
            open_rank(directory)
        (directory / NAMES[0]).unlink()
        open_rank(directory).close()  # files of its own


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_refused(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(file: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(DeviceError, match="has no locks") as caught:
        open_rank(directory)
    assert (caught.value.errno, caught.value.op) == (number, "lock")


def test_a_holder_that_cannot_be_seen(tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    with (tmp_path / "file").open("w") as file:
        inode = os.fstat(file.fileno()).st_ino
        assert lock_holder(file.fileno(), tmp_path / "missing") is None
        locks.write_text(f"1: FLOCK ADVISORY WRITE 0 00:01:{inode} 0 EOF\nodd\n")
        assert lock_holder(file.fileno(), locks) is None
        locks.write_text(f"1: FLOCK ADVISORY WRITE 41 00:01:{inode} 0 EOF\n")
        assert lock_holder(file.fileno(), locks) == 41


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
    content[8] = 2
    path.write_bytes(content)


def _random(path: Path) -> None:
    path.write_bytes(os.urandom(20000))


def _other_rank(path: Path) -> None:
    path.write_bytes(RankHeader(7, SLOT, 40, 1, 2, FINGERPRINT).pack())


@pytest.mark.parametrize(
    "damage",
    [
        *[lambda path, n=n: os.truncate(path, n) for n in (1, 7, 8, 79, 80, 88, 512, 4095)],
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


def test_an_unreadable_header_is_set_aside(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_rank(directory).close()

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "preadv")

    monkeypatch.setattr(rank_file, "_read_page", fail)
    with open_rank(directory) as opened:
        assert "cannot be read" in opened.notes[0]


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
        assert names_in(directory) == []

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
            opened.bump_epoch()
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


def test_without_fallocate_zeros_are_written(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, size_bytes: int) -> None:
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
    [(errno.EDQUOT, "quota"), (errno.EFBIG, "ulimit -f"), (errno.ENOSPC, "free space")],
)
def test_a_refused_reservation_says_what_to_do(
    directory: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    def refuse(file: int, size_bytes: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(reserve, "allocate", refuse)
    with pytest.raises(DeviceError, match=says) as caught:
        open_rank(directory)
    assert caught.value.errno == number
    assert names_in(directory) == []


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
    assert names_in(directory) == []


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

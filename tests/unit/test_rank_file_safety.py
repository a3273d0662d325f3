"""Nobody else's files, and nobody else at the same time (A9, A17, A34). Real files throughout."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import socket
import threading
from pathlib import Path

import pytest
from rank_files import (
    NAMES,
    SLOT,
    answer_of,
    as_root,
    fill_records,
    mode_of,
    names_in,
    open_rank,
    other_process,
)

from kvdisk import private_files
from kvdisk.errors import BusyError, ConfigError, DeviceError
from kvdisk.private_files import lock_holder, put_back
from kvdisk.probe import run_checks


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "root" / "namespace"


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


def doctor_on(root: Path) -> str:
    """What the doctor says an open would say of a root, which is "" when it would open."""
    (check,) = [each for each in run_checks(root) if each.name == "directory"]
    if check.status == "ok":
        return ""
    assert check.status == "error"
    assert check.remedy is not None
    return check.found.partition(", since it ")[2] + ": " + check.remedy


def test_a_world_writable_root_needs_the_sticky_bit(directory: Path) -> None:
    directory.parent.mkdir()
    directory.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="writable for everyone") as caught:
        open_rank(directory)
    assert doctor_on(directory.parent) in str(caught.value)
    directory.parent.chmod(0o1777)
    open_rank(directory).close()
    assert doctor_on(directory.parent) == ""


def test_a_root_is_made_but_nothing_above_it(directory: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist: make it, or mount the disk"):
        open_rank(directory / "not-mounted" / "root" / "namespace")
    assert not directory.parent.exists()
    with pytest.raises(DeviceError, match="open directory /proc/namespace: No such file"):
        open_rank(Path("/proc/namespace"))


def test_a_root_that_another_open_takes_away_again_is_no_disk_that_is_not_mounted(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.mkdir

    def lose_root(name: str | Path, mode: int, *, dir_fd: int | None = None) -> None:
        if dir_fd is not None and directory.parent.exists():
            directory.parent.rmdir()  # as one does that made it and fails
        real(name, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "mkdir", lose_root)
    with pytest.raises(DeviceError) as caught:
        open_rank(directory)
    assert caught.value.errno == errno.ENOENT  # upon which a tier tries again


def test_what_was_set_aside_is_not_put_back_over_a_file_of_another_process(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.mkdir(parents=True)
    aside, name = directory / "a.damaged-1", directory / "a"
    aside.write_bytes(b"old")
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)

    def not_yet(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "the other process makes it an instant later")

    name.write_bytes(b"fresh")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "stat", not_yet)
            put_back(folder, aside.name, name.name)
        assert (name.read_bytes(), aside.read_bytes()) == (b"fresh", b"old")
        name.unlink()
        put_back(folder, aside.name, name.name)
    finally:
        os.close(folder)
    assert names_in(directory) == ["a"]
    assert (name.read_bytes(), name.stat().st_nlink) == (b"old", 1)


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
    with pytest.raises(ConfigError, match="65534") as caught:
        open_rank(where)
    if foreign in ("root", "link"):
        assert doctor_on(where.parent) in str(caught.value)


# One user at a time (A9, A17) -------------------------------------------------------------------


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
            with pytest.raises(BusyError, match="in use by this process itself") as caught:
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


def test_a_lock_that_outlives_its_holder_for_a_moment_is_waited_for(directory: Path) -> None:
    """As io_uring does it: requests of a killed process keep its files open until they are done."""
    release, hold = os.pipe()
    ready, say = os.pipe()
    holder = os.fork()
    if holder == 0:
        os.close(hold)
        open_rank(directory)
        if os.fork() == 0:  # what it leaves behind keeps the lock
            os.write(say, b"!")
            os.read(release, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.read(ready, 1) == b"!"
    os.waitpid(holder, 0)
    for descriptor in (release, ready, say):
        os.close(descriptor)
    threading.Timer(0.2, os.close, [hold]).start()
    open_rank(directory).close()


def test_a_holder_that_cannot_be_seen_is_not_waited_for_for_ever(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_files, "_GONE_HOLDER_PATIENCE_S", 0.05)
    monkeypatch.setattr(private_files, "lock_holder", lambda file: None)
    with open_rank(directory), pytest.raises(BusyError, match="cannot be seen") as caught:
        open_rank(directory)
    assert caught.value.holder is None


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
    assert not directory.parent.exists()


def test_a_file_that_another_process_locked_first_is_left_to_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(file: int, operation: int) -> None:
        raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK))

    monkeypatch.setattr(private_files, "_GONE_HOLDER_PATIENCE_S", 0)
    monkeypatch.setattr(fcntl, "flock", busy)
    with pytest.raises(BusyError):
        open_rank(directory)
    assert names_in(directory) == [NAMES[0]]  # although it was made here


@pytest.mark.parametrize("call", ["chmod", "fchmod"])
def test_a_file_system_without_modes_is_refused_and_left_as_it_was(
    directory: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(DeviceError, match="lsattr"):  # and not that the disk may be broken
        open_rank(directory)
    assert not directory.parent.exists()


def test_a_holder_that_cannot_be_seen(tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    with (tmp_path / "file").open("w") as file:
        inode = os.fstat(file.fileno()).st_ino
        assert lock_holder(file.fileno(), tmp_path / "missing") is None
        locks.write_text(f"1: FLOCK ADVISORY WRITE 0 00:01:{inode} 0 EOF\nodd\n")
        assert lock_holder(file.fileno(), locks) is None
        locks.write_text(f"1: FLOCK ADVISORY WRITE 41 00:01:{inode} 0 EOF\n")
        assert lock_holder(file.fileno(), locks) == 41

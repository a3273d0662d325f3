"""A disk whose every answer can be chosen while it is in use: a file system in user space.

A process of its own serves a directory through /dev/fuse (linux/fuse.h, version 7.31; no library)
and looks at ``Faults``, memory that it shares with the test, before each read, write and flush. So
one path of a tier can fail, hang, lie or be slow, in reads alone if need be, under the real kernel
and the real engine. Needs root and /dev/fuse.

    with fuse_disk(tmp_path) as disk:
        disk.faults.set(read_hangs=1)
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import random
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[2]
FUSE: Final = Path("/dev/fuse")
MNT_DETACH: Final = 2
PR_SET_PDEATHSIG: Final = 1

MAX_WRITE: Final = 1 << 20
THREADS: Final = 64
HANG_LOOK_S: Final = 0.005

IN_HEADER: Final = struct.Struct("<IIQQIIIHH")
OUT_HEADER: Final = struct.Struct("<IiQ")
ATTRIBUTES: Final = struct.Struct("<6Q10I")
ENTRY: Final = struct.Struct("<4Q2I")
INIT_IN: Final = struct.Struct("<4I")
INIT_OUT: Final = struct.Struct("<4I2H2I2H8I")
READ_IN: Final = struct.Struct("<QQIIQII")  # and write_in
SETATTR_IN: Final = struct.Struct("<II6Q8I")

# FATTR_* of setattr, and flags of init
SET_MODE, SET_SIZE = 1 << 0, 1 << 3
ASYNC_READ, ATOMIC_O_TRUNC, BIG_WRITES, PARALLEL_DIROPS = 1 << 0, 1 << 3, 1 << 5, 1 << 18
MAX_PAGES, ASYNC_DIO = 1 << 22, 1 << 15


needs_fuse: Final = pytest.mark.skipif(not FUSE.exists(), reason="needs /dev/fuse")


class Faults:
    """What happens to reads, writes and flushes from now on. All zero: nothing.

    ``*_errors`` are errnos, given to one request in ``error_every`` (0 or 1: all). ``*_hangs``: no
    answer until it is 0 again. ``flips``: one read in so many has a wrong bit; ``losses``: one
    write in so many is acknowledged and not made; ``shorts``: one read in so many is half.
    """

    FIELDS: Final = (
        "read_error",
        "write_error",
        "flush_error",
        "error_every",
        "read_hangs",
        "write_hangs",
        "flush_hangs",
        "flips",
        "losses",
        "shorts",
    )

    def __init__(self, path: Path) -> None:
        with open(path, "a+b") as file:
            file.truncate(mmap.PAGESIZE)
            self._memory = memoryview(mmap.mmap(file.fileno(), mmap.PAGESIZE)).cast("i")

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self._memory[self.FIELDS.index(name)] = value

    def clear(self) -> None:
        self.set(**dict.fromkeys(self.FIELDS, 0))

    def __getattr__(self, name: str) -> int:
        if name not in self.FIELDS:
            raise AttributeError(name)
        return self._memory[self.FIELDS.index(name)]


class FuseDisk:
    """``mount`` is where; ``faults`` what it does; ``stop`` and ``go_on`` for the whole of it."""

    def __init__(self, mount: Path, faults: Faults, server: subprocess.Popen[bytes]) -> None:
        self.mount = mount
        self.faults = faults
        self._server = server

    def stop(self) -> None:
        """Nothing is answered any more, not even the name of a file."""
        self._server.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._server.send_signal(signal.SIGCONT)

    def end(self) -> None:
        """Whatever still hangs ends with an error: the kernel drops the connection."""
        self._server.kill()
        self._server.wait()


@contextlib.contextmanager
def fuse_disk(directory: Path, name: str = "fuse") -> Iterator[FuseDisk]:
    """A mounted one that serves ``directory/name-files``; gone at the end, whatever hangs."""
    backing, mount = directory / f"{name}-files", directory / name
    backing.mkdir()
    mount.mkdir()
    faults = Faults(directory / f"{name}-faults")
    command = [sys.executable, "-m", "tests.faults.fuse_disk", backing, mount, f"{mount}-faults"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    disk = FuseDisk(mount, faults, server)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == b"mounted\n", "the disk did not start"
        yield disk
    finally:
        disk.end()
        subprocess.run(["umount", "--lazy", str(mount)], check=False, capture_output=True)


# --- the process that serves


class Refused(OSError):
    """An answer that says no, chosen by the test."""


class Server:
    """Nodes are paths below ``root``; their numbers are never used again."""

    def __init__(self, root: Path, device: int, faults: Faults) -> None:
        self.device = device
        self.faults = faults
        self.unlinked = f"{root}-unlinked"
        os.mkdir(self.unlinked)
        self.paths: dict[int, str] = {1: str(root)}
        self.nodes: dict[str, int] = {str(root): 1}
        self.lock = threading.Lock()
        self.random = random.Random(1)
        self.count = 0
        self.calls: dict[int, Callable[[int, bytes], bytes]] = {
            1: self.look_up,
            3: lambda node, _: self.attributes_out(self.paths[node]),
            4: self.set_attributes,
            9: self.make_directory,
            10: self.unlink,
            11: self.unlink,
            12: self.rename,
            14: self.open,
            15: self.read,
            16: self.write,
            17: self.statistics,
            18: self.release,
            20: self.flush,
            27: self.open,
            28: self.list_directory,
            29: self.release,
            30: lambda node, _: b"",
            35: self.create,
            43: self.allocate,
            45: self.rename2,
        }

    def serve(self) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            while True:
                try:
                    request = os.read(self.device, MAX_WRITE + mmap.PAGESIZE)
                except InterruptedError:
                    continue
                except OSError:  # unmounted
                    return
                pool.submit(self.answer, request)

    def answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = IN_HEADER.unpack_from(request)
        body = request[IN_HEADER.size :]
        if opcode in (2, 36, 42):  # forget, interrupt, batch forget: no answer is expected
            return
        error, out = 0, b""
        try:
            if opcode == 26:
                out = self.init(body)
            elif opcode in self.calls:
                out = self.calls[opcode](node, body)
            else:
                error = errno.ENOSYS
        except OSError as refusal:
            error = refusal.errno or errno.EIO
        except KeyError:
            error = errno.ESTALE
        with contextlib.suppress(OSError):  # the request may have been given up meanwhile
            os.write(self.device, OUT_HEADER.pack(OUT_HEADER.size + len(out), -error, unique) + out)

    # --- names

    def init(self, body: bytes) -> bytes:
        _, _, readahead, offered = INIT_IN.unpack_from(body)
        wanted = ASYNC_READ | ATOMIC_O_TRUNC | BIG_WRITES | PARALLEL_DIROPS | MAX_PAGES | ASYNC_DIO
        pages = MAX_WRITE // mmap.PAGESIZE
        flags = offered & wanted
        return INIT_OUT.pack(7, 31, readahead, flags, 64, 48, MAX_WRITE, 1, pages, 0, *[0] * 8)

    def node_of(self, path: str) -> int:
        with self.lock:
            node = self.nodes.setdefault(path, len(self.paths) + 1)
            self.paths[node] = path
            return node

    def child(self, node: int, name: bytes) -> str:
        return os.path.join(self.paths[node], os.fsdecode(name.split(b"\0")[0]))

    def attributes(self, path: str) -> bytes:
        found = os.lstat(path)
        seconds = [int(found.st_atime), int(found.st_mtime), int(found.st_ctime)]
        owner = [found.st_mode, found.st_nlink, found.st_uid, found.st_gid]
        numbers = [found.st_ino, found.st_size, found.st_blocks, *seconds, 0, 0, 0, *owner]
        return ATTRIBUTES.pack(*numbers, 0, mmap.PAGESIZE, 0)

    def attributes_out(self, path: str) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self.attributes(path)

    def entry(self, path: str) -> bytes:
        attributes = self.attributes(path)
        return ENTRY.pack(self.node_of(path), 0, 0, 0, 0, 0) + attributes

    def look_up(self, node: int, body: bytes) -> bytes:
        return self.entry(self.child(node, body))

    def set_attributes(self, node: int, body: bytes) -> bytes:
        valid, _, _, size, *rest = SETATTR_IN.unpack_from(body)
        if valid & SET_SIZE:
            os.truncate(self.paths[node], size)
        if valid & SET_MODE:
            os.chmod(self.paths[node], stat.S_IMODE(rest[7]))
        return self.attributes_out(self.paths[node])

    def make_directory(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body[8:])
        os.mkdir(path, struct.unpack_from("<I", body)[0] & 0o7777)
        return self.entry(path)

    def unlink(self, node: int, body: bytes) -> bytes:
        path = self.child(node, body)
        with self.lock:
            gone = self.nodes.pop(path, None)
            if os.path.isdir(path):
                os.rmdir(path)
            elif gone is None:
                os.unlink(path)
            else:  # whoever has it open still asks for its attributes
                self.paths[gone] = os.path.join(self.unlinked, str(gone))
                os.rename(path, self.paths[gone])
        return b""

    def forget(self, path: str) -> None:
        with self.lock:
            self.nodes.pop(path, None)

    def rename(self, node: int, body: bytes, names: int = 8) -> bytes:
        old, new = body[names:].split(b"\0")[:2]
        source = self.child(node, old)
        target = self.child(struct.unpack_from("<Q", body)[0], new)
        os.rename(source, target)
        self.forget(target)
        with self.lock:
            moved = self.nodes.pop(source, None)
            if moved is not None:
                self.nodes[target] = moved
                self.paths[moved] = target
        return b""

    def rename2(self, node: int, body: bytes) -> bytes:
        if struct.unpack_from("<I", body, 8)[0]:
            raise Refused(errno.EINVAL, "no flags")
        return self.rename(node, body, 16)

    # --- files. They are opened for reading and writing, whatever the caller does with them.

    def opened(self, path: str, flags: int = 0, mode: int = 0o600) -> bytes:
        access = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR
        return struct.pack("<QII", os.open(path, access | flags, mode), 0, 0)

    def open(self, node: int, body: bytes) -> bytes:
        return self.opened(self.paths[node], struct.unpack_from("<I", body)[0] & os.O_TRUNC)

    def create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self.child(node, body[16:])
        opened = self.opened(path, os.O_CREAT | flags & (os.O_EXCL | os.O_TRUNC), mode & 0o7777)
        return self.entry(path) + opened

    def release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def read(self, node: int, body: bytes) -> bytes:
        file, offset, size, *_ = READ_IN.unpack_from(body)
        self.obey("read")
        data = os.pread(file, size, offset)
        if data and self.strikes(self.faults.flips):
            wrong = bytearray(data)
            wrong[self.random.randrange(len(wrong))] ^= 1 << self.random.randrange(8)
            return bytes(wrong)
        return data[: len(data) // 2] if self.strikes(self.faults.shorts) else data

    def write(self, node: int, body: bytes) -> bytes:
        file, offset, size, *_ = READ_IN.unpack_from(body)
        self.obey("write")
        if not self.strikes(self.faults.losses):
            os.pwrite(file, body[READ_IN.size : READ_IN.size + size], offset)
        return struct.pack("<II", size, 0)

    def flush(self, node: int, body: bytes) -> bytes:
        self.obey("flush")
        return b""

    def allocate(self, node: int, body: bytes) -> bytes:
        file, offset, length, mode = struct.unpack_from("<QQQI", body)
        if mode:
            raise Refused(errno.EOPNOTSUPP, "only plain fallocate")
        os.posix_fallocate(file, offset, length)
        return b""

    def list_directory(self, node: int, body: bytes) -> bytes:
        _, offset, size, *_ = READ_IN.unpack_from(body)
        out = b""
        for number, name in enumerate(sorted(os.listdir(self.paths[node]))[offset:], offset + 1):
            encoded = os.fsencode(name)
            one = struct.pack("<QQII", number, number, len(encoded), 0) + encoded
            one += bytes(-len(one) % 8)
            if len(out) + len(one) > size:
                break
            out += one
        return out

    def statistics(self, node: int, _: bytes) -> bytes:
        found = os.statvfs(self.paths[node])
        counts = [found.f_blocks, found.f_bfree, found.f_bavail, found.f_files, found.f_ffree]
        return struct.pack("<5Q10I", *counts, found.f_bsize, 255, found.f_frsize, *[0] * 7)

    # --- faults

    def strikes(self, one_in: int) -> bool:
        return one_in > 0 and self.random.randrange(one_in) == 0

    def obey(self, what: str) -> None:
        """Hang, or raise, as the test wants it."""
        while getattr(self.faults, f"{what}_hangs"):
            time.sleep(HANG_LOOK_S)
        error = getattr(self.faults, f"{what}_error")
        if error and self.strikes(max(1, self.faults.error_every)):
            raise Refused(error, os.strerror(error))


def main(backing: Path, mount: Path, faults: Path) -> None:
    device = os.open(FUSE, os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other"
    libc = ctypes.CDLL(None, use_errno=True)
    names = [os.fsencode(name) for name in ("kvdisk-test", str(mount), "fuse")]
    if libc.mount(*names, ctypes.c_ulong(0), options.encode()):
        raise OSError(ctypes.get_errno(), "mount")

    def leave(*_: object) -> None:
        libc.umount2(os.fsencode(mount), MNT_DETACH)
        os._exit(0)

    # A test that is killed cleans nothing up, and what is still mounted hangs whoever looks at it.
    signal.signal(signal.SIGTERM, leave)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    server = Server(backing, device, Faults(faults))
    print("mounted", flush=True)
    server.serve()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))

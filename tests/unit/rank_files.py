"""What the tests of rank files share: small ranks, and other processes that hold them."""

from __future__ import annotations

import os
import select
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvdisk import rank_file
from kvdisk.rank_file import RankFile

SLOT = 8192
FINGERPRINT = bytes(range(32))
NAMES = ("rank-0-of-1.kv", "rank-0-of-1.idx")

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


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

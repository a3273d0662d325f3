"""One block through the whole path of a directory, before anything depends on it.

A tier that cannot store is silent by nature: every failure is only a miss. So an open ends with a
proof: a block of random bytes goes through an engine into a file beside the rank files and comes
back. What this does not touch is the device that the blocks live on.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from kvdisk.config import TierConfig
from kvdisk.direct_mode import DirectMode, set_direct
from kvdisk.errors import DeviceError
from kvdisk.layout import Layout
from kvdisk.transfer import RowStatus, TransferEngine, TransferResult

_LIMIT_S: Final = 10.0
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
_KEY: Final = b"kvdisk self-test"


def self_test(directory: Path, mode: DirectMode, slot_bytes: int, config: TierConfig) -> str | None:
    """Store a block in ``directory`` and load it again; a note when that was not possible.

    A disk without room for one more block is no reason to stop: the rank files have their space.
    Raises DeviceError, with step and errno, when the block cannot be stored or does not come back.
    """
    blocks = np.zeros((2, slot_bytes), dtype=np.uint8)
    blocks[0] = np.frombuffer(os.urandom(slot_bytes), dtype=np.uint8)
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, slot_bytes)
            set_direct(file.fileno(), mode.direct)
            _store_and_load(file.fileno(), blocks, mode, config, directory)
    except OSError as error:
        if error.errno in _NO_ROOM:
            return f"{directory}: no room for the self-test's block, so it was left out"
        raise DeviceError.from_os_error(
            error, "self-test in", directory, "Check the disk (dmesg)."
        ) from error
    if not np.array_equal(blocks[0], blocks[1]):
        raise DeviceError(
            f"self-test in {directory}: a block came back changed; do not use this disk.",
            errno=errno.EIO,
            op="self-test",
            path=str(directory),
        )
    return None


def _store_and_load(
    file: int, blocks: np.ndarray, mode: DirectMode, config: TierConfig, directory: Path
) -> None:
    engine = TransferEngine(
        Layout.from_tensors(blocks),
        data_fd=file,
        slot_bytes=blocks.shape[1],
        slot_count=1,
        alignment=mode.alignment,
        backend=config.backend,
        file_system=mode.file_system,
        iodepth=1,
        buffers=2,
        load_reserve=1,
    )
    with engine:
        for step, block in (("store", 0), ("load", 1)):
            submit = engine.submit_store if step == "store" else engine.submit_load
            submit([_KEY], [0], [block], timeout_s=_LIMIT_S)
            result = _result(engine)
            if result is None or not result.ok:
                number = errno.ETIMEDOUT if result is None else int(result.errors[0])
                status = "nothing" if result is None else RowStatus(int(result.statuses[0])).name
                cause = os.strerror(number) if number else status
                raise DeviceError(
                    f"self-test in {directory}: the {step} of a block failed: {cause}. "
                    "Check the disk (dmesg), and run kvdisk doctor on this directory.",
                    errno=number,
                    op=step,
                    path=str(directory),
                )


def _result(engine: TransferEngine) -> TransferResult | None:
    while engine.wait(_LIMIT_S + 5):
        finished = engine.poll().finished
        if finished:
            return finished[0]
    return None

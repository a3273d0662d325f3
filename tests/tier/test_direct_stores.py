"""Stores from where the blocks lie, without a copy, also from memory that io_uring cannot register.

A serving engine's RAM tier is such memory: large, and not ours to choose.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
import time
from pathlib import Path

import numpy as np
import pytest

from kvdisk.layout import Layout
from kvdisk.probe import uring
from kvdisk.tier import DiskTier
from kvdisk.transfer import RowStatus
from tests.tier.tier_rig import KIB, PATIENCE_S, config_of, content, identity_of, keys_of

COUNT = 32
BLOCK_BYTES = 64 * KIB
REGISTER_BUFFERS = 0  # IORING_REGISTER_BUFFERS


def move(tier: DiskTier, transfer_id: int) -> list[RowStatus]:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        tier.wait(1.0)
        for result in tier.poll().finished:
            if result.transfer_id == transfer_id:
                return [RowStatus(status) for status in result.statuses]
    pytest.fail("a transfer did not end")


def kernel_registers(blocks: np.ndarray) -> bool:
    """Whether io_uring takes this memory, asked without the engine: file systems differ in that."""
    ring, _, error = uring._setup(0)
    assert ring >= 0, os.strerror(error)
    area = ctypes.create_string_buffer(struct.pack("=QQ", blocks.ctypes.data, blocks.nbytes), 16)
    try:
        return uring._call(uring.SYSCALL_REGISTER, ring, REGISTER_BUFFERS, area, 1) == 0
    finally:
        os.close(ring)


@pytest.mark.parametrize("registers", [True, False])
def test_direct_stores_from_memory_of_any_kind(tmp_path: Path, registers: bool) -> None:
    """What is mapped from a file on a disk cannot be registered; the ring can all the same."""
    if not uring.probe_uring().usable:
        pytest.skip("io_uring is not usable here")
    size = 2 * COUNT * BLOCK_BYTES
    with open(tmp_path / "memory", "w+b") as file:
        file.truncate(size)
        memory = mmap.mmap(-1 if registers else file.fileno(), size)
    blocks = np.frombuffer(memory, dtype=np.uint8).reshape(2 * COUNT, BLOCK_BYTES)
    if kernel_registers(blocks) != registers:
        what = "no memory of this size" if registers else "mappings of a file on this file system"
        pytest.skip(f"io_uring registers {what}")
    layout = Layout.from_tensors(blocks)
    config = config_of([tmp_path / "kv"], COUNT, BLOCK_BYTES, backend="uring")
    keys = keys_of(range(COUNT))
    with DiskTier.open(layout, identity_of(layout), config, direct_stores=True) as tier:
        note = tier.health().facts["backend_note"]
        stats = tier.stats().engines[0]
        if registers:
            assert not note
        else:
            assert "the blocks' own memory could not be registered" in str(note)
        assert stats["areas_registered"]
        for block, key in enumerate(keys):
            blocks[block] = content(key, 0, BLOCK_BYTES)
        assert move(tier, tier.store(keys, range(COUNT))) == [RowStatus.OK] * COUNT
        assert move(tier, tier.load(keys, range(COUNT, 2 * COUNT))) == [RowStatus.OK] * COUNT
    assert np.array_equal(blocks[:COUNT], blocks[COUNT:])


@pytest.mark.parametrize("shift", [8, 256])
def test_memory_that_the_disk_does_not_take_goes_by_way_of_the_ring(
    tmp_path: Path, shift: int
) -> None:
    memory = mmap.mmap(-1, 2 * COUNT * BLOCK_BYTES + 4096)
    blocks = np.frombuffer(memory, dtype=np.uint8)[shift : shift + 2 * COUNT * BLOCK_BYTES]
    blocks = blocks.reshape(2 * COUNT, BLOCK_BYTES)
    layout = Layout.from_tensors(blocks)
    config = config_of([tmp_path / "kv"], COUNT, BLOCK_BYTES)
    keys = keys_of(range(COUNT))
    with DiskTier.open(layout, identity_of(layout), config, direct_stores=True) as tier:
        for block, key in enumerate(keys):
            blocks[block] = content(key, 0, BLOCK_BYTES)
        assert move(tier, tier.store(keys, range(COUNT))) == [RowStatus.OK] * COUNT
        assert move(tier, tier.load(keys, range(COUNT, 2 * COUNT))) == [RowStatus.OK] * COUNT
    assert np.array_equal(blocks[:COUNT], blocks[COUNT:])

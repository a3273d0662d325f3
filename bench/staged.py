"""What an engine on a GPU is compared with: blocks moved the simple way, as released backends do.

One thread and two pinned staging slots for each direction: while one is at the disk, one block at a
time with one pwritev(2) or preadv(2), the other is filled or emptied by one batched copy of the
driver (cuMemcpyBatchAsync). Written for this comparison; no checksums, no records, no limits.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from kvdisk.layout import Layout

_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_VERSION = 12080  # whose signature of cuMemcpyBatchAsync is called


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes."""

    _fields_ = [
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    ]


def _find_batched_copy() -> Any:
    cuda = ctypes.CDLL("libcuda.so.1")
    found = ctypes.c_void_p()
    status = ctypes.c_int()
    result = cuda.cuGetProcAddress_v2(
        b"cuMemcpyBatchAsync",
        ctypes.byref(found),
        _VERSION,
        ctypes.c_uint64(0),
        ctypes.byref(status),
    )
    if result != 0 or not found.value:
        raise RuntimeError("the driver has no batched copies")
    pointer = ctypes.c_void_p
    size = ctypes.c_size_t
    return ctypes.CFUNCTYPE(
        ctypes.c_int, pointer, pointer, pointer, size, pointer, pointer, size, pointer, pointer
    )(found.value)


class Staged:
    """Stores and loads blocks of ``layout``; slot ``i`` lies at ``i * slot_bytes`` of the file."""

    def __init__(self, layout: Layout, file: int, slot_bytes: int) -> None:
        self._file, self._slot_bytes = file, slot_bytes
        self._copy = _find_batched_copy()
        self._bases = np.array([r.address for r in layout.regions], dtype=np.uint64)
        self._strides = np.array([r.block_stride_bytes for r in layout.regions], dtype=np.uint64)
        self._sizes = np.array([r.segment_bytes for r in layout.regions], dtype=np.uint64)
        self._offsets = np.cumsum(self._sizes) - self._sizes
        self._staging = [mmap.mmap(-1, slot_bytes) for _ in "ab"]
        self._views = [memoryview(each) for each in self._staging]
        self._addresses = [
            np.frombuffer(each, dtype=np.uint8).ctypes.data for each in self._staging
        ]
        for address in self._addresses:
            assert int(torch.cuda.cudart().cudaHostRegister(address, slot_bytes, 0)) == 0
        self._stream = torch.cuda.Stream(priority=0)
        self._done = [torch.cuda.Event(), torch.cuda.Event()]
        self._attributes = _CopyAttributes(_STREAM_ORDER)

    def close(self) -> None:
        torch.cuda.synchronize()
        for address in self._addresses:
            torch.cuda.cudart().cudaHostUnregister(address)

    def store(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        self._start_copy(0, blocks[0], to_device=False)
        for number, slot in enumerate(slots):
            side = number % 2
            if number + 1 < len(slots):
                self._start_copy(1 - side, blocks[number + 1], to_device=False)
            self._done[side].synchronize()
            written = os.pwritev(self._file, [self._views[side]], slot * self._slot_bytes)
            assert written == self._slot_bytes, "a short write"

    def load(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for number, slot in enumerate(slots):
            side = number % 2
            if number >= 2:
                self._done[side].synchronize()
            read = os.preadv(self._file, [self._views[side]], slot * self._slot_bytes)
            assert read == self._slot_bytes, "a short read"
            self._start_copy(side, blocks[number], to_device=True)
        self._stream.synchronize()

    def _start_copy(self, side: int, block: int, *, to_device: bool) -> None:
        device = self._bases + self._strides * np.uint64(block)
        staged = self._offsets + np.uint64(self._addresses[side])
        targets, sources = (device, staged) if to_device else (staged, device)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        result = self._copy(
            targets.ctypes.data,
            sources.ctypes.data,
            self._sizes.ctypes.data,
            len(targets),
            ctypes.addressof(self._attributes),
            ctypes.addressof(first),
            1,
            ctypes.addressof(failed),
            self._stream.cuda_stream,
        )
        assert result == 0, f"cuMemcpyBatchAsync: {result}"
        self._done[side].record(self._stream)

"""What native/bind.cpp exports. Meanings and units are said in kvdisk/transfer.py and
kvdisk/slot_records.py."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

key_bytes_max: Final[int]
record_bytes: Final[int]
record_page_bytes: Final[int]

_U8 = npt.NDArray[np.uint8]
_U64 = npt.NDArray[np.uint64]
_I32 = npt.NDArray[np.int32]

def record_states(records: _U8, first_slot: int, epoch: int) -> _U8: ...
def payload_matches(record: _U8, payload: _U8) -> bool: ...

class EngineOptions:
    device: str
    slot_bytes: int
    slot_count: int
    data_fd: int
    record_fd: int
    record_offset: int
    epoch: int
    backend: str
    force_async: bool
    force_async_reads: bool
    shards: int
    iodepth: int
    buffers: int
    rows_per_buffer: int
    load_reserve: int
    store_depth_beside_loads: int
    alignment: int
    store_queue_bytes: int
    direct_stores: bool
    direct_loads: bool
    def set_layout(self, regions: list[tuple[int, int, int]], block_count: int) -> None: ...

class Engine:
    def __init__(self, options: EngineOptions) -> None: ...
    def submit(
        self,
        direction: int,
        block_ids: _U64,
        slots: _U64,
        keys: _U8,
        key_lengths: _U8,
        timeout_ns: int,
        start_within_ns: int,
        event: int,
    ) -> int: ...
    def cancel_waiting(self, transfer_id: int) -> None: ...
    def end_within(self, timeout_ns: int) -> None: ...
    def poll(
        self,
    ) -> tuple[list[int], list[tuple[int, int, _U8, _I32, _U8]], list[int]]: ...
    def wait(self, timeout_ns: int) -> bool: ...
    def event_fd(self) -> int: ...
    def progress(self, direction: int) -> list[tuple[int, int, bool]]: ...
    def stats(self) -> dict[str, Any]: ...
    def reset_stats(self) -> None: ...
    def take_restored(self) -> tuple[_U64, _U64, _U64, _U8, _U8]: ...
    def lost_record_pages(self) -> int: ...
    def close(self, timeout_ns: int) -> int: ...

class RawJobOptions:
    file: int
    offset: int
    size_bytes: int
    block_bytes: int
    depth: int
    read_percent: int
    random: bool
    sync_after_writes: bool
    seed: int
    backend: str

class RawJob:
    def __init__(self, options: RawJobOptions) -> None: ...
    def fill(self) -> dict[str, Any]: ...
    def run(self, duration_ns: int) -> dict[str, Any]: ...
    def verify(self) -> tuple[int, int, int, int]: ...
    def forget(self) -> None: ...
    def stop(self) -> None: ...
    def backend_stats(self) -> dict[str, Any]: ...
    @property
    def progress_bytes(self) -> int: ...
    @property
    def buffer_bytes(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def backend_reason(self) -> str: ...

class CopyJobOptions:
    device: str
    buffers: int
    kernel_below_bytes: int | None
    kernel_ctas_max: int
    batched: bool
    def set_layout(self, regions: list[tuple[int, int, int]], block_count: int) -> None: ...

class CopyJob:
    def __init__(self, options: CopyJobOptions) -> None: ...
    def run(self, gathers: bool, scatters: bool, duration_ns: int) -> dict[str, Any]: ...
    @property
    def note(self) -> str: ...

"""The engine on a real GPU: every layout byte for byte, ordering, contexts, closing, memcheck.

Skipped without one; what can be known without is in tests/contract/test_cuda_fake.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device, and torch finds none", allow_module_level=True)

from device_rig import LAYOUTS, Caches, Rig, round_trip  # noqa: E402

from kvdisk.transfer import RowStatus  # noqa: E402

pytestmark = pytest.mark.gpu

HERE = Path(__file__).parent
ROUNDS = 50
BLOCKS = 24
SLEEP_CYCLES = 20_000_000  # some 10 ms

Open = Callable[..., Rig]


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Open]:
    rigs: list[Rig] = []

    def opened(name: str, half: int = BLOCKS, **options: object) -> Rig:
        rigs.append(Rig(LAYOUTS[name](2 * half), half, tmp_path, **options))
        return rigs[-1]

    yield opened
    for rig in rigs:
        if rig.files:
            rig.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_blocks_come_back_byte_for_byte(open_rig: Open, name: str) -> None:
    rig = open_rig(name)
    round_trip(rig, ROUNDS, seed=1)
    stats = rig.engine.stats()
    assert stats["copier"] == "cuda"
    assert stats["ring_used"] == 0
    assert stats["unknown_completions"] == 0


def test_several_shards_and_merged_slots(open_rig: Open) -> None:
    rig = open_rig("llama-3-8b of 8 ranks, 32 x 8 KiB", 160, shards=2, rows_per_buffer=4)
    round_trip(rig, 10, seed=2)


def test_groups_of_different_block_sizes_side_by_side(open_rig: Open) -> None:
    """A hybrid model's groups: an engine for each, at work at the same time."""
    rigs = [open_rig("llama-3-8b of 8 ranks, 32 x 8 KiB", 32), open_rig("hybrid with states", 16)]
    generator = torch.Generator(device="cuda").manual_seed(3)
    for _ in range(10):
        for rig in rigs:
            rig.randomise(range(rig.half), generator)
            rig.fill(range(rig.half, 2 * rig.half), 1)
        written = torch.cuda.Event()
        written.record()
        slots = [list(range(rig.half)) for rig in rigs]
        stores = [r.store(s, s, event=written) for r, s in zip(rigs, slots, strict=True)]
        assert all(r.finish(t).ok for r, t in zip(rigs, stores, strict=True))
        loads = [r.load([r.half + i for i in s], s) for r, s in zip(rigs, slots, strict=True)]
        assert all(r.finish(t).ok for r, t in zip(rigs, loads, strict=True))
        assert all(r.same(i, r.half + i) for r in rigs for i in range(r.half))


def test_a_store_has_all_that_was_written_before_its_event(open_rig: Open) -> None:
    """Scenario A4: the producer is still at work when the store is submitted."""
    rig = open_rig("llama-3-8b, 32 x 64 KiB")
    blocks = list(range(rig.half))
    producer = torch.cuda.Stream()
    for round_number in range(20):
        rig.fill(blocks, 1)
        torch.cuda.synchronize()
        with torch.cuda.stream(producer):
            torch.cuda._sleep(SLEEP_CYCLES)
            rig.fill(blocks, 100 + round_number)
            written = torch.cuda.Event()
            written.record()
        assert rig.finish(rig.store(blocks, blocks, event=written)).ok
        rig.fill(blocks, 2)
        torch.cuda.synchronize()
        assert rig.finish(rig.load(blocks, blocks)).ok
        for number in range(len(rig.caches.tensors)):
            assert (rig.caches.blocks(number)[: rig.half] == 100 + round_number).all()


def test_a_load_writes_after_all_that_still_uses_its_blocks(open_rig: Open) -> None:
    """The caller's stream writes to blocks that it has already given to a load."""
    rig = open_rig("llama-3-8b, 32 x 64 KiB")
    blocks = list(range(rig.half))
    rig.fill(blocks, 5)
    torch.cuda.synchronize()
    assert rig.finish(rig.store(blocks, blocks)).ok
    targets = [rig.half + block for block in blocks]
    stream = torch.cuda.Stream()
    for round_number in range(20):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(SLEEP_CYCLES)
            rig.fill(targets, 100 + round_number)
            used = torch.cuda.Event()
            used.record()
        assert rig.finish(rig.load(targets, blocks, event=used.cuda_event)).ok
        assert used.query(), "the load ended before the blocks' last use"
        for number in range(len(rig.caches.tensors)):
            assert (rig.caches.blocks(number)[rig.half :] == 5).all()


def test_a_source_may_be_overwritten_once_it_is_free(open_rig: Open) -> None:
    """Scenario A5: the next owner of a block writes at once; the disk has the old content whole."""
    rig = open_rig("llama-3-70b of 8 ranks, 80 x 8 KiB", iodepth=1)
    blocks = list(range(rig.half))
    for round_number in range(20):
        rig.fill(blocks, 10 + round_number)
        written = torch.cuda.Event()
        written.record()
        stored = rig.store(blocks, blocks, event=written)
        rig.until_source_free(stored)
        rig.fill(blocks, 3)
        assert rig.finish(stored).ok
        torch.cuda.synchronize()
        assert rig.finish(rig.load(blocks, blocks)).ok
        for number in range(len(rig.caches.tensors)):
            assert (rig.caches.blocks(number)[: rig.half] == 10 + round_number).all()


def test_loads_do_not_wait_for_compute(open_rig: Open) -> None:
    rig = open_rig("llama-3-8b, 32 x 64 KiB")
    blocks = list(range(rig.half))
    rig.fill(blocks, 1)
    torch.cuda.synchronize()
    assert rig.finish(rig.store(blocks, blocks)).ok
    torch.cuda._sleep(2_000_000_000)  # about a second
    assert rig.finish(rig.load([rig.half + block for block in blocks], blocks)).ok
    assert not torch.cuda.current_stream().query(), "compute had ended before the load"
    torch.cuda.synchronize()


def test_an_event_that_comes_too_late_times_its_store_out(open_rig: Open) -> None:
    rig = open_rig("llama-3-8b, 32 x 64 KiB")
    torch.cuda._sleep(2_000_000_000)
    late = torch.cuda.Event()
    late.record()
    stuck = rig.store([1, 2], [1, 2], event=late, timeout_s=0.1)
    assert rig.finish(rig.store([3], [3])).ok, "a store that need not wait"
    assert set(rig.finish(stuck).statuses.tolist()) == {RowStatus.TIMED_OUT}
    torch.cuda.synchronize()
    assert rig.finish(rig.store([1, 2], [1, 2], event=late)).ok


@pytest.mark.parametrize("limit_s", [0.0, 0.02, 5.0])
def test_closing_with_copies_in_flight(open_rig: Open, limit_s: float) -> None:
    """Every row ends, and nothing is written to a block after that."""
    rig = open_rig("llama-3-8b, 32 x 64 KiB", 64)
    blocks = list(range(rig.half))
    targets = [rig.half + block for block in blocks]
    assert rig.finish(rig.store(blocks, blocks)).ok
    transfers = [rig.load(targets, blocks), rig.store(blocks[:8], blocks[:8])]
    started = time.monotonic()
    assert rig.close(limit_s) == 0
    assert time.monotonic() - started < limit_s + 2
    rig.fill(range(2 * rig.half), 9)
    torch.cuda.synchronize()
    ended = {RowStatus.OK, RowStatus.TIMED_OUT, RowStatus.REFUSED, RowStatus.BUSY}
    for transfer in transfers:
        assert set(rig.results[transfer].statuses.tolist()) <= ended
    time.sleep(0.05)
    for number in range(len(rig.caches.tensors)):
        assert (rig.caches.blocks(number) == 9).all()


_CONTEXTS = """
import ctypes, sys, tempfile
import torch
sys.path.insert(0, {here!r})
cuda = ctypes.CDLL("libcuda.so.1")
def active(device):
    flags, answer = ctypes.c_uint(), ctypes.c_int()
    assert cuda.cuInit(0) == 0
    state = cuda.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(answer))
    assert state == 0
    return bool(answer.value)
"""


def in_a_process(program: str) -> None:
    text = _CONTEXTS.format(here=str(HERE)) + program
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]


def test_importing_and_host_memory_make_no_context() -> None:
    in_a_process(
        "import kvdisk.transfer, kvdisk.layout, os, numpy as np\n"
        "cache = np.zeros((8, 4096), dtype=np.uint8)\n"
        "file = tempfile.TemporaryFile(); os.ftruncate(file.fileno(), 8 * 4096)\n"
        "layout = kvdisk.layout.Layout.from_tensors(cache)\n"
        "with kvdisk.transfer.TransferEngine(layout, data_fd=file.fileno(), slot_bytes=4096,\n"
        "                                    slot_count=8, buffers=16):\n"
        "    pass\n"
        "assert not active(0)\n"
    )


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_no_context_on_another_device() -> None:
    """Scenario A32."""
    in_a_process(
        "from pathlib import Path\n"
        "torch.cuda.set_device(1)\n"
        "import device_rig\n"
        "caches = device_rig.LAYOUTS['MLA, 61 x 18 KiB'](16)\n"
        "assert caches.tensors[0].device.index == 1\n"
        "assert not active(0), 'made by torch'\n"
        "with tempfile.TemporaryDirectory() as directory:\n"
        "    rig = device_rig.Rig(caches, 8, Path(directory), shards=2)\n"
        "    device_rig.round_trip(rig, 3, seed=1)\n"
        "    assert active(1) and not active(0)\n"
        "    rig.close()\n"
    )


def test_memcheck_is_clean(tmp_path: Path) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from pathlib import Path\n"
        "import device_rig\n"
        "for name in ('MLA, 61 x 18 KiB', 'padded and odd', 'llama-3-8b, 32 x 64 KiB'):\n"
        "    rig = device_rig.Rig(device_rig.LAYOUTS[name](8), 4, Path(sys.argv[2]))\n"
        "    device_rig.round_trip(rig, 2, seed=1)\n"
        "    assert rig.close() == 0\n"
    )
    # Each tensor an allocation of its own, so that the checker knows its bounds.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c"]
    done = subprocess.run(
        [*command, program, str(HERE), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "ERROR SUMMARY: 0 errors" in done.stdout + done.stderr


def test_caches_are_what_their_names_say() -> None:
    for name, segment in {"llama-3-8b, 32 x 64 KiB": 65536, "MLA, 61 x 18 KiB": 18432}.items():
        caches: Caches = LAYOUTS[name](4)
        first = caches.tensors[0]
        assert first[0].numel() * first.element_size() == segment

"""Disks that fail under a live engine: it answers on, with the same tokens, and says what was.

Real file systems, small ones. The engine runs in one process with its worker, so that at the end it
can be asked whether anything of what failed is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.disks import fill, freeze, loop_disk, loop_ext4, thaw
from tests.faults.fuse_disk import fuse_disk, needs_fuse
from tests.serving.vllm.engines import (
    BLOCK_TOKENS,
    CACHED,
    MODES,
    PROMPTS,
    Engine,
    assert_nothing_left,
    cached,
    direct,
    engine,
    tokens,
)

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

Mode = Callable[..., dict[str, Any]]
RECOVERS_S = 120.0


def options(model: Path, transfer: dict[str, Any]) -> dict[str, Any]:
    return {"model": str(model), "kv_transfer_config": transfer, "in_process": True}


def until(true: Callable[[], bool]) -> None:
    """A limit for what must come, not a measure."""
    end = time.monotonic() + RECOVERS_S
    while not true():
        assert time.monotonic() < end, "it does not recover"


def came_back(one: Engine, reference: list[list[int]]) -> bool:
    """Ask for all prompts; whether the first were served from below."""
    again = one.generate(*PROMPTS)
    assert tokens(again) == reference
    return cached(again)[:2] == [CACHED] * 2


@MODES
@pytest.mark.root
def test_a_disk_that_loses_its_blocks(
    mode: Mode, model: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    """The image behind the loop device is cut: reads beyond the cut are EIO."""
    with (
        loop_disk(tmp_path, size_mib=128) as disk,
        engine(tmp_path / "log", **options(model, mode(disk.mount / "kv"))) as one,
    ):
        one.generate(*PROMPTS)
        os.truncate(tmp_path / "image", 1 << 20)
        for _ in range(3):
            back = one.generate(*PROMPTS)
            assert tokens(back) == reference
        assert one.metric('vllm:kvdisk_misses{"reason": "failed"}') > 0
        assert_nothing_left(one)


@MODES
@pytest.mark.root
def test_another_tenant_that_fills_the_disk(
    mode: Mode, model: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    """The space was reserved at the start: nothing changes."""
    with (
        loop_ext4(tmp_path, size_mib=128) as mount,
        engine(tmp_path / "log", **options(model, mode(mount / "kv"))) as one,
    ):
        one.generate(0)
        fill(mount)
        assert came_back(one, reference) or came_back(one, reference)
        assert one.metric("vllm:kvdisk_blocks_stored") >= 6 * 18
        assert one.metric('vllm:kvdisk_refusals{"reason": "failed"}') == 0
        assert_nothing_left(one)


@pytest.mark.root
@pytest.mark.quick
def test_a_thin_disk_that_runs_out(model: Path, reference: list[list[int]], tmp_path: Path) -> None:
    """What was reserved cannot be written: ENOSPC comes from below the file system."""
    inner = tmp_path / "inner"
    inner.mkdir()
    with loop_ext4(tmp_path, size_mib=64) as outer:
        (inner / "image").symlink_to(outer / "image")
        with (
            loop_disk(inner, size_mib=128) as disk,
            engine(tmp_path / "log", **options(model, direct(disk.mount / "kv"))) as one,
        ):
            assert tokens(one.generate(0, 1)) == reference[:2]
            stored = one.metric("vllm:kvdisk_blocks_stored")
            assert stored > 0
            fill(outer)
            for _ in range(3):
                assert tokens(one.generate(*PROMPTS)) == reference
            assert one.metric('vllm:kvdisk_refusals{"reason": "failed"}') > 0
            assert one.metric("vllm:kvdisk_blocks_loaded") > 0
            assert_nothing_left(one)


@MODES
@pytest.mark.root
@needs_fuse
def test_a_disk_that_does_not_answer_reads(
    mode: Mode, model: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    """Loads end at their deadline; after that none is tried until the disk answers again."""
    with fuse_disk(tmp_path) as disk:
        transfer = mode(disk.mount / "kv", load_deadline="500ms")
        with engine(tmp_path / "log", **options(model, transfer)) as one:
            one.generate(*PROMPTS)
            disk.faults.set(read_hangs=1)
            for _ in range(2):
                assert tokens(one.generate(*PROMPTS)) == reference
            assert one.metric('vllm:kvdisk_misses{"reason": "timed_out"}') > 0
            loaded = one.metric("vllm:kvdisk_blocks_loaded")
            disk.faults.clear()
            until(lambda: came_back(one, reference))
            assert one.metric("vllm:kvdisk_blocks_loaded") > loaded
            assert_nothing_left(one)


@MODES
@pytest.mark.root
def test_a_frozen_disk(mode: Mode, model: Path, reference: list[list[int]], tmp_path: Path) -> None:
    """Stores hang and are given up, loads go on, and all is well again after the thaw."""
    with loop_ext4(tmp_path, size_mib=128) as mount:
        transfer = mode(mount / "kv", store_deadline="500ms")
        with engine(tmp_path / "log", **options(model, transfer)) as one:
            stored = 3 * CACHED // BLOCK_TOKENS

            def all_is_stored() -> bool:
                assert tokens(one.generate(0, 1, 2)) == reference[:3]
                return one.metric("vllm:kvdisk_blocks_stored") == stored

            until(all_is_stored)
            freeze(mount)

            def given_up_and_loaded() -> bool:
                assert tokens(one.generate(*PROMPTS)) == reference
                given_up = one.metric('vllm:kvdisk_refusals{"reason": "timed_out"}') > 0
                return given_up and one.metric("vllm:kvdisk_blocks_loaded") > 0

            until(given_up_and_loaded)
            assert thaw(mount), "the answers came only when the disk did"
            assert one.metric("vllm:kvdisk_blocks_stored") == stored
            assert one.metric("vllm:kvdisk_slots_quarantined") > 0
            until(lambda: came_back(one, reference))
            assert one.metric("vllm:kvdisk_blocks_stored") > stored
            assert_nothing_left(one)


@MODES
@pytest.mark.root
def test_a_reset_on_a_frozen_disk(
    mode: Mode, model: Path, reference: list[list[int]], tmp_path: Path
) -> None:
    """Nothing older is served from then on, and the engine does not wait for the disk."""
    with loop_ext4(tmp_path, size_mib=128) as mount:
        transfer = mode(mount / "kv", store_deadline="500ms")
        with engine(tmp_path / "log", **options(model, transfer)) as one:
            one.generate(0, 1, 2)
            freeze(mount)
            assert one.tell("reset", connector=True)
            back = one.generate(0, 1, 2)
            assert tokens(back) == reference[:3]
            assert cached(back) == [0, 0, 0]
            assert thaw(mount), "the answers came only when the disk did"
            until(lambda: came_back(one, reference))
            assert_nothing_left(one)


@MODES
def test_deleted_files(mode: Mode, model: Path, reference: list[list[int]], tmp_path: Path) -> None:
    """An engine that has them open does not mind; the next one starts cold."""
    with engine(tmp_path / "first.log", **options(model, mode(tmp_path / "kv"))) as first:
        first.generate(*PROMPTS)
        deleted = [path for path in (tmp_path / "kv").glob("*/*") if path.is_file()]
        assert len(deleted) >= 3
        for path in deleted:
            path.unlink()
        assert came_back(first, reference)
        assert_nothing_left(first)
    with engine(tmp_path / "second.log", **options(model, mode(tmp_path / "kv"))) as second:
        back = second.generate(*PROMPTS)
        assert tokens(back) == reference
        assert cached(back) == [0] * 6
        assert came_back(second, reference)

"""Every verdict of the doctor on made-up findings: machines that nobody has here."""

from __future__ import annotations

import errno
from dataclasses import replace
from typing import Any

import pytest

from kvdisk.memory import MemoryHeadroom
from kvdisk.probe import process_checks, storage_checks
from kvdisk.probe.device import Disk
from kvdisk.probe.direct import DirectoryAnswers
from kvdisk.probe.host import Cuda, LockedMemory
from kvdisk.probe.mount import Mount, Space
from kvdisk.probe.uring import Surroundings, UringAnswers
from kvdisk.probe.verdict import Check

GIB = 1024**3
RING = 256 * 1024**2
AROUND = Surroundings("6.8.0", 0, False, False, None, 65536)
GOOD = DirectoryAnswers(
    create_errno=0,
    open_direct_errno=0,
    direct_errno=0,
    alignment_bytes=512,
    stated_memory_align=4,
    stated_offset_align=512,
    from_storage=True,
    preallocate_errno=0,
)
NVME = Disk("nvme0n1", "NVMe", scheduler="none", rotational=False, numa_node=1)
HEADROOM = MemoryHeadroom(RING, "what the control group leaves")


def mounted_as(file_system: str, *options: str) -> Mount:
    return Mount(1, (0, 1), "/data", file_system, "source", ("rw", *options))


class TestVerdicts:
    @pytest.mark.parametrize(
        ("mount", "answers", "words"),
        [
            (mounted_as("ext4"), GOOD, None),
            (mounted_as("xfs", "noquota"), GOOD, None),
            (mounted_as("nfs4"), GOOD, "network"),
            (mounted_as("fuse.sshfs"), GOOD, "user space"),
            (mounted_as("fuse"), GOOD, "user space"),
            (mounted_as("overlay"), GOOD, "container"),
            (mounted_as("zfs"), GOOD, "OpenZFS 2.3"),
            (mounted_as("btrfs"), GOOD, "copies on write"),
            (mounted_as("btrfs"), replace(GOOD, no_copy_on_write=True), None),
            (mounted_as("f2fs", "compress=lz4"), GOOD, "compresses"),
            (mounted_as("f2fs", "compress=no"), GOOD, None),
            (mounted_as("ext4", "data=journal"), GOOD, "twice"),
            (mounted_as("ext4", "data=ordered"), GOOD, None),
            (mounted_as("ext4", "sync"), GOOD, "sync"),
        ],
    )
    def test_file_system(self, mount: Mount, answers: DirectoryAnswers, words: str | None) -> None:
        check = storage_checks.check_file_system(mount, answers)
        assert check.status == ("ok" if words is None else "warning")
        assert words is None or words in check.found

    @pytest.mark.parametrize(
        ("change", "status", "words"),
        [
            ({}, "ok", "alignment 512 (statx: offset 512, memory 4)"),
            ({"same_bytes": False}, "error", "other bytes"),
            ({"from_storage": False}, "warning", "no byte came from storage"),
            ({"misaligned_accepted": True}, "warning", "misaligned"),
            ({"direct_errno": errno.ENOSPC, "alignment_bytes": 0}, "error", "ENOSPC"),
        ],
    )
    def test_direct(self, change: dict[str, Any], status: str, words: str) -> None:
        check = storage_checks.check_direct(replace(GOOD, **change), mounted_as("ext4"))
        assert check.status == status
        assert words in check.found

    @pytest.mark.parametrize(
        ("space", "status", "words"),
        [
            (Space(100 * GIB, 90 * GIB, 5 * GIB, 1000), "ok", "5.00 GiB held back"),
            (Space(100 * GIB, GIB - 1, 0, None), "warning", "hardly a cache"),
            (Space(100 * GIB, 0, 0, None), "error", "0 B of"),
            (Space(100 * GIB, 90 * GIB, 0, 0), "error", "no inode"),
            (Space(0, 0, 0, None), "ok", "does not say"),
            (errno.ESTALE, "error", "ESTALE"),
        ],
    )
    def test_space(self, space: Space | int, status: str, words: str) -> None:
        check = storage_checks.check_space(space)
        assert check.status == status
        assert words in check.found

    @pytest.mark.parametrize(
        ("disk", "status", "words"),
        [
            (None, "ok", "no block device"),
            (NVME, "ok", "nvme0n1 (NVMe)"),
            (replace(NVME, kind="SCSI or SATA", rotational=True), "warning", "spinning"),
            (replace(NVME, kind="virtio", rotational=True), "ok", "says rotational"),
            (replace(NVME, kind="network"), "warning", "delays"),
            (Disk("dm-0", "device mapper", below=(replace(NVME, kind="memory"),)), "warning", "on"),
        ],
    )
    def test_disk(self, disk: Disk | None, status: str, words: str) -> None:
        check = storage_checks.check_disk(disk)
        assert check.status == status
        assert words in check.found

    @pytest.mark.parametrize(
        ("scheduler", "rotational", "status", "words"),
        [
            ("none", False, "ok", "no I/O priority"),
            ("kyber", False, "ok", "no I/O priority"),
            ("mq-deadline", False, "ok", "honours I/O priority"),
            ("bfq", False, "warning", "bfq costs"),
            ("bfq", True, "ok", "honours I/O priority"),
            (None, False, "ok", "no I/O scheduler"),
        ],
    )
    def test_scheduler(
        self, scheduler: str | None, rotational: bool, status: str, words: str
    ) -> None:
        disk = replace(NVME, scheduler=scheduler, rotational=rotational)
        check = storage_checks.check_scheduler(disk)
        assert check.status == status
        assert words in check.found

    def test_numa(self) -> None:
        assert storage_checks.check_numa(NVME, (0, 1)).status == "ok"
        assert storage_checks.check_numa(NVME, ()).status == "ok"
        assert storage_checks.check_numa(None, (0,)).status == "ok"
        far = storage_checks.check_numa(NVME, (0,))
        assert far.status == "warning"
        assert far.remedy is not None
        assert "--cpunodebind=1" in far.remedy

    def test_uring_on_kernels_between(self) -> None:
        old = UringAnswers(0, enter_errno=0, register_errno=0, features=0xFF)
        check = process_checks.check_uring(old, AROUND)
        assert (check.status, check.remedy) == ("warning", "use Linux 5.11 or newer")
        assert "EXT_ARG" in check.found
        new = replace(old, features=0xFFFF)
        assert "without SINGLE_ISSUER" in process_checks.check_uring(new, AROUND).found
        newer = process_checks.check_uring(replace(new, single_issuer=True), AROUND)
        assert "DEFER_TASKRUN needs Linux 6.1" in newer.found

    @pytest.mark.parametrize(
        ("limits", "status", "words"),
        [
            (LockedMemory(0, 0, exempt=True), "ok", "CAP_IPC_LOCK"),
            (LockedMemory(None, None, exempt=False), "ok", "unlimited"),
            (LockedMemory(RING, None, exempt=False), "warning", "256.00 MiB"),
            (LockedMemory(RING + 1024**2, None, exempt=False), "ok", "257.00 MiB"),
        ],
    )
    def test_memlock(self, limits: LockedMemory, status: str, words: str) -> None:
        check = process_checks.check_locked_memory(limits, RING)
        assert check.status == status
        assert words in check.found

    def test_memlock_remedy_knows_the_hard_limit(self) -> None:
        soft = process_checks.check_locked_memory(LockedMemory(0, None, exempt=False), RING)
        assert soft.remedy == "raise the soft limit: ulimit -l 263168"
        hard = process_checks.check_locked_memory(LockedMemory(0, 0, exempt=False), RING)
        assert hard.remedy is not None
        assert "LimitMEMLOCK" in hard.remedy

    @pytest.mark.parametrize(
        ("headroom", "status"),
        [
            (None, "ok"),
            (replace(HEADROOM, available_bytes=RING - 1), "error"),
            (replace(HEADROOM, available_bytes=2 * RING - 1), "warning"),
            (replace(HEADROOM, available_bytes=2 * RING), "ok"),
        ],
    )
    def test_memory(self, headroom: MemoryHeadroom | None, status: str) -> None:
        assert process_checks.check_memory(headroom, RING).status == status

    @pytest.mark.parametrize(
        ("cuda", "status", "words"),
        [
            (Cuda(12040, True), "ok", "CUDA 12.4"),
            (Cuda(13000, True), "ok", "CUDA 13.0"),
            (Cuda(None, False), "ok", "CPU only"),
            (Cuda(None, True), "warning", "libcuda.so.1 is not here"),
            (Cuda(None, True, "stub"), "warning", "stub"),
        ],
    )
    def test_cuda(self, cuda: Cuda, status: str, words: str) -> None:
        check = process_checks.check_cuda(cuda)
        assert check.status == status
        assert words in check.found

    def test_native_and_fio(self) -> None:
        assert process_checks.check_native(None).status == "ok"
        assert process_checks.check_native("why").status == "error"
        assert process_checks.check_fio(None).status == "ok"

    def test_a_remedy_goes_with_trouble_and_only_with_it(self) -> None:
        for status, remedy in (("ok", "do"), ("warning", None)):
            with pytest.raises(AssertionError):
                Check("name", status, "found", remedy)  # type: ignore[arg-type]

"""The probes against made-up /proc and /sys trees, and against this machine.

Refusals are real ones: a seccomp filter in a child (tests/faults/seccomp.py).
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvdisk.probe.device import Disk, find_disk, read_disk
from kvdisk.probe.direct import probe_directory
from kvdisk.probe.host import (
    parse_list,
    probe_cuda,
    probe_native,
    process_numa_nodes,
    read_locked_memory,
)
from kvdisk.probe.mount import find_mount, parse_mountinfo, read_space
from kvdisk.probe.uring import (
    Surroundings,
    UringAnswers,
    explain_refusal,
    initial_user_namespace,
    kernel_version,
    probe_uring,
    probe_uring_here,
    read_surroundings,
)

REPOSITORY = Path(__file__).resolve().parents[2]
SECCOMP = [sys.executable, str(REPOSITORY / "tests/faults/seccomp.py")]

PRINT_URING = (
    "import json, dataclasses; from kvdisk.probe.uring import *; "
    "print(json.dumps(dataclasses.asdict({function}())))"
)
PRINT_DIRECTORY = (
    "import json, dataclasses, pathlib, sys; from kvdisk.probe.direct import *; "
    "print(json.dumps(dataclasses.asdict(probe_directory(pathlib.Path(sys.argv[1])))))"
)


def under_seccomp(filters: list[str], code: str, *arguments: str) -> dict[str, object]:
    command = [*SECCOMP, *filters, "--", sys.executable, "-c", code, *arguments]
    child = subprocess.run(command, capture_output=True, cwd=REPOSITORY, text=True, check=True)
    answer = json.loads(child.stdout)
    assert isinstance(answer, dict)
    return answer


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def around(
    *,
    kernel: str = "6.8.0-1",
    sysctl: int | None = 0,
    seccomp: bool = False,
    admin: bool = False,
    container: str | None = None,
) -> Surroundings:
    return Surroundings(kernel, sysctl, seccomp, admin, container, memlock_bytes=65536)


class TestUring:
    def test_answers_are_the_same_in_a_child_and_here(self) -> None:
        assert probe_uring() == probe_uring_here()

    def test_no_descriptor_is_left_open(self) -> None:
        before = set(os.listdir("/proc/self/fd"))
        probe_uring_here()
        assert set(os.listdir("/proc/self/fd")) == before

    @pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
    @pytest.mark.parametrize(
        ("call", "field"),
        [
            ("io_uring_setup", "setup_errno"),
            ("io_uring_enter", "enter_errno"),
            ("io_uring_register", "register_errno"),
        ],
    )
    def test_each_call_refused_alone(self, call: str, field: str, error: str) -> None:
        filters = ["--syscall", call, "--errno", error]
        answers = under_seccomp(filters, PRINT_URING.format(function="probe_uring"))
        assert answers[field] == getattr(errno, error)
        assert under_seccomp(filters, PRINT_URING.format(function="probe_uring_here")) == answers

    def test_a_filter_that_kills_kills_only_the_child(self) -> None:
        filters = ["--syscall", "io_uring_setup", "--errno", "KILL"]
        answers = under_seccomp(filters, PRINT_URING.format(function="probe_uring"))
        assert answers["killed_by_signal"] == signal.SIGSYS

    def test_usable_only_with_all_three_calls_and_what_the_backend_needs(self) -> None:
        every = UringAnswers(0, enter_errno=0, register_errno=0, features=(1 << 14) - 1)
        assert every.usable
        assert not replace(every, enter_errno=errno.EPERM).usable
        assert not replace(every, register_errno=errno.EPERM).usable
        assert not replace(every, killed_by_signal=signal.SIGSYS).usable
        assert replace(every, features=1, missing_operations=("READ",)).missing == (
            "NODROP",
            "EXT_ARG",
            "READ",
        )
        assert not UringAnswers(errno.ENOSYS).usable

    @pytest.mark.parametrize(
        ("error", "surroundings", "cause", "remedy"),
        [
            (errno.EPERM, around(sysctl=2, seccomp=True), "is 2", "sysctl -w"),
            (errno.EPERM, around(sysctl=1), "is 1", "io_uring_group"),
            (errno.EPERM, around(sysctl=1, admin=True, seccomp=True), "seccomp", "profile"),
            (errno.EPERM, around(seccomp=True, container="Docker"), "Docker", "io_uring_enter"),
            (errno.EPERM, around(sysctl=None), "security module", "audit log"),
            (errno.EACCES, around(), "SELinux", "audit log"),
            (errno.ENOSYS, around(kernel="4.19.0"), "came with 5.1", "newer kernel"),
            (errno.ENOSYS, around(seccomp=True), "seccomp", "profile"),
            (errno.ENOSYS, around(), "CONFIG_IO_URING", "gVisor|sandbox"),
            (errno.ENOMEM, around(), "65536 bytes", "ulimit -l"),
            (errno.EMFILE, around(), "too many files", "ulimit -n"),
            (errno.EINVAL, around(), "older than kvdisk", "5.11"),
            (errno.EBADMSG, around(), "no usual reason", "kernel log"),
        ],
    )
    def test_explanations(
        self, error: int, surroundings: Surroundings, cause: str, remedy: str
    ) -> None:
        found, to_do = explain_refusal(error, surroundings)
        assert cause in found
        assert any(part in to_do for part in remedy.split("|"))

    def test_surroundings_are_read_from_proc(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        monkeypatch.delenv("container", raising=False)
        write(tmp_path / "proc/self/status", "Name:\tx\nCapEff:\t0000000000200000\nSeccomp:\t2\n")
        write(tmp_path / "proc/sys/kernel/io_uring_disabled", "1\n")
        write(tmp_path / "run/.containerenv", "")
        found = read_surroundings(tmp_path)
        assert (found.sysctl_disabled, found.seccomp_filtered, found.sys_admin) == (1, True, True)
        assert found.container == "Podman"

    def test_nothing_in_proc_is_no_error(self, tmp_path: Path) -> None:
        found = read_surroundings(tmp_path)
        assert (found.sysctl_disabled, found.seccomp_filtered, found.sys_admin) == (
            None,
            False,
            False,
        )

    @pytest.mark.parametrize(
        ("release", "version"),
        [("6.18.44-x", (6, 18)), ("5.1-rc3", (5, 1)), ("5.15", (5, 15)), ("odd", (0, 0))],
    )
    def test_kernel_version(self, release: str, version: tuple[int, int]) -> None:
        assert kernel_version(release) == version

    def test_root_of_a_user_namespace_is_not_root(self, tmp_path: Path) -> None:
        assert initial_user_namespace(tmp_path)
        write(tmp_path / "proc/self/uid_map", "         0     100000      65536\n")
        assert not initial_user_namespace(tmp_path)


class TestDirectory:
    def test_leaves_nothing_behind(self, tmp_path: Path) -> None:
        before = set(os.listdir("/proc/self/fd"))
        answers = probe_directory(tmp_path)
        assert answers.create_errno == 0
        assert answers.same_bytes
        assert list(tmp_path.iterdir()) == []
        assert set(os.listdir("/proc/self/fd")) == before

    def test_an_interrupt_amid_it_is_what_the_caller_gets(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "pwritev", interrupt)
        with pytest.raises(KeyboardInterrupt):
            probe_directory(tmp_path)

    def test_proc_takes_no_file(self) -> None:
        answers = probe_directory(Path("/proc"))
        assert answers.create_errno in (errno.ENOENT, errno.EACCES)
        assert answers.open_direct_errno is None

    @pytest.mark.parametrize("tmpfile", ["EOPNOTSUPP", "EISDIR"])
    def test_a_named_file_where_there_is_no_tmpfile(self, tmp_path: Path, tmpfile: str) -> None:
        # __O_TMPFILE alone: O_TMPFILE includes O_DIRECTORY, which others use.
        filters = ["--syscall", "openat", "--when", "2&0x400000", "--errno", tmpfile]
        answers = under_seccomp(filters, PRINT_DIRECTORY, str(tmp_path))
        assert answers["create_errno"] == 0
        assert answers["open_direct_errno"] == 0
        assert list(tmp_path.iterdir()) == []

    def test_direct_refused_at_open(self, tmp_path: Path) -> None:
        filters = ["--syscall", "openat", "--when", "2&O_DIRECT", "--errno", "EINVAL"]
        answers = under_seccomp(filters, PRINT_DIRECTORY, str(tmp_path))
        assert (answers["create_errno"], answers["open_direct_errno"]) == (0, errno.EINVAL)
        assert answers["preallocate_errno"] == 0
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("error", ["EINVAL", "ENOSPC", "EIO"])
    def test_direct_refused_at_the_first_write(self, tmp_path: Path, error: str) -> None:
        filters = ["--syscall", "pwritev", "--errno", error]
        filters += ["--syscall", "pwritev2", "--errno", error]
        answers = under_seccomp(filters, PRINT_DIRECTORY, str(tmp_path))
        assert (answers["open_direct_errno"], answers["direct_errno"]) == (0, getattr(errno, error))
        assert answers["alignment_bytes"] == 0

    def test_no_preallocation(self, tmp_path: Path) -> None:
        filters = ["--syscall", "fallocate", "--errno", "EOPNOTSUPP"]
        answers = under_seccomp(filters, PRINT_DIRECTORY, str(tmp_path))
        assert answers["preallocate_errno"] == errno.EOPNOTSUPP

    def test_no_statx(self, tmp_path: Path) -> None:
        filters = ["--syscall", "statx", "--errno", "ENOSYS"]
        answers = under_seccomp(filters, PRINT_DIRECTORY, str(tmp_path))
        assert answers["stated_offset_align"] is None


MOUNTINFO = r"""
22 1 0:21 / /proc rw - proc proc rw
27 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 27 0:25 / /data rw,nodev - tmpfs tmpfs rw,size=4k
31 27 0:40 /sub /data/a\040b\134c rw master:2 propagate_from:1 - btrfs /dev/nvme0 rw,compress=zstd
32 27 259:1 / /data/a\040b\134c/over rw - xfs /dev/nvme1n1 rw
33 27 259:2 / /data/a\040b\134c/over rw - ext4 /dev/nvme2n1 rw,data=journal
this line is odd
x y 1:2 - z
"""


class TestMount:
    def test_fields(self) -> None:
        mounts = {mount.mount_id: mount for mount in parse_mountinfo(MOUNTINFO)}
        assert set(mounts) == {22, 27, 30, 31, 32, 33}
        assert mounts[31].point == "/data/a b\\c"
        assert mounts[31].device == (0, 40)
        assert mounts[31].option("compress") == "zstd"
        assert mounts[27].option("discard") == ""
        assert mounts[27].option("sync") is None
        assert mounts[27].options == ("rw", "relatime", "discard")

    def test_longest_mount_point_above_the_directory(self, tmp_path: Path) -> None:
        text = f"1 0 9:1 / / rw - ext4 a rw\n2 1 9:2 / {tmp_path} rw - xfs b rw\n"
        root, inside, beside = tmp_path / "root", tmp_path / "inside", Path(f"{tmp_path}-beside")
        write(root / "proc/self/mountinfo", text)
        inside.mkdir()
        beside.mkdir()
        found = [find_mount(directory, root) for directory in (inside, tmp_path, beside)]
        assert [mount and mount.source for mount in found] == ["b", "b", "a"]

    def test_the_device_number_goes_before_the_longest_path(self, tmp_path: Path) -> None:
        device = tmp_path.stat().st_dev
        numbers = f"{os.major(device)}:{os.minor(device)}"
        text = f"1 0 {numbers} / / rw - ext4 a rw\n2 1 9:2 / {tmp_path} rw - xfs b rw\n"
        write(tmp_path / "root/proc/self/mountinfo", text)
        found = find_mount(tmp_path, tmp_path / "root")
        assert found is not None
        assert found.source == "a"

    def test_the_later_of_two_mounts_on_one_point(self, tmp_path: Path) -> None:
        text = f"1 0 9:1 / {tmp_path} rw - xfs under rw\n2 1 9:2 / {tmp_path} rw - ext4 over rw\n"
        write(tmp_path / "root/proc/self/mountinfo", text)
        found = find_mount(tmp_path, tmp_path / "root")
        assert found is not None
        assert found.source == "over"

    def test_this_machine(self, tmp_path: Path) -> None:
        found = find_mount(tmp_path)
        assert found is not None
        assert str(tmp_path).startswith(found.point)
        assert find_mount(Path("/proc")).file_system == "proc"  # type: ignore[union-attr]

    def test_unknown(self, tmp_path: Path) -> None:
        assert find_mount(tmp_path, tmp_path) is None

    def test_space(self, tmp_path: Path) -> None:
        space = read_space(tmp_path)
        assert 0 < space.available_bytes <= space.total_bytes


class FakeSysfs:
    """A made-up /sys with block devices under a PCI tree, and links as the kernel makes them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/dev/block").mkdir(parents=True)

    def add(self, number: str, place: str, **files: str) -> Path:
        entry = self.root / "sys/devices" / place
        entry.mkdir(parents=True)
        for name, text in files.items():
            write(entry / name.replace("__", "/"), text + "\n")
        (self.root / "sys/dev/block" / number).symlink_to(entry)
        return entry

    def read(self, number: str) -> Disk:
        return read_disk(self.root / "sys/dev/block" / number, self.root)


@pytest.fixture
def sysfs(tmp_path: Path) -> FakeSysfs:
    return FakeSysfs(tmp_path)


class TestDisk:
    def test_partition_counts_as_its_disk(self, sysfs: FakeSysfs) -> None:
        pci = "pci0000:80/0000:81:00.0"
        disk = sysfs.add(
            "259:0",
            f"{pci}/nvme/nvme0/nvme0n1",
            queue__scheduler="[none] mq-deadline kyber bfq",
            queue__rotational="0",
            queue__nr_requests="1023",
            queue__write_cache="write through",
            queue__logical_block_size="512",
            device__model="A FAST DISK   ",
        )
        write(sysfs.root / "sys/devices" / pci / "numa_node", "1\n")
        sysfs.add("259:3", f"{pci}/nvme/nvme0/nvme0n1/nvme0n1p2", partition="2")
        found = sysfs.read("259:3")
        assert found.name == disk.name
        assert found == Disk(
            name="nvme0n1",
            kind="NVMe",
            model="A FAST DISK",
            scheduler="none",
            rotational=False,
            queue_requests=1023,
            write_cache="write through",
            logical_block_bytes=512,
            numa_node=1,
        )

    def test_mapper_over_raid_over_disks(self, sysfs: FakeSysfs) -> None:
        disks = [sysfs.add(f"259:{i}", f"pci/nvme{i}n1", numa_node=str(i)) for i in (0, 1)]
        raid = sysfs.add("9:127", "virtual/block/md127")
        mapper = sysfs.add("253:0", "virtual/block/dm-0")
        for place, below in ((raid, disks), (mapper, [raid])):
            (place / "slaves").mkdir()
            for entry in below:
                (place / "slaves" / entry.name).symlink_to(entry)
        found = sysfs.read("253:0")
        assert (found.kind, found.below[0].kind) == ("device mapper", "software RAID")
        assert [(disk.name, disk.numa_node) for disk in found.bottom()] == [
            ("nvme0n1", 0),
            ("nvme1n1", 1),
        ]

    def test_loop_leads_to_the_disk_of_its_file(self, sysfs: FakeSysfs, tmp_path: Path) -> None:
        device = tmp_path.stat().st_dev
        image = tmp_path / "image"
        image.touch()
        sysfs.add(f"{os.major(device)}:{os.minor(device)}", "virtual/vda", queue__scheduler="none")
        sysfs.add("7:0", "virtual/block/loop0", loop__backing_file=str(image))
        found = sysfs.read("7:0")
        assert found.backing_file == str(image)
        assert [(disk.name, disk.scheduler) for disk in found.bottom()] == [("vda", "none")]

    def test_a_loop_whose_file_is_gone_ends_there(self, sysfs: FakeSysfs) -> None:
        sysfs.add("7:0", "virtual/block/loop0", loop__backing_file="/gone (deleted)")
        assert [disk.name for disk in sysfs.read("7:0").bottom()] == ["loop0"]

    def test_a_circle_of_slaves_ends(self, sysfs: FakeSysfs) -> None:
        mapper = sysfs.add("253:0", "virtual/block/dm-0")
        (mapper / "slaves").mkdir()
        (mapper / "slaves/dm-0").symlink_to(mapper)
        assert len(list(sysfs.read("253:0").bottom())) == 1

    def test_no_numa_node_is_none(self, sysfs: FakeSysfs) -> None:
        sysfs.add("254:0", "virtio1/block/vda", device__numa_node="-1", numa_node="-1")
        assert sysfs.read("254:0").numa_node is None

    def test_multipath_asks_the_controllers(self, sysfs: FakeSysfs) -> None:
        controller = sysfs.root / "sys/devices/pci/nvme0"
        write(controller / "numa_node", "1\n")
        sysfs.add("259:0", "virtual/nvme-subsystem/nvme-subsys0/nvme0n1")
        subsystem = sysfs.root / "sys/devices/virtual/nvme-subsystem/nvme-subsys0"
        (subsystem / "nvme0").symlink_to(controller)
        assert sysfs.read("259:0").numa_node == 1

    def test_no_block_device(self, tmp_path: Path) -> None:
        assert find_disk(Path("/proc"), "proc") is None
        assert find_disk(tmp_path / "gone", None) is None
        assert find_disk(tmp_path, None, tmp_path) is None


class TestHost:
    def test_lists(self) -> None:
        assert parse_list("0-3,8\n".strip()) == {0, 1, 2, 3, 8}
        assert parse_list("") == set()

    def test_nodes_of_the_process(self, tmp_path: Path) -> None:
        write(tmp_path / "proc/self/status", "Cpus_allowed_list:\t4-5\n")
        for node, processors in enumerate(("0-3", "4-7")):
            write(tmp_path / f"sys/devices/system/node/node{node}/cpulist", f"{processors}\n")
        assert process_numa_nodes(tmp_path) == (1,)
        assert process_numa_nodes(tmp_path / "gone") == ()

    def test_capability_counts_on_the_host_only(self, tmp_path: Path) -> None:
        write(tmp_path / "proc/self/status", "CapEff:\t0000000000004000\n")
        assert read_locked_memory(tmp_path).exempt
        write(tmp_path / "proc/self/uid_map", "0 100000 65536\n")
        assert not read_locked_memory(tmp_path).exempt
        write(tmp_path / "proc/self/status", "CapEff:\t0000000000000000\n")
        assert not read_locked_memory(tmp_path).exempt

    def test_a_native_module_that_does_not_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "kvdisk._native", None)
        problem = probe_native()
        assert problem is not None
        assert "kvdisk._native" in problem

    @pytest.mark.parametrize(
        ("source", "version", "problem"),
        [
            ("int cuDriverGetVersion(int *v) { *v = 12040; return 0; }", 12040, None),
            ("int cuDriverGetVersion(int *v) { return 34; }", None, "stub"),
            ("int cuDriverGetVersion(int *v) { return 999; }", None, "answered 999"),
            ("int other;", None, "cuDriverGetVersion"),
        ],
    )
    def test_cuda_library(
        self, tmp_path: Path, source: str, version: int | None, problem: str | None
    ) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            pytest.skip("no C compiler")
        (tmp_path / "cuda.c").write_text(source)
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"],
            cwd=tmp_path,
            check=True,
        )
        code = "import json; from kvdisk.probe.host import *; "
        code += "c = probe_cuda(); print(json.dumps([c.version, c.problem]))"
        child = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
            cwd=REPOSITORY,
            capture_output=True,
            check=True,
        )
        found_version, found_problem = json.loads(child.stdout)
        assert found_version == version
        if problem is None:
            assert found_problem is None
        else:
            assert problem in found_problem

    def test_no_cuda_context_is_made(self) -> None:
        devices = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
        probe_cuda()
        after = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
        opened = set(after) - set(devices)
        assert not [name for name in opened if name.startswith("/dev/nvidia")]

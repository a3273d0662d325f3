"""Verdicts on the directory, its file system and its disk.

What always holds: these are pure functions of findings, so each verdict can be tested without the
disk that deserves it. ``docs/troubleshooting.md`` has a section for every name.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from kvdisk.probe.device import Disk
from kvdisk.probe.direct import DirectoryAnswers
from kvdisk.probe.mount import MEMORY_FILE_SYSTEMS, NETWORK_FILE_SYSTEMS, Mount, Space
from kvdisk.probe.verdict import BETTER_DIRECTORY, Check, errno_name, errno_text
from kvdisk.safe_directory import Refusal
from kvdisk.units import display_size

SPACE_BYTES_LEAST: Final = 1024**2  # the smallest capacity that can be configured
# Less than this is hardly a cache: 8192 tokens of a model with 32 layers, 8 KV heads of size 128
# and 2-byte numbers (2 x 32 x 8 x 128 x 2 bytes a token).
SPACE_BYTES_USEFUL: Final = 1024**3

_PRIORITY_SCHEDULERS: Final = ("mq-deadline", "bfq")
_NO_COPY_ON_WRITE: Final = (
    "make an empty directory, run chattr +C on it and use that; or use ext4 or xfs"
)


def check_directory(
    directory: Path, answers: DirectoryAnswers, refusal: Refusal | None = None
) -> Check:
    """``refusal``: why an open would not use the directory, though it could."""
    values = {"path": str(directory), "create_errno": answers.create_errno}
    error = answers.create_errno
    if error == 0 and refusal is not None:
        found = f"opening a cache here is refused, since it {refusal.what}"
        return Check("directory", "error", found, refusal.remedy, values)
    if error == 0:
        return Check("directory", "ok", "files can be made here", None, values)
    remedy = {
        errno.EROFS: "mount the file system writable, or use another directory",
        errno.EACCES: f"give user {os.geteuid()} the right to write here (chown, chmod, mount)",
        errno.EPERM: "look for an immutable flag (lsattr -d) or a security module's denial",
        errno.ENOSPC: "free space or inodes here",
        errno.EDQUOT: "raise the quota of this user",
    }.get(error, BETTER_DIRECTORY)
    found = f"no file can be made here: {errno_text(error)}"
    return Check("directory", "error", found, remedy, values)


def check_file_system(mount: Mount | None, answers: DirectoryAnswers) -> Check:
    if mount is None:
        return Check("file_system", "ok", "unknown: /proc/self/mountinfo does not list it")
    kind = mount.file_system
    found = f"{kind} on {mount.point} ({mount.source}; {','.join(mount.options)})"
    values = {
        "type": kind,
        "mount_point": mount.point,
        "source": mount.source,
        "options": list(mount.options),
        "no_copy_on_write": answers.no_copy_on_write,
    }
    problem, remedy = _file_system_problem(mount, answers)
    if problem is None:
        return Check("file_system", "ok", found, None, values)
    return Check("file_system", "warning", f"{found}: {problem}", remedy, values)


def _file_system_problem(mount: Mount, answers: DirectoryAnswers) -> tuple[str | None, str | None]:
    """(what is wrong, what to do), the gravest first; (None, None) when nothing is."""
    kind = mount.file_system
    if kind in MEMORY_FILE_SYSTEMS:
        return "this is memory, not a disk: it competes with the engine", BETTER_DIRECTORY
    if kind in NETWORK_FILE_SYSTEMS:
        return "a network or host file system: its delays become load latency", BETTER_DIRECTORY
    if kind.startswith("fuse"):
        return "a program in user space answers every request, and can hang it", BETTER_DIRECTORY
    if kind == "overlay":
        return (
            "the writable layer of a container: slow, and gone with it",
            "mount a directory of the host's disk into the container (docker run -v)",
        )
    if kind == "zfs":
        return (
            "copies on write and caches in RAM on its own; O_DIRECT is real from OpenZFS 2.3 only",
            BETTER_DIRECTORY,
        )
    if kind == "btrfs" and not answers.no_copy_on_write:
        return (
            "copies on write and checksums, so direct writes are copied or buffered first",
            _NO_COPY_ON_WRITE,
        )
    compress = mount.option("compress") or mount.option("compress-force")
    if compress is not None and compress != "no" and not answers.no_copy_on_write:
        return "compresses, which costs time and gains nothing on KV", "mount without compress"
    if mount.option("data") == "journal":
        return (
            "data=journal writes everything twice and turns O_DIRECT off",
            "mount with data=ordered",
        )
    if mount.option("sync") is not None:
        return "mounted sync: every write waits for the disk's cache", "mount without sync"
    return None, None


def check_direct(answers: DirectoryAnswers, mount: Mount | None) -> Check:
    values = {
        "open_errno": answers.open_direct_errno,
        "io_errno": answers.direct_errno,
        "alignment_bytes": answers.alignment_bytes or None,
        "stated_memory_align": answers.stated_memory_align,
        "stated_offset_align": answers.stated_offset_align,
        "misaligned_accepted": answers.misaligned_accepted,
        "same_bytes": answers.same_bytes,
        "from_storage": answers.from_storage,
    }
    kind = mount.file_system if mount else "the file system"
    if answers.open_direct_errno:
        found = f"open refused ({errno_name(answers.open_direct_errno)}): buffered mode"
        return Check("direct_io", "warning", found, BETTER_DIRECTORY, values)
    if answers.direct_errno:
        error = answers.direct_errno
        if error == errno.EINVAL:
            found = f"accepted by open, refused by the first write ({errno_name(error)}): "
            return Check("direct_io", "warning", f"{found}buffered mode", BETTER_DIRECTORY, values)
        found = f"a 4 KiB write and read failed: {errno_text(error)}"
        remedy = (
            "free space, or raise the quota"
            if error in (errno.ENOSPC, errno.EDQUOT)
            else "look into the kernel log (dmesg) for this disk's errors"
        )
        return Check("direct_io", "error", found, remedy, values)
    if not answers.same_bytes:
        found = "a direct read gave other bytes than were written"
        return Check("direct_io", "error", found, "do not use this disk or file system", values)
    found = f"written and read back, alignment {answers.alignment_bytes}"
    if answers.stated_offset_align:
        found += f" (statx: offset {answers.stated_offset_align}"
        found += f", memory {answers.stated_memory_align})"
    if answers.from_storage is False:
        found += ", but no byte came from storage: memory or a server answers"
        return Check("direct_io", "warning", found, BETTER_DIRECTORY, values)
    if answers.misaligned_accepted and not answers.no_copy_on_write:
        found += f", but misaligned requests pass too: {kind} may copy through the page cache"
        remedy = _NO_COPY_ON_WRITE if kind == "btrfs" else BETTER_DIRECTORY
        return Check("direct_io", "warning", found, remedy, values)
    return Check("direct_io", "ok", found, None, values)


def check_preallocate(answers: DirectoryAnswers) -> Check:
    error = answers.preallocate_errno or 0
    values = {"errno": error}
    if error == 0:
        return Check("preallocate", "ok", "fallocate reserves space", None, values)
    if error == errno.EOPNOTSUPP:
        found = "fallocate is not supported: space cannot be promised ahead"
        return Check("preallocate", "warning", found, BETTER_DIRECTORY, values)
    found = f"fallocate of 1 MiB failed: {errno_text(error)}"
    return Check("preallocate", "error", found, "free space, or raise the quota", values)


def check_space(space: Space | int) -> Check:
    """``space``: the errno when the file system did not answer."""
    if isinstance(space, int):
        found = f"statvfs failed: {errno_text(space)}"
        return Check("space", "error", found, "check the mount", {"errno": space})
    values = {
        "total_bytes": space.total_bytes,
        "available_bytes": space.available_bytes,
        "reserved_bytes": space.reserved_bytes,
        "files_available": space.files_available,
    }
    if space.total_bytes == 0:
        return Check("space", "ok", "the file system does not say", None, values)
    found = f"{display_size(space.available_bytes)} of {display_size(space.total_bytes)} free"
    if space.reserved_bytes:
        found += f" (another {display_size(space.reserved_bytes)} held back)"
    if space.files_available == 0:
        return Check("space", "error", f"{found}, but no inode is", "remove some files", values)
    if space.available_bytes < SPACE_BYTES_LEAST:
        return Check("space", "error", found, "free space here", values)
    if space.available_bytes < SPACE_BYTES_USEFUL:
        return Check("space", "warning", f"{found}: hardly a cache", "free space here", values)
    return Check("space", "ok", found, None, values)


def check_disk(disk: Disk | None) -> Check:
    if disk is None:
        return Check("disk", "ok", "no block device of its own", None, {"devices": []})
    bottom = list(disk.bottom())
    found = describe_disk(disk)
    values = {
        "device": disk.name,
        "devices": [
            {
                "name": below.name,
                "kind": below.kind,
                "model": below.model,
                "rotational": below.rotational,
                "queue_requests": below.queue_requests,
                "write_cache": below.write_cache,
                "logical_block_bytes": below.logical_block_bytes,
            }
            for below in bottom
        ],
    }
    kinds = {below.kind for below in bottom}
    if "network" in kinds:
        found += ": its delays become load latency"
        return Check("disk", "warning", found, BETTER_DIRECTORY, values)
    if "memory" in kinds:
        return Check("disk", "warning", f"{found}: memory, not a disk", BETTER_DIRECTORY, values)
    # Virtual disks say "rotational" unless told otherwise, so only others are believed.
    if any(below.rotational and below.kind not in ("virtio", "Xen") for below in bottom):
        found += ": a spinning disk, whose seeks are slower than computing again"
        return Check("disk", "warning", found, BETTER_DIRECTORY, values)
    return Check("disk", "ok", found, None, values)


def describe_disk(disk: Disk) -> str:
    """A line such as "dm-0 (device mapper) on nvme0n1 (NVMe, MODEL, write back cache)"."""
    facts = [disk.kind]
    if disk.model:
        facts.append(disk.model)
    if disk.backing_file:
        facts.append(f"file {disk.backing_file}")
    if disk.rotational and not disk.below:
        facts.append("says rotational")
    if disk.queue_requests is not None and not disk.below:
        facts.append(f"queue of {disk.queue_requests}")
    if disk.write_cache and not disk.below:
        facts.append(f"{disk.write_cache} cache")
    text = f"{disk.name} ({', '.join(facts)})"
    if disk.below:
        text += " on " + " and ".join(describe_disk(below) for below in disk.below)
    return text


def check_scheduler(disk: Disk | None) -> Check:
    bottom = [] if disk is None else [below for below in disk.bottom() if below.scheduler]
    schedulers = {below.name: below.scheduler for below in bottom}
    values = {"schedulers": schedulers}
    if not bottom:
        return Check("scheduler", "ok", "no I/O scheduler", None, values)
    found = ", ".join(f"{below.name}: {below.scheduler}" for below in bottom)
    slow = [b.name for b in bottom if b.scheduler == "bfq" and not b.rotational]
    if slow:
        return Check(
            "scheduler",
            "warning",
            f"{found}: bfq costs more CPU per request than a fast disk can spare",
            f"echo none > /sys/block/{slow[0]}/queue/scheduler (or mq-deadline)",
            values,
        )
    if all(below.scheduler in _PRIORITY_SCHEDULERS for below in bottom):
        found += " (honours I/O priority: loads go first in the kernel too)"
    else:
        found += " (no I/O priority: loads go first in kvdisk only)"
    return Check("scheduler", "ok", found, None, values)


def check_numa(disk: Disk | None, process_nodes: tuple[int, ...]) -> Check:
    disk_nodes = {
        below.name: below.numa_node
        for below in (disk.bottom() if disk else ())
        if below.numa_node is not None
    }
    values = {"disk_nodes": disk_nodes, "process_nodes": list(process_nodes)}
    if not disk_nodes or not process_nodes:
        return Check("numa", "ok", "the disk tells no NUMA node", None, values)
    found = ", ".join(f"{name} on node {node}" for name, node in disk_nodes.items())
    found += f"; this process may run on {', '.join(map(str, process_nodes))}"
    far = sorted(set(disk_nodes.values()) - set(process_nodes))
    if far:
        remedy = f"run the engine near the disk: numactl --cpunodebind={far[0]}"
        return Check("numa", "warning", f"{found}: every byte crosses nodes", remedy, values)
    return Check("numa", "ok", found, None, values)

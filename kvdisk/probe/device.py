"""Which disks hold a file system, and how the kernel drives them.

A directory may lie on a partition of a RAID of loop devices; what decides speed is at the bottom.
So the chain is followed through sysfs (partition, device mapper, md, loop) down to whole disks.

What always holds: sysfs is only read; what it does not say is None; the walk is bounded.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DEPTH_MAX: Final = 8
_KINDS: Final = (
    ("nvme", "NVMe"),
    ("vd", "virtio"),
    ("xvd", "Xen"),
    ("sd", "SCSI or SATA"),
    ("mmcblk", "SD or eMMC"),
    ("loop", "loop"),
    ("dm-", "device mapper"),
    ("md", "software RAID"),
    ("nbd", "network"),
    ("rbd", "network"),
    ("drbd", "network"),
    ("zram", "memory"),
    ("ram", "memory"),
    ("pmem", "persistent memory"),
)


@dataclass(frozen=True)
class Disk:
    """A whole block device. ``below`` are the devices it is made of; empty at the bottom."""

    name: str
    kind: str
    model: str | None = None
    scheduler: str | None = None
    rotational: bool | None = None
    queue_requests: int | None = None
    write_cache: str | None = None
    logical_block_bytes: int | None = None
    numa_node: int | None = None
    backing_file: str | None = None
    below: tuple[Disk, ...] = ()

    def bottom(self) -> Iterator[Disk]:
        """The disks at the bottom of the chain, each once for every way to it."""
        if not self.below:
            yield self
        for disk in self.below:
            yield from disk.bottom()


def find_disk(directory: Path, source: str | None, root: Path = Path("/")) -> Disk | None:
    """The block device under ``directory``, or None (memory, network, container layers).

    ``source`` is the mount's: file systems with device numbers of their own (btrfs) name the
    device there. ``root`` is where ``sys`` is found.
    """
    return _find(directory, source, root, 0)


def read_disk(sysfs_entry: Path, root: Path = Path("/"), depth: int = 0) -> Disk:
    """The disk of a directory such as /sys/dev/block/259:3 (a partition counts as its disk)."""
    entry = Path(os.path.realpath(sysfs_entry))
    if (entry / "partition").exists():
        entry = entry.parent
    backing = _text(entry / "loop/backing_file")
    return Disk(
        name=entry.name,
        kind=next((kind for prefix, kind in _KINDS if entry.name.startswith(prefix)), "disk"),
        model=_text(entry / "device/model"),
        scheduler=_chosen(_text(entry / "queue/scheduler")),
        rotational=_flag(_text(entry / "queue/rotational")),
        queue_requests=_number(_text(entry / "queue/nr_requests")),
        write_cache=_text(entry / "queue/write_cache"),
        logical_block_bytes=_number(_text(entry / "queue/logical_block_size")),
        numa_node=_numa_node(entry, root),
        backing_file=backing,
        below=tuple(_below(entry, backing, root, depth)) if depth < _DEPTH_MAX else (),
    )


def _find(directory: Path, source: str | None, root: Path, depth: int) -> Disk | None:
    try:
        device = os.stat(directory).st_dev
        if os.major(device) == 0:
            if source is None or not source.startswith("/dev/"):
                return None
            status = os.stat(source)
            if not stat.S_ISBLK(status.st_mode):
                return None
            device = status.st_rdev
    except OSError:
        return None
    entry = root / f"sys/dev/block/{os.major(device)}:{os.minor(device)}"
    return read_disk(entry, root, depth) if entry.exists() else None


def _below(entry: Path, backing: str | None, root: Path, depth: int) -> Iterator[Disk]:
    if backing is not None:
        disk = _find(Path(backing), None, root, depth + 1)
        if disk is not None:
            yield disk
        return
    try:
        slaves = sorted((entry / "slaves").iterdir())
    except OSError:
        return
    for slave in slaves:
        yield read_disk(slave, root, depth + 1)


def _numa_node(entry: Path, root: Path) -> int | None:
    """The nearest numa_node above the device; a multipath NVMe disk has it at its controllers."""
    top = Path(os.path.realpath(root / "sys"))
    for place in (entry, *entry.parents):
        if place == top:
            break
        node = _number(_text(place / "numa_node"))
        if node is not None:
            return node
    if "nvme-subsystem" in entry.parts:
        for controller in sorted(entry.parent.glob("nvme[0-9]*")):
            node = _number(_text(controller / "numa_node"))
            if node is not None:
                return node
    return None


def _chosen(schedulers: str | None) -> str | None:
    """The name in brackets: "none [mq-deadline] bfq"; a device without a choice writes "none"."""
    if not schedulers:
        return None
    _, bracket, rest = schedulers.partition("[")
    return rest.partition("]")[0] if bracket else schedulers


def _flag(text: str | None) -> bool | None:
    return None if text not in ("0", "1") else text == "1"


def _number(text: str | None) -> int | None:
    """Not negative: -1 is sysfs for "no NUMA node"."""
    return int(text) if text is not None and text.isdecimal() else None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip() or None
    except OSError:
        return None

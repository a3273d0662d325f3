"""Cuts a file system's power under a process that stores blocks, and verifies what is left.

    sudo python -m tests.tier.powercut --cuts 20 --seed 1

The file systems are ext4 and xfs on loop devices, cut off with the shutdown ioctl, log not flushed:
what the journal has not written is gone, above all that freshly written space is in use, so that
completed writes read back as zeros. Then the writer is killed, the disk mounted again, and another
process loads every key and compares every byte (see crash.py). Before every second cut the file
system is synced, as it is by itself within 30 s. The last line is what counts:

    cuts=40 wrong_bytes=0 survived: ext4=…% synced=…% xfs=…% synced=…%
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.faults.disks import LoopDisk, loop_disk
from tests.tier.crash import Lines, Totals, World, Writer, in_child, understand, verify_in_child

CUTS_PER_DISK = 5
SIZE_MIB = {"ext4": 192, "xfs": 384}
UNMOUNT_PATIENCE_S = 30.0


def cut_once(world: World, disk: LoopDisk, chooser: random.Random, synced: bool) -> list[str]:
    """Let a writer live, cut the power under it, kill it; what it said, after the cut only what it
    was about to store."""
    world.life += 1
    seed = chooser.randrange(1 << 30)
    child, descriptor = in_child(lambda report: Writer(world, seed, report).run() and None)
    lines = Lines(descriptor)
    while not lines.all and not lines.ended:
        lines.read()
    until_s = time.monotonic() + chooser.uniform(0.02, 1.0)
    while time.monotonic() < until_s and not lines.ended:
        lines.read(until_s)
    if synced:
        subprocess.run(["sync", "--file-system", str(disk.mount)], check=True)
        until_s = time.monotonic() + chooser.uniform(0, 0.1)
        while time.monotonic() < until_s and not lines.ended:
            lines.read(until_s)
    before = len(lines.all)
    disk.cut_power()
    time.sleep(chooser.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    lines.rest()
    if any(line.startswith("failed") for line in lines.all[:before]):
        raise SystemExit(f"the writer failed: {lines.all[before - 1]}")
    return lines.all[:before] + [each for each in lines.all[before:] if each.startswith("store")]


def remount(disk: LoopDisk) -> None:
    """The kernel may still be busy with the dead process's requests."""
    until = time.monotonic() + UNMOUNT_PATIENCE_S
    while True:
        try:
            disk.remount()
            return
        except subprocess.CalledProcessError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def campaign(cuts: int, seed: int, file_system: str) -> tuple[Totals, Totals]:
    """``cuts`` in all; totals of those without and with a sync before."""
    totals, chooser = (Totals(), Totals()), random.Random(f"{seed} {file_system}")
    done = 0
    while done < cuts:
        with (
            tempfile.TemporaryDirectory(prefix="kvdisk-powercut-") as directory,
            loop_disk(Path(directory), file_system, SIZE_MIB[file_system]) as disk,
        ):
            world = World.choose(chooser, disk.mount)
            print(f"{file_system} {done}: {world.slots} slots {world.options}", flush=True)
            for _ in range(min(CUTS_PER_DISK, cuts - done)):
                done += 1
                synced = done % 2 == 0
                lines = cut_once(world, disk, chooser, synced)
                understand(world, lines)
                remount(disk)
                answer = verify_in_child(world)
                totals[synced].add(world, lines, answer)
                world.expected = set(answer["found"])
    return totals


def share(totals: Totals) -> str:
    return f"{totals.survived_percent:.1f}%" if totals.expected else "(nothing was there)"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cuts", type=int, default=20, help="for each file system")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    logging.getLogger("kvdisk").setLevel(logging.CRITICAL)
    print(f"powercut: cuts={options.cuts} seed={options.seed}", flush=True)
    cuts = wrong = 0
    shares = []
    for name in SIZE_MIB:
        bare, synced = campaign(options.cuts, options.seed, name)
        cuts += bare.crashes + synced.crashes
        wrong += bare.wrong + synced.wrong
        shares.append(f"{name}={share(bare)} synced={share(synced)}")
    print(f"cuts={cuts} wrong_bytes={wrong} survived: {' '.join(shares)}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

"""What the tests of inspect, verify and gc share: small caches on a real disk, and their damage."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kvdisk.config import TierConfig
from kvdisk.identity import Identity
from kvdisk.layout import Layout
from kvdisk.open_transfers import TierResult
from kvdisk.scheduler import TierScheduler
from kvdisk.tier import DiskTier
from kvdisk.worker import TierWorker

BLOCK = 16384
BLOCKS = np.random.default_rng(7).integers(0, 256, (64, BLOCK), dtype=np.uint8)
LAYOUT = Layout.from_tensors(BLOCKS)
IDENTITY = Identity(
    model="tiny",
    weights="one",
    dtype="bfloat16",
    block_tokens=16,
    layout=LAYOUT.fingerprint_fields(),
    key_hash="sha256",
)


def config_of(*roots: Path, **options: Any) -> TierConfig:
    return TierConfig(paths=roots, **{"capacity_bytes": 4 << 20, "ring_bytes": 1 << 20, **options})


def identity_of(model: str) -> Identity:
    return replace(IDENTITY, model=model)


def keys_of(count: int, first: int = 0) -> list[bytes]:
    return [b"key-%d" % n for n in range(first, first + count)]


def open_tier(root: Path, model: str = "tiny", **options: Any) -> DiskTier:
    return DiskTier.open(LAYOUT, identity_of(model), config_of(root, **options))


def result_of(tier: DiskTier) -> TierResult:
    while not (finished := tier.poll().finished):
        assert tier.wait(30)
    return finished[0]


def fill(root: Path, count: int = 20, model: str = "tiny") -> Path:
    """A closed cache of one rank with ``count`` blocks; its namespace directory."""
    with open_tier(root, model) as tier:
        tier.store(keys_of(count), range(count))
        assert result_of(tier).ok
    return root / identity_of(model).namespace


def fill_ranks(root: Path, world: int, keys_by_rank: list[list[bytes]]) -> Path:
    """Closed files of ``world`` ranks; rank r has stored ``keys_by_rank[r]``, from slot 0 on."""
    config = config_of(root)
    for rank, keys in enumerate(keys_by_rank):
        scheduler = TierScheduler(config, BLOCK, world_size=world)
        with TierWorker.open(LAYOUT, IDENTITY, config, rank=rank, world_size=world) as worker:
            opened = worker.take_opened()
            for other in range(world):
                scheduler.attach(replace(opened, rank=other))
            worker.submit(scheduler.store(keys, range(len(keys))))
            while not worker.poll().results:
                assert worker.wait(30)
    return root / IDENTITY.namespace


def flip(path: Path, offset: int) -> None:
    """One bit, behind everybody's back."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 4]))


def kvdisk(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvdisk", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        **options,
    )


def kvdisk_json(*arguments: object, status: int = 0) -> Any:
    done = kvdisk(*arguments, "--json")
    assert done.returncode == status, done.stderr
    return json.loads(done.stdout)


HOLD = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import caches
tier = caches.open_tier(Path(sys.argv[2]))
tier.store(caches.keys_of(20), range(20))
assert caches.result_of(tier).ok
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def live_server(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the cache open, with 20 blocks stored."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(Path(__file__).parent), str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        yield child
    finally:
        child.kill()
        child.communicate()

"""A5, A6, A15, A16, A34: what a dead process leaves behind, and what its files look like.

Whatever the record file looks like, the tier opens; cold at worst, and the start after that is a
clean one.
"""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvdisk.rank_header import HEADER_BYTES, RECORD_BYTES, RECORD_PAGE_BYTES
from kvdisk.transfer import RowStatus
from tests.faults.disks import freeze, loop_ext4, thaw, tmpfs
from tests.tier.tier_rig import KIB, PATIENCE_S, TierRig, content, key_of, keys_of, ok, tier_rig

OK = RowStatus.OK
KEYS = keys_of(range(64))
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def filled(tmp_path: Path) -> TierRig:
    """A closed tier whose 64 slots, two record pages, are full."""
    with tier_rig(tmp_path / "kv") as rig:
        assert rig.store(KEYS) == ok(64)
    return rig


def reopen(filled: TierRig) -> TierRig:
    return TierRig(*filled.config.paths, legal=filled.legal)


def opens_and_works(filled: TierRig, found: int | None = None) -> list[str]:
    """Open, find ``found`` right blocks (None: any number), store the rest, close; its notes.
    Afterwards a start has nothing to say."""
    with tier_rig(*filled.config.paths, legal=filled.legal) as rig:
        hits = rig.hits(KEYS)
        assert found is None or hits == found
        assert rig.store(KEYS) == ok(64)
        notes = rig.tier.health().facts["notes"]
        assert isinstance(notes, list)
    with tier_rig(*filled.config.paths, legal=filled.legal) as second:
        assert second.tier.health().facts["notes"] == []
        assert second.hits(KEYS) == 64
    return notes


# --- A15: a damaged index


def cut_and_count(filled: TierRig, original: bytes, size_bytes: int) -> None:
    """Cut to ``size_bytes``: every record that is whole is found, and no other. What is cut off
    reads as zeros later, so a record that ended with zeros is whole without them."""
    filled.record_files[0].write_bytes(original[:size_bytes])
    rig = reopen(filled)
    later = original[:size_bytes].ljust(len(original), b"\0")
    records = range(HEADER_BYTES, len(original), RECORD_BYTES)
    whole = sum(later[at : at + RECORD_BYTES] == original[at : at + RECORD_BYTES] for at in records)
    assert rig.tier.stats().counters.restored == whole
    rig.close()


@pytest.mark.parametrize("part", ["last record", "record bounds"])
def test_a15_record_file_cut_in_its_last_page(filled: TierRig, part: str) -> None:
    """At every byte of the last record, and around every record of the last page. `make cuts`
    cuts at every byte of the page."""
    record_file = filled.record_files[0]
    original = record_file.read_bytes()
    last_page = len(original) - RECORD_PAGE_BYTES
    if part == "last record":
        cuts = range(len(original) - RECORD_BYTES, len(original))
    else:
        step = 1 if os.environ.get("KVDISK_CUTS") == "all" else RECORD_BYTES
        bounds = range(last_page, len(original), step)
        cuts = sorted({at + shift for at in bounds for shift in (-1, 0, 1)})
    for size_bytes in cuts:
        cut_and_count(filled, original, size_bytes)
    opens_and_works(filled)


def _older_version(header: bytearray) -> None:
    header[8] = 0


def _newer_version(header: bytearray) -> None:
    header[8] = 99


def _flipped(header: bytearray) -> None:
    header[20] ^= 4


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda old: b"",
    "a byte": lambda old: old[:1],
    "header cut": lambda old: old[:2000],
    "header only": lambda old: old[:HEADER_BYTES],
    "random": lambda old: os.urandom(len(old)),
    "random header": lambda old: os.urandom(HEADER_BYTES) + old[HEADER_BYTES:],
    "random records": lambda old: old[:HEADER_BYTES] + os.urandom(len(old) - HEADER_BYTES),
    "zeros": lambda old: bytes(len(old)),
    "twice as long": lambda old: old + old[HEADER_BYTES:],
}
HEADERS: dict[str, Callable[[bytearray], None]] = {
    "older version": _older_version,
    "newer version": _newer_version,
    "flipped bit": _flipped,
}


@pytest.mark.parametrize("damage", [*DAMAGE, *HEADERS])
def test_a15_damaged_record_file(
    filled: TierRig, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    record_file = filled.record_files[0]
    original = record_file.read_bytes()
    if damage in DAMAGE:
        record_file.write_bytes(DAMAGE[damage](original))
    else:
        header = bytearray(original)
        HEADERS[damage](header)
        record_file.write_bytes(header)
    notes = opens_and_works(filled, found=64 if damage == "twice as long" else 0)
    says_so = damage not in ("empty", "header only", "random records", "twice as long")
    assert bool(notes) == says_so, notes
    assert all(note in caplog.messages for note in notes)


@pytest.mark.root
def test_a15_record_file_that_cannot_be_read(filled: TierRig) -> None:
    """A directory in its place is refused untouched; without rights it is made readable again."""
    record_file = filled.record_files[0]
    record_file.chmod(0)
    with tier_rig(*filled.config.paths, legal=filled.legal) as rig:
        assert rig.hits(KEYS) == 64
    assert stat.S_IMODE(record_file.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", ["cut", "empty", "random", "zeros"])
def test_a15_damaged_data_file(filled: TierRig, kind: str) -> None:
    data_file = filled.data_files[0]
    size_bytes = data_file.stat().st_size
    slot_bytes = 16 * KIB
    if kind == "cut":
        os.truncate(data_file, 10 * slot_bytes + 5000)
    elif kind == "empty":
        os.truncate(data_file, 0)
    else:
        with data_file.open("r+b") as file:
            file.write(os.urandom(size_bytes) if kind == "random" else bytes(size_bytes))
    opens_and_works(filled, found=10 if kind == "cut" else 0)


@pytest.mark.slow
def test_a15_every_restart_after_a_kill_opens(tmp_path: Path) -> None:
    """See crash.py: the same, 300 times, is ``make crash``."""
    from tests.tier import crash

    assert crash.campaign(4, 15, tmp_path).wrong == 0


# --- A16: leftovers


@pytest.mark.root
def test_a16_five_kills_on_a_disk_that_holds_one_and_a_half_caches(tmp_path: Path) -> None:
    program = """
import os, signal, sys
from pathlib import Path
from tests.tier.tier_rig import KIB, TierRig, keys_of
rig = TierRig(Path(sys.argv[1]), slots=64, block_bytes=64 * KIB)
assert set(rig.store(keys_of(range(64)))) == {1}
for n in range(64): rig.submit_store(keys_of(1000 + n), first_block=n)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with tmpfs(tmp_path, size_mib=6) as mount:
        names: set[str] = set()
        for cycle in range(5):
            done = subprocess.run(
                [sys.executable, "-c", program, str(mount / "kv")],
                cwd=ROOT,
                capture_output=True,
                timeout=PATIENCE_S,
            )
            assert done.returncode == -signal.SIGKILL, done.stderr
            found = {str(path.relative_to(mount)) for path in mount.rglob("*")}
            assert cycle == 0 or found == names, "something is left behind"
            names = found
        legal = {key: {0} for key in [*keys_of(range(64)), *keys_of(range(1000, 1064))]}
        with tier_rig(mount / "kv", slots=64, block_bytes=64 * KIB, legal=legal) as rig:
            assert rig.tier.stats().counters.restored > 0
            assert rig.hits(list(legal)) > 0


def test_a16_what_is_not_to_persist_is_gone_with_the_process(tmp_path: Path) -> None:
    with tier_rig(tmp_path, persist=False) as rig:
        assert rig.store(KEYS) == ok(64)
        assert not rig.data_files[0].exists()
        assert rig.load(KEYS) == ok(64)
    with tier_rig(tmp_path) as again:
        assert again.hits(KEYS) == 0


# --- A34: names and modes


@pytest.mark.parametrize(
    "model",
    ["org/model", "../../etc/passwd", "a" * 300, "模型 ü", "with\nline", "x\0y", "/abs/olute"],
    ids=["slash", "dots", "long", "unicode", "newline", "nul", "absolute"],
)
def test_a34_names_are_hashed_whatever_the_model_is_called(tmp_path: Path, model: str) -> None:
    root = tmp_path / "kv"
    secret = b"the prompt of somebody"
    with tier_rig(root, identity={"model": model, "extra": {"salt": "a/../b" * 50}}) as rig:
        assert rig.store([secret, key_of(1)]) == ok(2)
    for path in root.rglob("*"):
        assert len(path.name) <= 64
        assert path.name.isascii()
        assert path.resolve().is_relative_to(root.resolve())
        assert b"prompt" not in path.name.encode()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kv"]
    with tier_rig(root, identity={"model": model, "extra": {"salt": "a/../b" * 50}}) as again:
        assert again.tier.stats().counters.restored == 2


def test_a34_nobody_else_can_read_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with tier_rig(tmp_path / "kv") as rig:
            assert rig.store(KEYS) == ok(64)
            paths = [tmp_path / "kv", *(tmp_path / "kv").rglob("*")]
    finally:
        os.umask(before)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_a34_keys_never_reach_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    secret = b"the prompt of somebody"
    with tier_rig(tmp_path) as rig:
        assert rig.store([secret]) == ok(1)
        os.truncate(rig.data_files[0], 0)
        assert OK not in rig.load([secret])
    assert caplog.messages
    assert not any("prompt" in text or secret.hex() in text for text in caplog.messages)


# --- A5, A6: the caller's blocks


def test_a5_a_source_may_be_overwritten_once_it_is_free(tmp_path: Path) -> None:
    """As soon as the contract allows, another request's bytes go there, a hundred times."""
    with tier_rig(tmp_path, block_bytes=64 * KIB) as rig:
        for generation in range(100):
            storing = rig.submit_store(KEYS[:8], generation)
            rig.wait_until(lambda storing=storing: storing in rig.source_free)
            for block in range(8):
                rig.blocks.fill(block, content(key_of(9999), block, 64 * KIB))
            assert rig.finish(storing) == ok(8)
            assert rig.load(KEYS[:8]) == ok(8)
            assert rig.loaded_generation(0) == generation
            rig.tier.drop(KEYS[:8])


@pytest.mark.root
def test_a5_the_source_is_free_long_before_a_slow_disk_is_done(tmp_path: Path) -> None:
    with loop_ext4(tmp_path) as mount, tier_rig(mount / "kv", ring_bytes=8 << 20) as rig:
        freeze(mount)
        storing = rig.submit_store(KEYS[:16])
        rig.wait_until(lambda: storing in rig.source_free)
        assert storing not in rig.results
        for block in range(16):
            rig.blocks.fill(block, content(key_of(9999), 0, 16 * KIB))
        thaw(mount)
        assert rig.finish(storing) == ok(16)
        assert rig.load(KEYS[:16]) == ok(16)


@pytest.mark.parametrize("block_bytes", [15 * 256, 16 * 256, 17 * 256, 4 * KIB - 64, 4 * KIB + 64])
def test_a6_blocks_that_do_not_fill_their_slot(tmp_path: Path, block_bytes: int) -> None:
    """They come back whole, and what is behind them on the disk is zeros, never old memory."""
    slot_bytes = -(-block_bytes // 4096) * 4096
    with tier_rig(tmp_path, slots=512, blocks=64, block_bytes=block_bytes) as rig:
        assert rig.store(KEYS) == ok(64)
        rig.blocks.fill(0, 0xEE)
        assert rig.load(KEYS) == ok(64)
    data = rig.data_files[0].read_bytes()
    for start in range(0, 64 * slot_bytes, slot_bytes):
        assert not any(data[start + block_bytes : start + slot_bytes])


def test_a6_a_shorter_block_is_never_served_for_a_longer_one(tmp_path: Path) -> None:
    """The layout is part of the identity; files of another geometry have nothing to give."""
    with tier_rig(tmp_path, slots=512, block_bytes=8 * KIB) as rig:
        assert rig.store(KEYS) == ok(64)
    fields = rig.identity.layout
    with tier_rig(tmp_path, slots=512, block_bytes=4 * KIB, identity={"layout": fields}) as other:
        assert other.hits(KEYS) == 0

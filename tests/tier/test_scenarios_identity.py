"""A7, A8, A9, A11, A17: whose bytes these are, and who may use them.

A cache that is opened under another identity has nothing to give, whatever lies on the disk.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdisk import identity as identity_module
from kvdisk.errors import BusyError
from kvdisk.layout import Layout
from kvdisk.transfer import RowStatus
from kvdisk.worker import TierWorker
from tests.tier.tier_rig import (
    KIB,
    PATIENCE_S,
    TierRig,
    config_of,
    key_of,
    keys_of,
    ok,
    tier_rig,
)

KEYS = keys_of(range(32))
ROOT = Path(__file__).resolve().parents[2]

CHANGES: list[dict[str, Any]] = [
    {"dtype": "float16"},
    {"dtype": "fp8_e4m3"},
    {"quantization": "fp8 scales 0.5"},
    {"block_tokens": 32},
    {"parallel": {"tensor": 2}},
    {"key_hash": "test seed 2"},
    {"extra": {"rope_theta": 500000.0}},
    {"extra": {"runner": "v2"}},
    {"extra": {"layers": 80, "heads": 8}},
    {"layout": {"order": "heads before tokens"}},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: "-".join(change))
def test_a7_one_changed_field_hits_nothing_and_loses_nothing(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with tier_rig(tmp_path) as rig:
        assert rig.store(KEYS) == ok(32)
    with tier_rig(tmp_path, identity=change) as other:
        assert other.tier.lookup(KEYS) == 0
        assert other.load(KEYS) == [RowStatus.MISS] * 32
        assert other.store(KEYS, generation=1) == ok(32)
    with tier_rig(tmp_path, legal=rig.legal) as again:
        assert again.load(KEYS) == ok(32)


def test_a7_another_order_of_the_same_bytes_hits_nothing(tmp_path: Path) -> None:
    """Equal sizes, equal identity as far as a careless engine says; the layout differs."""
    with tier_rig(tmp_path) as rig:
        assert rig.store(KEYS) == ok(32)
    layout = Layout.from_tensors([np.zeros((128, 16 * KIB), dtype=np.uint8)])
    with TierWorker.open(layout, rig.identity, rig.config) as worker:
        opened = worker.take_opened()
        assert len(opened.restored_slots) == 0
        assert any("another cache" in note for note in opened.facts["notes"])  # type: ignore[attr-defined]


def test_a7_another_rank_or_world_hits_nothing(tmp_path: Path) -> None:
    with tier_rig(tmp_path) as rig:
        assert rig.store(KEYS) == ok(32)
    config = config_of([tmp_path], 64, 16 * KIB, ranks=2)
    for rank in (0, 1):
        with TierWorker.open(
            rig.blocks.layout, rig.identity, config, rank=rank, world_size=2
        ) as worker:
            assert len(worker.take_opened().restored_slots) == 0
    with tier_rig(tmp_path, legal=rig.legal) as again:
        assert again.load(KEYS) == ok(32)


def test_a7_another_format_version_hits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tier_rig(tmp_path) as rig:
        assert rig.store(KEYS) == ok(32)
    with monkeypatch.context() as patch:
        patch.setattr(identity_module, "FORMAT", identity_module.FORMAT + 1)
        with tier_rig(tmp_path) as newer:
            assert newer.load(KEYS) == [RowStatus.MISS] * 32
    with tier_rig(tmp_path, legal=rig.legal) as again:
        assert again.load(KEYS) == ok(32)


def test_a7_the_fingerprint_is_the_same_in_any_process_and_order() -> None:
    program = """
from kvdisk.identity import Identity
fields = dict(model="m", weights="w", dtype="bfloat16", block_tokens=16, key_hash="k",
              layout={"a": 1, "b": [1, 2]}, parallel={"tensor": 2, "pipeline": 1},
              extra={"x": 1, "y": {"p": 1, "q": 2}})
def turned(value):
    return {k: turned(v) for k, v in reversed(value.items())} if isinstance(value, dict) else value
print(Identity(**fields).fingerprint.hex(), Identity(**turned(fields)).fingerprint.hex())
"""
    found = set()
    for seed in (None, "0", "1", "random"):
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True
        )
        found |= set(done.stdout.split())
    assert len(found) == 1, found


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"weights": "revision 2"},
        {"extra": {"adapter": "a"}},
        {"extra": {"salt": "tenant"}},
    ],
    ids=["model", "weights", "adapter", "salt"],
)
def test_a8_other_weights_adapters_and_tenants_hit_nothing(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    with tier_rig(tmp_path) as rig:
        assert rig.store(KEYS) == ok(32)
        with tier_rig(tmp_path, identity=change) as other:  # beside it, at the same time
            assert other.load(KEYS) == [RowStatus.MISS] * 32


@pytest.mark.parametrize("backend", ["uring", "threads"])
def test_a8_nothing_older_than_a_clear_is_ever_found(tmp_path: Path, backend: str) -> None:
    """With 100 stores in flight, at once, after they have ended, and after a restart."""
    keys, others = keys_of(range(100)), keys_of(range(100, 200))
    with tier_rig(tmp_path, slots=256, backend=backend) as rig:
        assert rig.store(keys) == ok(100)
        under_way = [rig.submit_store([key], first_block=n) for n, key in enumerate(others)]
        assert rig.tier.clear()
        assert rig.tier.lookup(keys) == 0
        assert not rig.tier.readable([*keys, *others]).any()
        for transfer_id in under_way:
            rig.finish(transfer_id)
        rig.legal.clear()
        assert rig.hits([*keys, *others]) == 0
        assert rig.store(keys[:50], generation=1) == ok(50)
    with tier_rig(tmp_path, slots=256, legal=rig.legal) as again:
        assert again.hits([*keys, *others]) == 50  # and these are of generation 1


def test_a8_a_kill_right_after_a_clear_brings_nothing_back(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from tests.tier.tier_rig import TierRig, keys_of
rig = TierRig(Path({str(tmp_path)!r}), slots=256)
rig.store(keys_of(range(100)))
for n, key in enumerate(keys_of(range(100, 200))): rig.submit_store([key], first_block=n)
assert rig.tier.clear()
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=PATIENCE_S
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    with tier_rig(tmp_path, slots=256) as again:
        assert again.hits(keys_of(range(200))) == 0
        assert again.tier.stats().counters.restored == 0


# --- A9, A17: several processes and one directory

RANK_PROGRAM = """
import sys, json
import numpy as np
from pathlib import Path
from kvdisk.errors import BusyError
from kvdisk.messages import Transfer
from kvdisk.transfer import Direction
from kvdisk.worker import TierWorker
from tests.tier.tier_rig import KIB, Blocks, config_of, content, identity_of, keys_of
root, rank, code = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
blocks = Blocks(32, 16 * KIB)
config = config_of([root], 64, 16 * KIB, ranks=4)
print("ready", flush=True)
sys.stdin.readline()
try:
    worker = TierWorker.open(
        blocks.layout, identity_of(blocks.layout), config, rank=rank, world_size=4)
except BusyError as error:
    print(json.dumps({"busy": str(error), "holder": error.holder}), flush=True)
    sys.exit()
keys = keys_of(range(32))
for n, key in enumerate(keys):
    blocks.fill(n, content(key, code, 16 * KIB))
def move(id, direction, first):
    rows = np.arange(32)
    worker.submit(Transfer(id, direction, keys, rows.astype(np.int32), rows + first, rows))
    while True:
        worker.wait(60)
        for result in worker.poll().results:
            return result.statuses.tolist()
stored = move(1, Direction.STORE, 0)
print(json.dumps({"stored": stored}), flush=True)
sys.stdin.readline()
loaded = move(2, Direction.LOAD, 32)
right = all((blocks.read(32 + n) == content(k, code, 16 * KIB)).all() for n, k in enumerate(keys))
print(json.dumps({"loaded": loaded, "right": right}), flush=True)
"""


class RankProcess:
    def __init__(self, root: Path, rank: int, code: int) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", RANK_PROGRAM, str(root), str(rank), str(code)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.line() == "ready"

    def line(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def go_on(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write("\n")
        self.child.stdin.flush()

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()


@pytest.mark.slow
def test_a9_ranks_that_start_together_read_their_own_bytes(tmp_path: Path) -> None:
    processes = [RankProcess(tmp_path, rank, code=10 + rank) for rank in range(4)]
    try:
        for _ in range(2):
            for process in processes:
                process.go_on()
            answers = [json.loads(process.line()) for process in processes]
        assert answers == [{"loaded": ok(32), "right": True}] * 4
    finally:
        for process in processes:
            process.end()


@pytest.mark.slow
def test_a9_a_clash_of_ranks_is_refused_and_harms_nobody(tmp_path: Path) -> None:
    processes = [RankProcess(tmp_path, rank=2, code=20 + n) for n in range(4)]
    try:
        for process in processes:
            process.go_on()
        answers = [json.loads(process.line()) for process in processes]
        won = [
            process
            for process, answer in zip(processes, answers, strict=True)
            if "stored" in answer
        ]
        assert len(won) == 1, "exactly one has the rank"
        for answer in answers:
            if "busy" in answer:
                assert answer["holder"] == won[0].child.pid
                assert "rank" in answer["busy"]
        won[0].go_on()
        assert json.loads(won[0].line()) == {"loaded": ok(32), "right": True}
    finally:
        for process in processes:
            process.end()


def test_a17_the_second_opener_is_refused_by_any_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "kv"
    (tmp_path / "link").symlink_to(root)
    with tier_rig(root) as rig:
        assert rig.store(KEYS) == ok(32)
        monkeypatch.chdir(tmp_path)
        for name in (root, tmp_path / "link", tmp_path / "x" / ".." / "kv"):
            with pytest.raises(BusyError, match=str(root.name)) as caught:
                TierRig(name)
            assert caught.value.holder == os.getpid()
        assert rig.load(KEYS) == ok(32)


def test_a17_the_lock_is_gone_when_its_holder_dies(tmp_path: Path) -> None:
    holder = RankProcess(tmp_path, rank=0, code=1)
    holder.go_on()
    assert "stored" in holder.line()
    second = RankProcess(tmp_path, rank=0, code=2)
    second.go_on()
    assert json.loads(second.line())["holder"] == holder.child.pid
    second.end()
    holder.end()
    third = RankProcess(tmp_path, rank=0, code=3)
    third.go_on()
    assert json.loads(third.line()) == {"stored": ok(32)}
    third.end()


# --- A11: keys


@pytest.mark.parametrize("seed", [None, "0", "random"])
def test_a11_another_process_finds_what_this_one_stored(tmp_path: Path, seed: str | None) -> None:
    program = f"""
from pathlib import Path
from tests.tier.tier_rig import TierRig, keys_of, ok
rig = TierRig(Path({str(tmp_path)!r}))
assert rig.store(keys_of(range(16)) + [b"k" * 300]) == ok(17)
rig.close()
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    environment |= {} if seed is None else {"PYTHONHASHSEED": seed}
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, check=True)
    with tier_rig(tmp_path, legal={k: {0} for k in [*KEYS[:16], b"k" * 300]}) as rig:
        assert rig.load([*KEYS[:16], b"k" * 300]) == ok(17)


def test_a11_nearly_equal_keys_stay_apart(tmp_path: Path) -> None:
    keys = [b"12345678-a", b"12345678-b", b"12345678", b"12345678-a\0", b"k" * 65, b"k" * 66]
    with tier_rig(tmp_path) as rig:
        for count in range(1, len(keys)):
            assert rig.store([keys[count - 1]]) == ok(1)
            assert rig.tier.readable(keys).sum() == count
        assert rig.load(keys) == [*ok(len(keys) - 1), RowStatus.MISS]


# --- A14: two writers of one key


def test_a14_two_stores_of_one_key_make_one_block_whole(tmp_path: Path) -> None:
    """The second is told that a first is under way, or that the key is here; a reader loops."""
    key = key_of(1)
    with tier_rig(tmp_path) as rig:
        for generation in range(0, 1000, 2):
            first = rig.submit_store([key], generation, first_block=0)
            second = rig.submit_store([key], generation + 1, first_block=1)
            reader = rig.submit_load([key])
            assert rig.finish(first) == ok(1)
            assert rig.finish(second)[0] in (RowStatus.BUSY, RowStatus.OK)
            assert rig.finish(reader)[0] in (RowStatus.MISS, RowStatus.OK)
            assert rig.load([key]) == ok(1)
            assert rig.loaded_generation(0) == generation, "the first one is the one that counts"
            slots = rig.tier.stats().slots
            assert (slots.used, slots.resident) == (1, 1)
            assert rig.tier.drop([key]) == 1


def test_a14_a_key_is_there_only_once_it_is_whole(tmp_path: Path) -> None:
    with tier_rig(tmp_path) as rig:
        storing = rig.submit_store(KEYS)
        assert rig.tier.lookup(KEYS) == 0, "nothing has been polled yet"
        assert rig.finish(storing) == ok(32)
        assert rig.tier.lookup(KEYS) == 32


def test_tiers_of_different_models_share_a_root_in_threads(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(model: str, code: int) -> None:
        try:
            with tier_rig(tmp_path, identity={"model": model}) as rig:
                assert rig.store(KEYS, generation=code) == ok(32)
                assert rig.load(KEYS) == ok(32)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"model {n}", n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert not failures
    assert len(list(tmp_path.iterdir())) == 4

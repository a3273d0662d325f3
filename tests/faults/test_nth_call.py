"""A1, A21, A29: the Nth system call of the whole tier answered otherwise by a real kernel.

strace stands between and answers chosen preadv and pwritev calls of the `threads` backend itself.
The simulator has every answer at every N (native/tests/test_nth_fault.cpp); here it is shown that
the same holds where Python opens, probes and tests files as well: the tier opens or says why not,
serves right bytes or misses, ends every transfer, and the next start works.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdisk.transfer import RowStatus
from tests.tier.tier_rig import KIB, PATIENCE_S, Blocks, identity_of, keys_of, ok, tier_rig

ROOT = Path(__file__).resolve().parents[2]
CALLS = {"store": "pwritev,pwrite64", "load": "preadv,pread64"}
FILES = {"store": ["rank-0-of-1.kv", "rank-0-of-1.idx"], "load": ["rank-0-of-1.kv"]}
ANSWERS = ["error=EIO", "error=ENOSPC", "error=EINTR", "error=EAGAIN", "error=ENOMEM", "retval=0"]
KEYS = keys_of(range(32))
TRANSIENT = ("error=EINTR", "error=EAGAIN", "error=ENOMEM")

PROGRAM = """
import sys
from pathlib import Path
from kvdisk.errors import KVDiskError
from tests.tier.tier_rig import TierRig, keys_of
keys = keys_of(range(32))
try:
    rig = TierRig(Path(sys.argv[1]), backend="threads", iodepth=2, merge_bytes=4096)
except KVDiskError as error:
    print("refused", type(error).__name__, getattr(error, "errno", 0))
    sys.exit()
counts = []
for generation in range(4):
    stored = rig.store(keys, generation).count(1)
    loaded = rig.load(keys).count(1)
    assert loaded <= 32
    counts.append((stored, loaded))
    rig.tier.drop(keys)
rig.tier.check()
assert rig.tier.stats().engine_sum("ring_used") == 0
rig.close()
print("ran", counts[-1])
"""


def run(directory: Path, *inject: str) -> str:
    python = [sys.executable, "-c", PROGRAM, str(directory)]
    done = subprocess.run(
        ["strace", "-f", "-qq", "-o", "/dev/null", *inject, *python],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(autouse=True)
def strace() -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run(["strace", "-o", "/dev/null", "true"], capture_output=True)
    if tried.returncode != 0:
        pytest.skip("this process may not trace its children")


@pytest.mark.slow
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("direction", CALLS)
@pytest.mark.parametrize("when", ["2", "1+3", "5+"])
def test_nth_call_answered_otherwise(
    tmp_path: Path, direction: str, answer: str, when: str
) -> None:
    """Counted per thread: the second, every third from the first, all from the fifth on."""
    calls = CALLS[direction]
    namespace = identity_of(Blocks(64, 16 * KIB).layout).namespace
    files = [tmp_path / namespace / name for name in FILES[direction]]
    paths = [word for file in files for word in ("-P", str(file))]
    said = run(
        tmp_path, *paths, "-e", f"trace={calls}", "-e", f"inject={calls}:{answer}:when={when}"
    )
    assert said.startswith(("ran", "refused")), said
    if when == "2" or (answer in TRANSIENT and when == "1+3"):
        assert said == "ran (32, 32)\n", "what happens once, or passes, is overcome"
    else:
        assert said != "ran (32, 32)\n", "no call was answered otherwise"
    with tier_rig(tmp_path, legal={key: {0, 1, 2, 3} for key in KEYS}) as rig:
        assert set(rig.load(KEYS)) <= {RowStatus.OK, RowStatus.MISS, RowStatus.CORRUPT}
        rig.tier.drop(KEYS)
        assert rig.store(KEYS, generation=4) == ok(32)
        assert rig.load(KEYS) == ok(32)

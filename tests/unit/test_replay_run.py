"""Replays on real files: the same hits as simulated, every byte compared, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdisk.bench.job import Geometry
from kvdisk.cli import main
from kvdisk.replay.content import Contents
from kvdisk.replay.job import Options, make_job
from kvdisk.replay.result import Outcome
from kvdisk.replay.run import run
from kvdisk.replay.simulate import simulate

WORKLOAD = "synthetic:mixed,requests=150,documents=20,document_tokens=4000"
SMALL = ["--bs", "16k", "--no-curve"]


def nothing(_: int) -> None:
    pass


def both(path: Path, **options: Any) -> Iterator[tuple[Outcome, Outcome]]:
    """Each setup on the disk and simulated."""
    job = make_job(Options(**{"trace": WORKLOAD, "path": path, "bs": "16k", **options}))
    for setup in job.setups:
        yield run(job, setup, nothing), simulate(job, setup, nothing)


@pytest.mark.parametrize("device_cache", [None, "1MiB"])
@pytest.mark.parametrize("admission", ["all", "second-touch"])
def test_the_disk_has_the_hits_of_the_simulation(
    admission: str, device_cache: str | None, tmp_path: Path
) -> None:
    options = {
        "capacity": "2MiB,16MiB",
        "eviction": "lru,s3fifo",
        "device_cache": device_cache,
    }
    for real, simulated in both(tmp_path, admission=admission, **options):
        assert np.array_equal(real.device_blocks, simulated.device_blocks)
        assert np.array_equal(real.hit_blocks, simulated.hit_blocks), real.setup
        assert real.refused == {k: n for k, n in simulated.refused.items() if n}
        assert (real.evicted, real.blocks_written) == (simulated.evicted, simulated.blocks_written)
        assert real.verified == real.blocks_read > 0
        assert real.wrong == 0
        assert real.lost == {}
        assert ((real.load_ns > 0) == (real.hit_blocks > 0)).all()
    assert list(tmp_path.iterdir()) == []


def test_blocks_larger_than_memory_for_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvdisk.replay.run._POOL_BYTES", 5 * 16384)
    trace = "synthetic:documents,requests=30,documents=2,document_tokens=2000"
    options = {"trace": trace, "capacity": "3MiB,16MiB", "eviction": "lru"}
    for real, simulated in both(tmp_path, **options):
        assert real.hit_blocks.max() > 5
        assert np.array_equal(real.hit_blocks, simulated.hit_blocks), real.setup
        assert real.verified == real.blocks_read
        assert real.wrong == 0


def test_at_a_speed_requests_come_at_their_times(tmp_path: Path) -> None:
    trace = "synthetic:conversation,requests=60,rate=20,think=100ms"
    job = make_job(Options(trace=trace, path=tmp_path, bs="16k", capacity="64MiB", speed="4"))
    [setup] = job.setups
    outcome = run(job, setup, nothing)
    assert outcome.elapsed_s >= job.trace.span_s / 4
    assert outcome.verified == outcome.blocks_read > 0
    assert outcome.wrong == 0
    # What is still being stored is not there yet, so there may be fewer hits, never more.
    assert (outcome.hit_blocks <= simulate(job, setup, nothing).hit_blocks).all()


# --- content --------------------------------------------------------------------------------------


def test_each_byte_of_a_block_has_one_right_value() -> None:
    contents = Contents(Geometry(4, 4096, "made"), 3, seed=5)
    marks = contents.marks(np.array([0, 1, -1, 2**62]))
    assert len(set(marks.tolist())) == 4
    contents.write(0, marks[0])
    assert contents.holds(0, marks[0])
    assert not contents.holds(0, marks[1])
    assert not contents.holds(1, marks[0])
    raw = contents._words.view(np.uint8)
    for layer, place in [(0, 0), (1, 4095), (3, 2000)]:
        raw[layer, 0, place] ^= 1
        assert not contents.holds(0, marks[0])
        raw[layer, 0, place] ^= 1
    assert contents.holds(0, marks[0])
    contents.wipe(0)
    assert not contents.holds(0, marks[0])


def test_content_follows_from_the_seed_and_the_id() -> None:
    geometry = Geometry(1, 8192, "made")
    first, second, other = (Contents(geometry, 1, seed) for seed in (7, 7, 8))
    for contents in (first, second, other):
        contents.write(0, contents.marks(np.array([3]))[0])
    assert np.array_equal(first._words, second._words)
    assert not np.array_equal(first._words, other._words)


# --- the command ----------------------------------------------------------------------------------


def test_a_wrong_byte_is_exit_status_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tier proves what it loads, so what the disk spoils is a miss: spoil what was to be stored.
    write = Contents.write
    written = 0

    def write_and_spoil(self: Contents, block: int, mark: np.uint64) -> None:
        nonlocal written
        write(self, block, mark)
        written += 1
        if written == 5:  # of the first request: its later turns load it
            self._words.view(np.uint8)[-1, block, -1] ^= 1

    monkeypatch.setattr(Contents, "write", write_and_spoil)
    trace = "synthetic:conversation,requests=150,prompts=1,prompt_tokens=20000"
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", trace, "--path", str(tmp_path), *SMALL, "--capacity", "64MiB"])
    assert exit_info.value.code == 1
    assert "WRONG DATA" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    disk, picture = tmp_path / "disk", tmp_path / "picture.png"
    disk.mkdir()
    arguments = [WORKLOAD, "--path", str(disk), "--bs", "16k", "--capacity", "2MiB,16MiB"]
    with pytest.raises(SystemExit) as exit_info:
        main(
            [
                "replay",
                *arguments,
                "--eviction",
                "lru,s3fifo",
                "--json",
                "-",
                "--plot",
                str(picture),
            ],
            prog_name="kvdisk",
        )
    captured = capsys.readouterr()
    assert exit_info.value.code == 0, captured.err
    document = json.loads(captured.out)
    assert document["kvdisk"]["place"]["file_system"]
    assert [each["simulated"] for each in document["runs"]] == [False] * 4
    for each in document["runs"]:
        assert each["verified"] == each["hit_blocks"] > 0
        assert each["hit_share"] == each["simulation"]["hit_share"]
        assert 0 < each["load_ms"]["p50"] <= each["load_ms"]["p99"]
        assert each["block_load_ns"]["N"] == each["hit_blocks"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "every loaded byte compared" in captured.err
    assert list(disk.iterdir()) == []


def test_no_room_on_the_disk_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", WORKLOAD, "--path", str(tmp_path), *SMALL, "--capacity", "900TiB"])
    assert exit_info.value.code == 2
    assert "lower capacity" in capsys.readouterr().err.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("speed", ["0.01", "max"])
def test_an_end_leaves_nothing_behind(end: signal.Signals, speed: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    (tmp_path / ".kvdisk-replay-of-somebody-else").write_text("stays")
    before = set(tmp_path.rglob("*"))
    trace = "synthetic:mixed,requests=4000,documents=100"
    command = [sys.executable, "-m", "kvdisk", "replay", trace, "--path", str(tmp_path)]
    command += ["--bs", "64k", "--capacity", "256MiB", "--speed", speed]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert "run 1 of 1" in process.stderr.readline()
        wait_for_file(process.pid)
        while set(tmp_path.rglob("*")) != before:  # its directory goes once the tier is open
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(end)
        rest = process.stderr.read()
        status = process.wait(timeout=60)
    assert "Traceback" not in rest
    if end == signal.SIGINT:
        assert status == 130
        assert "interrupted" in rest
    assert set(tmp_path.rglob("*")) == before


def wait_for_file(pid: int) -> None:
    """Until the process has the tier's nameless file open."""
    while True:
        for name in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if ".kv (deleted)" in os.readlink(name):
                    return
            except FileNotFoundError:
                continue
        time.sleep(0.02)

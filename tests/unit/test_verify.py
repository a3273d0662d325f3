"""`kvdisk verify`: damage is found and named, a live server is neither disturbed nor blamed."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from caches import (
    BLOCK,
    BLOCKS,
    fill,
    flip,
    keys_of,
    kvdisk,
    kvdisk_json,
    open_tier,
    result_of,
)

from kvdisk import scrub as scrub_module
from kvdisk.scrub import Pace, RankScrub
from kvdisk.transfer import RowStatus


def scrub(directory: Path, progress: Any = lambda: None, **options: Any) -> scrub_module.FileReport:
    stop = threading.Event()
    made = RankScrub(
        directory, "rank-0-of-1", **{"jobs": 2, "pace": Pace(0, stop), "stop": stop, **options}
    )
    made.run(progress)
    return made.report


def test_a_clean_cache(tmp_path: Path) -> None:
    fill(tmp_path / "kv", 20)
    done = kvdisk("verify", tmp_path / "kv")
    assert done.returncode == 0, done.stderr
    assert "20 blocks checked, 0 damaged" in done.stdout
    found = kvdisk_json("verify", tmp_path / "kv")
    assert (found["complete"], found["clean"]) == (True, True)
    assert found["files"][0]["bytes"] == 20 * BLOCK
    assert not found["files"][0]["live"]


def test_every_kind_of_damage_is_listed_with_its_place(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 20)
    data, records = directory / "rank-0-of-1.kv", directory / "rank-0-of-1.idx"
    flip(data, 3 * BLOCK)
    flip(data, 7 * BLOCK + BLOCK - 1)
    flip(records, 4096 + 9 * 128 + 48)
    found = kvdisk_json("verify", tmp_path / "kv", status=1)
    (file,) = found["files"]
    assert not found["clean"]
    assert file["blocks"] == 19
    damaged = [(Path(d["file"]).name, d["slot"], d["offset"]) for d in file["damaged"]]
    assert damaged == [
        ("rank-0-of-1.kv", 3, 3 * BLOCK),
        ("rank-0-of-1.kv", 7, 7 * BLOCK),
        ("rank-0-of-1.idx", 9, 4096 + 9 * 128),
    ]
    text = kvdisk("verify", tmp_path / "kv")
    assert text.returncode == 1
    assert f"slot 7, offset {7 * BLOCK} of rank-0-of-1.kv: the bytes are not" in text.stdout


def test_swapped_zeroed_and_cut_slots_are_damage(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 20)
    data = directory / "rank-0-of-1.kv"
    content = bytearray(data.read_bytes())
    content[:BLOCK], content[BLOCK : 2 * BLOCK] = content[BLOCK : 2 * BLOCK], content[:BLOCK]
    content[2 * BLOCK : 2 * BLOCK + 4096] = bytes(4096)
    data.write_bytes(content[: 18 * BLOCK + 5000])
    report = scrub(directory)
    assert [each.slot for each in report.damaged] == [0, 1, 2, 18, 19]
    assert "the file ends after 5000" in report.damaged[3].why


@pytest.mark.parametrize("name", ["rank-0-of-1.kv", "rank-0-of-1.idx"])
def test_a_file_that_is_missing_is_a_problem_and_status_1(tmp_path: Path, name: str) -> None:
    directory = fill(tmp_path / "kv", 4)
    (directory / name).unlink()
    found = kvdisk_json("verify", directory, status=1)
    assert "cannot be opened" in found["files"][0]["problem"]


def test_a_damaged_header_is_a_problem_and_status_1(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 4)
    flip(directory / "rank-0-of-1.idx", 20)
    done = kvdisk("verify", directory)
    assert done.returncode == 1
    assert "PROBLEM: its header is damaged" in done.stdout


def test_a_flipped_bit_in_a_live_cache_is_found_and_the_cache_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with open_tier(root) as tier:
        tier.store(keys_of(20), range(20))
        assert result_of(tier).ok
        directory = Path(str(tier.health().facts["paths"][0]))  # type: ignore[index]
        flip(directory / "rank-0-of-1.kv", 5 * BLOCK + 100)
        (file,) = kvdisk_json("verify", root, status=1)["files"]
        assert file["live"]
        assert [each["slot"] for each in file["damaged"]] == [5]
        assert file["blocks"] == 20

        BLOCKS[40:60] = 0
        tier.load(keys_of(20), range(40, 60))
        statuses = result_of(tier).statuses
        assert [n for n, status in enumerate(statuses) if status != RowStatus.OK] == [5]
        assert statuses[5] == RowStatus.CORRUPT
        assert (BLOCKS[40:45] == BLOCKS[:5]).all()
        assert (BLOCKS[46:60] == BLOCKS[6:20]).all()
        tier.store([b"key-5"], [5])
        assert result_of(tier).ok


def test_a_busy_cache_is_not_called_damaged(tmp_path: Path, monkeypatch: Any) -> None:
    """Stores overwrite slots all the while; whatever is seen half-way is not damage."""
    monkeypatch.setattr(scrub_module, "_SETTLE_S", 0.5)
    stop = threading.Event()
    reports: list[scrub_module.FileReport] = []
    with open_tier(tmp_path / "kv") as tier:
        slots = int(str(tier.health().facts["slots"]))
        directory = Path(str(tier.health().facts["paths"][0]))  # type: ignore[index]

        def scrub_on() -> None:
            try:
                for _ in range(6):
                    reports.append(scrub(directory))
            finally:
                stop.set()

        thread = threading.Thread(target=scrub_on)
        thread.start()
        number = 0
        while not stop.is_set():
            tier.store(keys_of(32, number), range(32))
            assert (result_of(tier).statuses == RowStatus.OK).all()
            number += 32
        thread.join()
        assert number > slots  # or nothing was overwritten
    assert len(reports) == 6
    assert [report.damaged for report in reports] == [[]] * 6
    assert sum(report.blocks for report in reports) > 0
    assert all(report.live for report in reports)


class Rewritten:
    """Changes the file between a scrub's first and second look at a slot."""

    def __init__(self, monkeypatch: Any, change: Any) -> None:
        self.change = change
        self.looks = 0
        real = scrub_module._Look.fault_of

        def fault_of(look: Any, slot: int, record: Any, payload: Any) -> str:
            why = real(look, slot, record, payload)
            if slot == 5:
                self.looks += 1
                self.change(self.looks)
            return why

        monkeypatch.setattr(scrub_module._Look, "fault_of", fault_of)


def test_a_record_that_changes_after_a_mismatch_is_no_damage(
    tmp_path: Path, monkeypatch: Any
) -> None:
    directory = fill(tmp_path / "kv", 20)
    flip(directory / "rank-0-of-1.kv", 5 * BLOCK)

    def evict(look: int) -> None:
        with (directory / "rank-0-of-1.idx").open("r+b") as file:
            file.seek(4096 + 5 * 128)
            file.write(bytes(128))

    Rewritten(monkeypatch, evict)
    report = scrub(directory)
    assert (report.changed, report.damaged, report.blocks) == (1, [], 19)


def test_a_second_reading_that_is_right_is_counted_but_not_damage(
    tmp_path: Path, monkeypatch: Any
) -> None:
    directory = fill(tmp_path / "kv", 20)
    data = directory / "rank-0-of-1.kv"
    flip(data, 5 * BLOCK)
    Rewritten(monkeypatch, lambda look: flip(data, 5 * BLOCK) if look == 1 else None)
    report = scrub(directory)
    assert (report.unsteady, report.damaged, report.blocks) == (1, [], 20)


def test_new_bytes_under_an_old_record_of_a_live_cache_are_waited_for(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """What a store in flight looks like: payload written, record not yet."""
    monkeypatch.setattr(scrub_module, "_SETTLE_S", 0.2)
    with open_tier(tmp_path / "kv") as tier:
        tier.store(keys_of(20), range(20))
        assert result_of(tier).ok
        directory = Path(str(tier.health().facts["paths"][0]))  # type: ignore[index]
        data = directory / "rank-0-of-1.kv"
        flip(data, 5 * BLOCK)
        # After the second look more of the new bytes arrive, under the same record.
        Rewritten(monkeypatch, lambda look: flip(data, 5 * BLOCK + 1) if look == 2 else None)
        report = scrub(directory)
        assert (report.changed, report.damaged) == (1, [])
        flip(data, 5 * BLOCK)
        flip(data, 5 * BLOCK + 1)
        assert scrub(directory).clean


def test_what_a_server_clears_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: Any) -> None:
    """After a clear, records of before stay in the file, over slots that are written anew."""
    with open_tier(tmp_path / "kv") as tier:
        tier.store(keys_of(20), range(20))
        assert result_of(tier).ok
        directory = Path(str(tier.health().facts["paths"][0]))  # type: ignore[index]
        flip(directory / "rank-0-of-1.kv", 5 * BLOCK)
        Rewritten(monkeypatch, lambda look: tier.clear() if look == 1 else None)
        report = scrub(directory, jobs=1)
        assert (report.changed, report.damaged) == (1, [])


def test_a_thread_that_fails_is_not_taken_for_a_clean_cache(
    tmp_path: Path, monkeypatch: Any
) -> None:
    directory = fill(tmp_path / "kv", 4)
    monkeypatch.setattr(scrub_module, "record_states", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        scrub(directory)


def test_a_disk_that_does_not_give_a_block_back_is_damage(tmp_path: Path, monkeypatch: Any) -> None:
    directory = fill(tmp_path / "kv", 4)
    real = os.preadv

    def preadv(file: int, buffers: Any, offset: int) -> int:
        if os.readlink(f"/proc/self/fd/{file}").endswith(".kv") and offset == 2 * BLOCK:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    report = scrub(directory)
    assert [(each.slot, each.why) for each in report.damaged] == [
        (2, "the disk does not give it back (Input/output error)")
    ]
    assert report.blocks == 4


def test_where_o_direct_is_refused_it_goes_through_the_page_cache_and_says_so(
    tmp_path: Path, monkeypatch: Any
) -> None:
    directory = fill(tmp_path / "kv", 4)
    real = os.preadv

    def preadv(file: int, buffers: Any, offset: int) -> int:
        if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    report = scrub(directory)
    assert (report.blocks, report.direct, report.clean) == (4, False, True)


class SimulatedStop(threading.Event):
    """Waits in a time of its own."""

    now_s = 1000.0

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.now_s += timeout
        return False


def test_the_rate_is_kept(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 20)
    stop = SimulatedStop()
    pace = Pace(20 * BLOCK * 2, stop, lambda: stop.now_s)
    report = scrub(directory, pace=pace, stop=stop, jobs=1)
    assert report.blocks == 20
    assert stop.now_s - 1000.0 == pytest.approx(19 / 40), "each but the first waits for its turn"


@pytest.mark.parametrize("live", [False, True])
def test_ctrl_c_ends_it_with_what_was_found(tmp_path: Path, live: bool) -> None:
    directory = fill(tmp_path / "kv", 20)
    flip(directory / "rank-0-of-1.kv", 0)
    command = [sys.executable, "-m", "kvdisk", "verify", str(directory), "--rate", "1k"]
    tier = open_tier(tmp_path / "kv") if live else None
    with subprocess.Popen(
        [*command, "--jobs", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A test run in the background ignores interrupts, and its children with it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stderr is not None
        assert child.stderr.readline().endswith("...\n")
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)  # at that rate the rest would take longer
    if tier is not None:
        tier.close()
    assert child.returncode == 130
    assert "interrupted, so far: " in out


def test_a_bar_on_a_terminal(tmp_path: Path) -> None:
    fill(tmp_path / "kv", 20)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "kvdisk", "verify", str(tmp_path / "kv")],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        timeout=120,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "20/20 blocks" in shown
    assert "20 blocks checked, 0 damaged" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing"],
        ["."],
        ["kv", "--rate", "5 parsecs"],
        ["kv", "--rate", "-1"],
        ["kv", "--jobs", "0"],
        ["kv", "--jobs", "65"],
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, arguments: list[str]) -> None:
    fill(tmp_path / "kv", 1)
    (tmp_path / "empty").mkdir()
    path = tmp_path / ("empty" if arguments[0] == "." else arguments[0])
    done = kvdisk("verify", path, *arguments[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvdisk: error: ")
    assert done.stderr.count("\n") == 1


def test_nothing_is_written(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 4)
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()}
    assert kvdisk("verify", directory).returncode == 0
    assert before == {
        path: (path.read_bytes(), path.stat().st_mtime_ns) for path in directory.iterdir()
    }

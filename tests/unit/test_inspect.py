"""`kvdisk inspect`: it tells what is there, changes nothing, and bad input is one line."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from unittest import mock

import pytest
from caches import (
    BLOCK,
    IDENTITY,
    fill,
    fill_ranks,
    flip,
    identity_of,
    keys_of,
    kvdisk,
    kvdisk_json,
    live_server,
    open_tier,
)

from kvdisk import looking
from kvdisk.cleanup import find
from kvdisk.errors import ConfigError
from kvdisk.looking import lock_of
from kvdisk.rank_file import RankFile
from kvdisk.slot_records import RECORD, RecordState, as_records, payload_matches, record_states


def snapshot(root: Path) -> dict[str, tuple[bytes, int, int]]:
    return {
        str(path): (path.read_bytes(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in root.rglob("*")
        if path.is_file()
    }


def test_a_cache_of_one_rank(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    directory = fill(root, 20)
    before = snapshot(root)
    (found,) = kvdisk_json("inspect", root)["namespaces"]
    assert found["directory"] == str(directory)
    assert found["identity"] == IDENTITY.as_fields()
    (rank,) = found["ranks"]
    assert (rank["used"], rank["void"], rank["damaged"], rank["problem"]) == (20, 0, 0, "")
    assert rank["slot_bytes"] == BLOCK
    files = [directory / f"rank-0-of-1.{end}" for end in ("kv", "idx")]
    assert rank["size_bytes"] == sum(path.stat().st_size for path in files)
    assert rank["allocated_bytes"] >= rank["size_bytes"]
    newest = max(path.stat().st_mtime for path in files)
    assert rank["written_s"] == newest
    assert 0 <= newest - rank["begun_s"] < 60
    assert not rank["held"]
    assert found["slots_recoverable"] == {"1": 20}
    assert snapshot(root) == before
    with open_tier(root) as tier:
        assert tier.lookup(keys_of(20)) == 20


def test_text_for_people(tmp_path: Path) -> None:
    fill(tmp_path / "kv", 20)
    done = kvdisk("inspect", tmp_path / "kv")
    assert done.returncode == 0
    assert "model tiny, weights one, dtype bfloat16, tokens a block 16" in done.stdout
    assert "slots of 16.00 KiB, 20 used" in done.stdout
    assert "would recover 20 blocks" in done.stdout
    assert ", free" in done.stdout


def test_a_namespace_by_name_and_all_of_a_root(tmp_path: Path) -> None:
    one, two = fill(tmp_path / "kv", 2, "one"), fill(tmp_path / "kv", 3, "two")
    (tmp_path / "kv" / "not-ours").mkdir()
    found = kvdisk_json("inspect", tmp_path / "kv")["namespaces"]
    assert [each["directory"] for each in found] == sorted([str(one), str(two)])
    (alone,) = kvdisk_json("inspect", two)["namespaces"]
    assert alone["identity"]["model"] == "two"


def test_a10_a_restart_recovers_what_all_ranks_hold(tmp_path: Path) -> None:
    keys = keys_of(8)
    differing = [*keys[:5], b"another", *keys[6:]]
    directory = fill_ranks(tmp_path / "kv", 2, [keys, differing])
    (found,) = kvdisk_json("inspect", directory)["namespaces"]
    assert [rank["used"] for rank in found["ranks"]] == [8, 8]
    assert found["slots_recoverable"] == {"2": 7}


def test_a_missing_rank_means_that_nothing_is_recovered(tmp_path: Path) -> None:
    directory = fill_ranks(tmp_path / "kv", 2, [keys_of(8)])
    (found,) = kvdisk_json("inspect", directory)["namespaces"]
    assert found["slots_recoverable"] == {"2": None}
    assert "would recover nothing" in kvdisk("inspect", directory).stdout


def test_a_live_cache_is_shown_with_its_holder_and_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    with live_server(root) as server:
        (found,) = kvdisk_json("inspect", root)["namespaces"]
        (rank,) = found["ranks"]
        assert found["live"]
        assert rank["held"]
        assert rank["holder"] == server.pid
        assert rank["used"] == 20
        text = kvdisk("inspect", root).stdout
        assert f"in use by process {server.pid}" in text
        assert "lag behind memory" in text


def test_blocks_of_an_earlier_epoch_are_void(tmp_path: Path) -> None:
    with open_tier(tmp_path / "kv") as tier:
        tier.store(keys_of(4), range(4))
        while not tier.poll().finished:
            tier.wait(30)
        assert tier.clear()
    (found,) = kvdisk_json("inspect", tmp_path / "kv")["namespaces"]
    assert (found["ranks"][0]["used"], found["ranks"][0]["void"]) == (0, 4)


def test_a_damaged_record_is_counted(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 4)
    flip(directory / "rank-0-of-1.idx", 4096 + 2 * 128 + 50)
    (found,) = kvdisk_json("inspect", directory)["namespaces"]
    assert (found["ranks"][0]["used"], found["ranks"][0]["damaged"]) == (3, 1)
    assert found["slots_recoverable"] == {"1": 3}


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (lambda d: flip(d / "rank-0-of-1.idx", 20), "its header is damaged (checksum)"),
        (lambda d: os.truncate(d / "rank-0-of-1.idx", 100), "its header is cut short"),
        (lambda d: (d / "rank-0-of-1.idx").unlink(), "its record file is missing"),
        (lambda d: (d / "rank-0-of-1.kv").unlink(), "its data file is missing"),
    ],
)
def test_trouble_is_a_problem_of_that_rank_and_exit_status_1(
    tmp_path: Path, damage: object, problem: str
) -> None:
    directory = fill(tmp_path / "kv", 4)
    assert callable(damage)
    damage(directory)
    (found,) = kvdisk_json("inspect", directory, status=1)["namespaces"]
    assert found["ranks"][0]["problem"].startswith(problem)
    assert found["slots_recoverable"] == {"1": None}


def test_another_user_s_cache_is_told_with_what_to_do(tmp_path: Path) -> None:
    refused = PermissionError(errno.EACCES, "Permission denied")
    with (
        mock.patch.object(looking, "open_directory", side_effect=refused),
        pytest.raises(ConfigError, match="Run it as the cache's user"),
    ):
        looking.require_directory(tmp_path)


def test_leftovers_strangers_and_a_lost_identity_are_named(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 4)
    (directory / "kvdisk.json").write_text("{}")
    (directory / "rank-0-of-1.idx.damaged-1").write_bytes(b"KVDISKIX, and then nothing")
    strangers = ["rank-0-of-1.idx.damaged-2", "photo.damaged-1"]  # no mark, not our name
    for name in strangers:
        (directory / name).write_bytes(b"x")
    (directory / "notes.txt").write_text("mine")
    (directory / "rank-1-of-2.kv").symlink_to("/etc/passwd")
    os.mkfifo(directory / "rank-1-of-2.idx")
    (found,) = kvdisk_json("inspect", directory)["namespaces"]
    assert found["identity"] is None
    assert [each["name"] for each in found["leftovers"]] == ["rank-0-of-1.idx.damaged-1"]
    refused = ["kvdisk.json", "notes.txt", *strangers, "rank-1-of-2.idx", "rank-1-of-2.kv"]
    assert found["others"] == sorted(refused)
    (as_removed,), _ = find(tmp_path / "kv")
    assert as_removed.contents.others == sorted(refused)
    assert as_removed.contents.leftovers == ["rank-0-of-1.idx.damaged-1"]
    assert len(found["ranks"]) == 1


def test_links_below_the_root_are_not_followed(tmp_path: Path) -> None:
    directory = fill(tmp_path / "elsewhere", 4)
    root = tmp_path / "kv"
    root.mkdir()
    (root / directory.name).symlink_to(directory)
    assert kvdisk_json("inspect", root)["namespaces"] == []


def test_names_that_try_to_move_the_cursor_are_escaped(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 1)
    (directory / "\x1b[2Jsurprise").write_text("")
    shown = kvdisk("inspect", directory).stdout
    assert "\x1b" not in shown
    assert "surprise" in shown


def test_an_empty_root_has_no_cache(tmp_path: Path) -> None:
    done = kvdisk("inspect", tmp_path)
    assert (done.returncode, done.stdout) == (0, f"no cache in {tmp_path}\n")


@pytest.mark.parametrize("path", ["missing", "file", "nul\0"])
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, path: str) -> None:
    from click.testing import CliRunner

    from kvdisk.cli import main

    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / path)])
    assert done.exit_code == 2
    assert done.output.startswith("kvdisk: error: ")
    assert done.output.count("\n") == 1


# --- The lock that is looked at ---


def lockable(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_text("x")
    return path


def test_a_free_lock_is_seen_and_left_free(tmp_path: Path) -> None:
    with lockable(tmp_path).open() as file, lockable(tmp_path).open() as other:
        assert not lock_of(file.fileno()).held
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert lock_of(file.fileno()) == looking.Lock(True, os.getpid())


def test_a_holder_in_another_container_is_noticed(tmp_path: Path) -> None:
    with (
        lockable(tmp_path).open() as file,
        lockable(tmp_path).open() as other,
        mock.patch.object(looking, "lock_holder", return_value=None),
        mock.patch.object(looking, "_sees_all_processes", return_value=False),
    ):
        assert not lock_of(file.fileno()).held
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        assert lock_of(file.fileno()) == looking.Lock(True)


def test_where_all_processes_are_seen_the_lock_is_not_touched(tmp_path: Path) -> None:
    with (
        lockable(tmp_path).open() as file,
        mock.patch.object(looking, "_sees_all_processes", return_value=True),
        mock.patch.object(fcntl, "flock", side_effect=AssertionError),
    ):
        assert not lock_of(file.fileno()).held


def test_an_instant_of_somebody_s_shared_lock_does_not_stop_an_opener(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 1)
    with (directory / "rank-0-of-1.kv").open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        sleep = mock.Mock(side_effect=lambda _: fcntl.flock(file, fcntl.LOCK_UN))
        with mock.patch("kvdisk.private_files.time.sleep", sleep):
            open_tier(tmp_path / "kv").close()
    assert sleep.call_count == 1


# --- The record, seen from Python ---


def test_records_that_an_engine_wrote_are_read_by_field(tmp_path: Path) -> None:
    import numpy as np

    directory = fill(tmp_path / "kv", 3)
    raw = np.frombuffer((directory / "rank-0-of-1.idx").read_bytes()[4096:], dtype=np.uint8)
    data = np.frombuffer((directory / "rank-0-of-1.kv").read_bytes(), dtype=np.uint8)
    records = as_records(raw)
    epoch = int(records["epoch"][0])
    assert bytes(records["key"][1])[: records["key_length"][1]] == b"key-1"
    assert records["slot"][:3].tolist() == [0, 1, 2]
    assert len(set(records["sequence"][:3].tolist())) == 3
    assert set(records["valid_bytes"][:3].tolist()) == {BLOCK}
    states = record_states(raw, 0, epoch)
    assert states[:4].tolist() == [RecordState.VALID] * 3 + [RecordState.EMPTY]
    assert record_states(raw, 0, epoch + 1)[0] == RecordState.VOID
    assert record_states(raw, 1, epoch)[0] == RecordState.DAMAGED  # it says another slot
    first, second = raw[: RECORD.itemsize], raw[RECORD.itemsize : 2 * RECORD.itemsize]
    assert payload_matches(first, data[:BLOCK])
    assert not payload_matches(first, data[: BLOCK - 1])
    assert not payload_matches(second, data[:BLOCK])
    with pytest.raises(ValueError, match="128 bytes"):
        payload_matches(first[:-1], data[:BLOCK])


def test_files_opened_without_a_tier_are_found_too(tmp_path: Path) -> None:
    with RankFile.create_or_open(tmp_path / "cache", 0, 1, 8, 8192, bytes(32)):
        (found,) = kvdisk_json("inspect", tmp_path / "cache")["namespaces"]
    assert found["identity"] is None
    assert found["ranks"][0]["slots"] == 8
    assert identity_of("x").namespace != tmp_path.name

"""`kvdisk gc`: it removes what was selected and carries our mark, and nothing else, ever."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from caches import fill, identity_of, kvdisk, live_server, open_tier

from kvdisk import cleanup, rank_file
from kvdisk.cleanup import Namespace, find, remove, select
from kvdisk.looking import Lock
from kvdisk.ours import Contents

DAY = 24 * 3600


def age(directory: Path, days: float) -> None:
    then = time.time() - days * DAY
    for path in (*directory.iterdir(), directory):
        os.utime(path, (then, then))


def three(root: Path) -> list[Path]:
    """Namespaces unused for 1, 10 and 100 days."""
    directories = [fill(root, 2, model) for model in ("a", "b", "c")]
    for directory, days in zip(directories, (1, 10, 100), strict=True):
        age(directory, days)
    return directories


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_without_a_selection_it_only_lists(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    directories = three(root)
    done = kvdisk("gc", root)
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("3 namespaces in ")
    assert [line.split()[:2] for line in lines[1:4]] == [["keep", d.name] for d in directories]
    assert "Nothing is selected" in done.stdout
    assert left(root) == {d.name for d in directories}


@pytest.mark.parametrize(
    ("options", "gone"),
    [
        (["--keep-newest", "1"], [1, 2]),
        (["--keep-newest", "3"], []),
        (["--older-than", "30d"], [2]),
        (["--older-than", "240h"], [2]),
        (["--older-than", "2d", "--keep-newest", "2"], [2]),
        (["--max-size", "10MiB"], [2]),
        (["--max-size", "0"], [0, 1, 2]),
        (["--max-size", "0", "--older-than", "2d"], [1, 2]),
        (["--max-size", "1TiB"], []),
    ],
)
def test_selections(tmp_path: Path, options: list[str], gone: list[int]) -> None:
    root = tmp_path / "kv"
    directories = three(root)
    if options == ["--older-than", "240h"]:
        age(directories[1], 9.9)
    done = kvdisk("gc", root, *options, "--yes")
    assert done.returncode == 0, done.stderr
    assert left(root) == {d.name for n, d in enumerate(directories) if n not in gone}


def test_without_a_terminal_it_lists_and_says_so(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    three(root)
    done = kvdisk("gc", root, "--older-than", "30d")
    assert done.returncode == 1
    assert done.stdout.count("remove  kv-") == 1
    assert "Nothing was removed" in done.stderr
    assert len(left(root)) == 3


@pytest.mark.parametrize(("answer", "status", "count"), [("y\n", 0, 2), ("n\n", 1, 3)])
def test_on_a_terminal_it_asks(tmp_path: Path, answer: str, status: int, count: int) -> None:
    root = tmp_path / "kv"
    three(root)
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "kvdisk", "gc", str(root), "--older-than", "30d"],
        stdin=theirs,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        os.write(ours, answer.encode())
        out, _ = child.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert "Remove 1 namespace?" in out
    assert child.returncode == status
    assert len(left(root)) == count


def test_a_namespace_in_use_stays(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    three(root)
    with live_server(root) as server:
        done = kvdisk("gc", root, "--keep-newest", "0", "--yes")
        assert done.returncode == 0
        assert f"in use by process {server.pid}" in done.stdout
        assert left(root) == {identity_of("tiny").namespace}


def test_a_server_that_opens_it_meanwhile_keeps_it(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    (found,), _ = find(tmp_path / "kv")
    with open_tier(tmp_path / "kv", "a"):
        assert "in use" in remove(found).problem
    assert len(left(directory)) == 3
    assert remove(found).problem == ""
    assert not directory.exists()


def test_what_is_not_ours_is_left_and_named(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    directory = fill(root, 2, "a")
    (directory / "notes.txt").write_text("mine")
    (directory / "rank-7-of-8.kv").write_bytes(b"not marked")
    (directory / "rank-7-of-8.idx").write_bytes(bytes(8192))
    (directory / "rank-3-of-8.kv").symlink_to("/etc/passwd")
    (directory / "sub").mkdir()
    os.mkfifo(directory / "rank-4-of-8.idx")
    done = kvdisk("gc", root, "--keep-newest", "0", "--yes")
    assert done.returncode == 1
    assert "left in it: notes.txt" in done.stderr
    assert left(directory) == {
        "notes.txt",
        "rank-7-of-8.kv",
        "rank-7-of-8.idx",
        "rank-3-of-8.kv",
        "rank-4-of-8.idx",
        "sub",
    }
    assert "not ours: notes.txt" in done.stdout


def test_a_header_of_another_rank_does_not_make_a_file_ours(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    content = (directory / "rank-0-of-1.idx").read_bytes()
    (directory / "rank-5-of-6.idx").write_bytes(content)
    assert "rank-5-of-6.idx" in remove(find(tmp_path / "kv")[0][0]).problem


def test_a_hard_link_is_not_ours(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    os.link(directory / "rank-0-of-1.kv", tmp_path / "linked")
    assert "rank-0-of-1.kv" in remove(find(tmp_path / "kv")[0][0]).problem
    assert (directory / "rank-0-of-1.kv").exists()


def test_other_directories_files_and_links_are_not_looked_at(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    directory = fill(tmp_path / "elsewhere", 2, "a")
    root.mkdir()
    (root / directory.name).symlink_to(directory)
    (root / "kv-short").mkdir()
    (root / ("kv-" + "g" * 32)).mkdir()
    (root / ("kv-" + "0" * 32)).write_text("a file")
    done = kvdisk("gc", root, "--keep-newest", "0", "--yes")
    assert (done.returncode, done.stdout.splitlines()[0][:12]) == (0, "0 namespaces")
    assert f"left    {directory.name} (" in done.stdout
    assert len(left(root)) == 4
    assert len(left(directory)) == 3


def test_damaged_leftovers_go_only_when_asked_for_and_ours(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    directory = fill(root, 2, "a")
    content = bytearray((directory / "rank-0-of-1.idx").read_bytes())
    content[20] ^= 1
    (directory / "rank-0-of-1.idx").write_bytes(content)
    open_tier(root, "a").close()  # sets it aside
    (directory / "rank-0-of-1.kv.damaged-1").write_bytes(b"a stranger's")
    assert "rank-0-of-1.idx.damaged-1" in left(directory)

    kept = kvdisk("gc", root, "--keep-newest", "1", "--yes")
    assert kept.returncode == 0
    assert "rank-0-of-1.idx.damaged-1" in left(directory)

    with open_tier(root, "a"):  # they may go from under a server: it never opens them again
        done = kvdisk("gc", root, "--damaged", "--yes")
    assert done.returncode == 0, done.stderr
    assert left(directory) == {
        "kvdisk.json",
        "rank-0-of-1.idx",
        "rank-0-of-1.kv",
        "rank-0-of-1.kv.damaged-1",
    }


def test_a_namespace_with_leftovers_goes_whole_with_both(tmp_path: Path) -> None:
    root = tmp_path / "kv"
    directory = fill(root, 2, "a")
    content = (directory / "rank-0-of-1.idx").read_bytes()
    (directory / "rank-0-of-1.idx.damaged-1").write_bytes(content)
    done = kvdisk("gc", root, "--keep-newest", "0", "--yes")
    assert done.returncode == 1
    assert left(directory) == {"rank-0-of-1.idx.damaged-1"}
    done = kvdisk("gc", root, "--keep-newest", "0", "--damaged", "--yes")
    assert done.returncode == 0, done.stderr
    assert left(root) == set()


def test_what_a_killed_start_leaves_goes(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    (directory / "rank-0-of-1.idx").unlink()  # the data file has a mark of its own
    (directory / "rank-1-of-2.kv").touch()
    (directory / "rank-1-of-2.idx").touch()
    content = (directory / "kvdisk.json").read_bytes()
    (directory / ".kvdisk.json.12.345").write_bytes(content)
    (directory / ".kvdisk.json.12.346").touch()
    assert remove(find(tmp_path / "kv")[0][0]).problem == ""
    assert left(tmp_path / "kv") == set()


def test_without_attributes_the_record_file_speaks_for_both(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    os.removexattr(directory / "rank-0-of-1.kv", "user.kvdisk")
    with mock.patch.object(cleanup.os, "unlink", side_effect=OSError(5, "no")) as unlink:
        assert "rank-0-of-1.kv cannot be removed" in remove(find(tmp_path / "kv")[0][0]).problem
    assert unlink.call_count == 1  # the data file goes before what proves it
    assert remove(find(tmp_path / "kv")[0][0]).problem == ""


def test_a_start_counts_as_a_use(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    age(directory, 50)
    open_tier(tmp_path / "kv", "a").close()
    (found,), _ = find(tmp_path / "kv")
    assert time.time() - found.used_s < 60


def test_a_start_at_the_instant_of_a_removal_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    open_locked, removals = rank_file.open_locked, []

    def remove_first(folder: int, path: Path) -> int:
        if not removals:
            removals.append(remove(find(tmp_path / "kv")[0][0]))
            assert not directory.exists()
        return open_locked(folder, path)

    monkeypatch.setattr(rank_file, "open_locked", remove_first)
    assert fill(tmp_path / "kv", 2, "a") == directory
    assert len(removals) == 1
    assert {"kvdisk.json", "rank-0-of-1.kv"} <= left(directory)


def test_a_namespace_that_vanishes_while_it_is_listed_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    real = os.listdir

    def list_one_more(folder: int) -> list[str]:
        names = real(folder)
        return [*names, "kv-" + "0" * 32] if directory.name in names else names

    monkeypatch.setattr(os, "listdir", list_one_more)
    found, _ = find(tmp_path / "kv")
    assert [each.directory for each in found] == [directory]


def test_a_replaced_file_is_not_removed(tmp_path: Path) -> None:
    directory = fill(tmp_path / "kv", 2, "a")
    (found,), _ = find(tmp_path / "kv")
    real = cleanup.contents_of

    def contents_then_replace(folder: int) -> Contents:
        contents = real(folder)
        (directory / "kvdisk.json").unlink()
        (directory / "kvdisk.json").symlink_to(tmp_path / "precious")
        return contents

    (tmp_path / "precious").write_text("precious")
    with mock.patch.object(cleanup, "contents_of", contents_then_replace):
        assert remove(found).problem != ""
    assert (tmp_path / "precious").read_text() == "precious"


def test_selection_never_takes_what_is_in_use() -> None:
    contents = Contents()
    each = Namespace(Path("kv"), None, contents, 100, 0, 0.0, Lock(False))
    namespaces = [each, replace(each, lock=Lock(True)), replace(each, allocated_bytes=7)]
    free = [namespaces[2], namespaces[0]]
    assert select(namespaces, keep_newest=0, now_s=1e9) == free
    assert select(namespaces, bytes_max=0, now_s=1e9) == free
    assert select(namespaces, bytes_max=200, now_s=1e9) == [namespaces[2]]
    assert select(namespaces, older_than_s=1e9, now_s=1e9) == []
    assert select(namespaces, now_s=1e9) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["missing"],
        ["file"],
        ["kv-" + "0" * 32],
        [".", "--older-than", "30"],
        [".", "--older-than", "30 moons"],
        [".", "--max-size", "many"],
        [".", "--keep-newest", "-1"],
    ],
)
def test_bad_input_is_one_line_and_status_2(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / ("kv-" + "0" * 32)).mkdir()
    done = kvdisk("gc", tmp_path / arguments[0], *arguments[1:])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("kvdisk: error: ")
    assert done.stderr.count("\n") == 1

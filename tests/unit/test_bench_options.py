"""Mistakes on bench's command line: one line that says what to do, status 2, nothing left."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvdisk.bench.job import Job, Options, make_job, parse_runtime
from kvdisk.bench.presets import PRESETS
from kvdisk.cli import main
from kvdisk.errors import ConfigError

SMALL = ["--bs", "64k", "--size", "1m", "--iodepth", "2", "--runtime", "50ms"]

MISTAKES = {
    "size of less than a block": (["--size", "1000001"], "holds 0 blocks of 2.00 MiB"),
    "size that does not parse": (["--size", "lots"], "expected a number and a unit"),
    "size with two meanings": (["--size", "1gb"], "can be read in two ways"),
    "size smaller than the queue": (["--bs", "512k", "--size", "1m"], "fewer than iodepth=32"),
    "size beyond the disk": (["--bs", "64k", "--size", "900t"], "are free"),
    "bs not aligned, whole": (["--bs", "5000"], "not a multiple of 4096"),
    "bs not aligned, raw": (["--layer", "raw", "--bs", "5000"], "not a multiple of 512"),
    "bs zero": (["--bs", "0"], "must be between"),
    "depth zero": (["--iodepth", "0"], "must be between 1 and 1024"),
    "depth of a million": (["--iodepth", "1000000"], "must be between 1 and 1024"),
    "depth of a million, raw": (["--layer", "raw", "--iodepth", "1000000"], "between 1 and 4096"),
    "depth beyond memory": (
        ["--layer", "raw", "--iodepth", "4096", "--bs", "512m"],
        "asks for 4.00 TiB of pinned memory",
    ),
    "depth beyond memory, whole": (
        ["--iodepth", "1024", "--bs", "512m", "--size", "1t"],
        "iodepth=1024 of 512.00 MiB asks for",
    ),
    "ring beyond memory": (
        ["--ring", "16t", "--bs", "512m", "--size", "16g"],
        "ring=16TiB asks for",
    ),
    "jobs zero": (["--numjobs", "0"], "numjobs=0"),
    "no such direction": (["--rw", "writ"], "must be one of read, write"),
    "mix out of range": (["--rw", "randrw", "--rwmixread", "101"], "rwmixread=101"),
    "no such model": (["--model", "lama-3-8b"], 'Did you mean "llama-3-8b"?'),
    "two sizes of a block": (["--bs", "64k", "--model", "llama-3-8b"], "bs and model both"),
    "runtime without sense": (["--runtime", "soon"], "runtime="),
    "runtime zero": (["--runtime", "0"], "must be more than 0"),
    "compare with nobody": (["--compare", "dd"], "must be one of fio, threads"),
    "json nowhere": (["--json", "/nowhere/at/all"], "json=/nowhere/at/all"),
    "plot of a strange kind": (["--plot", "picture.bmp"], ".png or .svg"),
    "ring too small": (["--bs", "64k", "--ring", "64k"], "must hold 2 blocks"),
    "device that is not there": (["--device", "cuda:99"], "device=cuda:99"),
    "no such kind of device": (["--device", "gpu"], "must be cpu, cuda or cuda:N"),
    "device without a number": (["--device", "cuda:"], "must be cpu, cuda or cuda:N"),
    "device of the raw layer": (["--device", "0", "--layer", "raw"], "copies no blocks"),
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, list[str]]:
    """Exit status, stdout, lines on stderr."""
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments], prog_name="kvdisk")
    captured = capsys.readouterr()
    assert isinstance(exit_info.value.code, int)
    return exit_info.value.code, captured.out, captured.err.splitlines()


def assert_one_line(outcome: tuple[int, str, list[str]], words: str) -> None:
    status, output, lines = outcome
    assert status == 2
    assert output == ""
    assert len(lines) == 1, lines
    assert lines[0].startswith("kvdisk: error: ")
    assert words in lines[0]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments, words = MISTAKES[name]
    assert_one_line(run(capsys, str(tmp_path), *arguments), words)
    assert list(tmp_path.iterdir()) == []


def test_path_missing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert_one_line(run(capsys), "path is missing")
    assert_one_line(run(capsys, str(tmp_path / "no")), "No such file or directory")
    assert_one_line(run(capsys, str(tmp_path), "--path", str(tmp_path)), "given twice")


def test_path_is_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An existing file is somebody's: it is not written to, unlike by fio."""
    file = tmp_path / "precious"
    file.write_text("mine")
    assert_one_line(run(capsys, str(file)), "is not a directory")
    assert file.read_text() == "mine"


@pytest.mark.parametrize("layer", ["raw", "whole"])
def test_path_takes_no_files(capsys: pytest.CaptureFixture[str], layer: str) -> None:
    assert_one_line(run(capsys, "/proc", "--layer", layer, *SMALL), "/proc")


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
@pytest.mark.parametrize("layer", ["raw", "whole"])
def test_path_read_only(capsys: pytest.CaptureFixture[str], tmp_path: Path, layer: str) -> None:
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "none", tmp_path], check=False)
    if made.returncode != 0:
        pytest.skip("mount is not permitted")
    try:
        assert_one_line(
            run(capsys, str(tmp_path), "--layer", layer, *SMALL), "Read-only file system"
        )
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="Linux")
@pytest.mark.parametrize("layer", ["raw", "whole"])
def test_memlock_too_low(tmp_path: Path, layer: str) -> None:
    """Unregistered buffers are not what was asked for, unless it was."""
    command = [sys.executable, "-m", "kvdisk", "bench", str(tmp_path), "--layer", layer]
    command += [*SMALL, "--bs", "1m", "--size", "8m", "--backend", "uring"]
    if os.geteuid() == 0:
        if shutil.which("setpriv") is None:
            pytest.skip("root is exempt from the limit, and there is no setpriv")
        command = ["setpriv", "--inh-caps=-ipc_lock", "--bounding-set=-ipc_lock", *command]

    def lower_limit() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))

    def run_limited(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*command, *more], capture_output=True, text=True, check=False, preexec_fn=lower_limit
        )

    refused = run_limited()
    if refused.returncode == 0:
        pytest.skip("this kernel does not count registered buffers")
    assert_one_line((refused.returncode, refused.stdout, refused.stderr.splitlines()), "ulimit -l")
    assert list(tmp_path.iterdir()) == []

    accepted = run_limited("--allow-unregistered")
    assert accepted.returncode == 0, accepted.stderr
    assert "not registered" in accepted.stdout


@pytest.mark.parametrize("layer", ["raw", "whole"])
def test_fio_is_missing(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    layer: str,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = run(capsys, str(tmp_path), "--layer", layer, *SMALL, "--compare", "fio")
    assert_one_line(outcome, "fio is not installed")


def job(**options: object) -> Job:
    return make_job(Options(path=Path("/"), **options))  # type: ignore[arg-type]


def test_geometry_of_models() -> None:
    """32 layers x 2 x 8 heads x 128 x 2 bytes x 16 tokens."""
    made = job(model="llama-3-8b")
    assert made.io_bytes == 2 * 1024**2
    assert made.geometry.segment_bytes == 64 * 1024
    assert job(model="llama-3-70b-tp8").geometry.segment_bytes == 8 * 1024
    assert job(model="llama-3-8b", tokens=32).io_bytes == 4 * 1024**2
    mla = job(model="deepseek-mla")
    assert mla.geometry.block_bytes == 61 * 576 * 2 * 64
    assert mla.io_bytes % 4096 == 0
    assert 0 <= mla.io_bytes - mla.geometry.block_bytes < 4096


@pytest.mark.parametrize("name", PRESETS)
def test_every_model_can_be_measured(name: str) -> None:
    assert job(model=name).blocks_per_job >= 32
    assert PRESETS[name].source


def test_sizes_are_read_as_fio_reads_them() -> None:
    assert job(bs="128k", size="1g").io_bytes == 131072
    assert job(bs="128k", size="1g").size_bytes == 2**30
    assert job(bs="1m").blocks_per_job == 1024


def test_a_size_is_rounded_down_to_whole_blocks() -> None:
    """As by fio; else a round size does not go with a model."""
    made = job(model="deepseek-mla", size="1g")
    assert 0 < 2**30 - made.size_bytes < made.io_bytes
    assert made.size_bytes % made.io_bytes == 0
    (note,) = made.notes
    assert "size=1g was rounded down to" in note
    assert job(model="llama-3-8b", size="1g").notes == ()
    assert job(model="deepseek-mla").notes == ()


def test_directions() -> None:
    assert (job(rw="read").reads, job(rw="read").writes) == (True, False)
    assert (job(rw="randwrite").reads, job(rw="randwrite").writes) == (False, True)
    mixed = job(rw="randrw", rwmixread=70)
    assert mixed.reads
    assert mixed.writes
    assert mixed.read_percent == 70
    assert mixed.random


def test_runtime() -> None:
    assert parse_runtime("5") == 5 * 10**9
    assert parse_runtime("0.5") == 5 * 10**8
    assert parse_runtime("250ms") == 250 * 10**6
    with pytest.raises(ConfigError):
        parse_runtime("25h")

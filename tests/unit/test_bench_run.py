"""Real, small measurements: what they report, what they prove, and that they leave nothing behind.

A35: no benchmark of ours may report memory as a disk. No test here judges a speed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvdisk.bench.job import Job, Options, make_job
from kvdisk.bench.raw import RawRunner
from kvdisk.bench.runner import Runner
from kvdisk.bench.whole import WholeRunner
from kvdisk.cli import main
from kvdisk.probe.mount import find_mount

SMALL = ["--bs", "64k", "--size", "4m", "--iodepth", "4", "--runtime", "100ms"]
LAYERS = ("raw", "whole")
HAS_FIO = shutil.which("fio") is not None
needs_fio = pytest.mark.skipif(not HAS_FIO, reason="fio is not installed")


@pytest.fixture(params=["disk", "tmpfs"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    shared = Path("/dev/shm")
    mount = find_mount(shared) if shared.is_dir() else None
    if mount is None or mount.file_system != "tmpfs":
        pytest.skip("/dev/shm is not tmpfs")
    made = shared / f"kvdisk-test-{os.getpid()}"
    made.mkdir()
    yield made
    shutil.rmtree(made)


def measure(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", *arguments, "--json", "-"], prog_name="kvdisk")
    captured = capsys.readouterr()
    assert exit_info.value.code == 0, captured.err
    document: dict[str, Any] = json.loads(captured.out)
    return document


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rw", ["read", "write", "randread", "randwrite", "randrw", "rw"])
def test_every_direction(
    layer: str, rw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = measure(capsys, str(tmp_path), "--layer", layer, "--rw", rw, *SMALL)
    figures = document["jobs"][0]
    for direction in ("read", "write"):
        moves = not rw.endswith({"read": "write", "write": "read"}[direction])
        assert (figures[direction]["io_bytes"] > 0) == moves
        assert figures[direction]["total_ios"] * 65536 == figures[direction]["io_bytes"]
    verify = document["kvdisk"]["verify"]
    assert verify["blocks_wrong"] == 0
    assert verify["blocks_checked"] == verify["blocks_total"] == 64
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layer", LAYERS)
def test_json_is_readable_as_fios(
    layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = measure(capsys, str(tmp_path), "--layer", layer, "--rw", "read", *SMALL)
    assert {"fio version", "timestamp", "time", "jobs"} <= document.keys()
    job = document["jobs"][0]
    assert job["error"] == 0
    assert {"jobname", "job options", "read", "write", "trim", "usr_cpu", "sys_cpu"} <= job.keys()
    read = job["read"]
    assert read["bw"] == pytest.approx(read["bw_bytes"] / 1024, abs=1)
    assert read["iops"] == pytest.approx(read["bw_bytes"] / 65536, rel=0.01)
    assert read["bw_bytes"] == pytest.approx(read["io_bytes"] * 1e3 / read["runtime"], rel=0.02)
    clat = read["clat_ns"]
    assert clat["N"] == read["total_ios"]
    assert clat["min"] <= clat["percentile"]["50.000000"] <= clat["percentile"]["99.000000"]
    assert clat["percentile"]["99.990000"] <= clat["max"]
    assert job["write"]["io_bytes"] == 0
    assert job["write"]["bw_bytes"] == 0


@needs_fio
def test_json_has_no_key_that_fio_lacks_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever a script finds in ours under `read`, it finds in fio's, of the same type."""
    ours = measure(capsys, str(tmp_path), "--layer", "raw", "--rw", "read", *SMALL)
    command = ["fio", "--name=x", f"--directory={tmp_path}", "--size=1m", "--rw=read"]
    output = subprocess.run(
        [*command, "--output-format=json"], capture_output=True, check=True, text=True
    ).stdout
    theirs = json.loads(output[output.index("{") :])["jobs"][0]
    for direction in ("read", "write", "trim"):
        for key, value in ours["jobs"][0][direction].items():
            other = theirs[direction][key]
            assert isinstance(value, (int, float)) == isinstance(other, (int, float)), key
    for key in ("usr_cpu", "sys_cpu", "job_runtime", "jobname", "groupid", "error", "elapsed"):
        assert isinstance(ours["jobs"][0][key], type(theirs[key])), key


@needs_fio
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rw", ["read", "write", "randrw"])
def test_compare_with_fio(
    layer: str, rw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--layer", layer, "--rw", rw, *SMALL, "--compare", "fio", "--rounds", "3"]
    document = measure(capsys, str(tmp_path), *options)
    fio = document["compare"]["fio"]
    for direction in ("read", "write"):
        moves = document["jobs"][0][direction]["io_bytes"] > 0
        assert (fio["ratio"][direction] is not None) == moves
        if moves:
            each = sorted(fio["ratios"][direction])
            assert len(each) == 3
            assert fio["ratio"][direction] == each[1]
    assert len(fio["rounds"]) == 3
    assert "--ioengine=io_uring" in fio["command"] or "--ioengine=libaio" in fio["command"]
    assert document["kvdisk"]["verify"]["blocks_wrong"] == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layer", LAYERS)
def test_compare_with_threads(
    layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--layer", layer, "--rw", "write", *SMALL, "--compare", "threads", "--rounds", "2"]
    document = measure(capsys, str(tmp_path), *options)
    threads = document["compare"]["threads"]
    assert threads["ratio"]["read"] is None
    assert threads["ratio"]["write"] > 0
    assert len(threads["rounds"]) == 2


@pytest.mark.parametrize("layer", LAYERS)
def test_several_jobs(layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--layer", layer, "--rw", "randrw", *SMALL, "--numjobs", "3"]
    document = measure(capsys, str(tmp_path), *options)
    assert document["kvdisk"]["verify"]["blocks_checked"] == 3 * 64
    assert document["kvdisk"]["verify"]["blocks_wrong"] == 0


@pytest.mark.parametrize("layer", LAYERS)
def test_a35_memory_is_called_memory(
    layer: str, directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = measure(capsys, str(directory), "--layer", layer, *SMALL)["kvdisk"]
    warned = any("is memory, not a disk" in text for text in about["warnings"])
    assert warned == about["place"]["is_memory"]
    assert about["place"]["is_memory"] == (about["place"]["file_system"] == "tmpfs")
    assert about["mode"]["page_cache"]


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rw", ["read", "write"])
def test_a35_the_page_cache_is_called_so(
    layer: str, rw: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--layer", layer, "--rw", rw, *SMALL, "--no-direct"]
    about = measure(capsys, str(tmp_path), *options)["kvdisk"]
    assert about["mode"]["direct"] is False
    text = next(text for text in about["warnings"] if text.startswith("through the page cache"))
    assert ("begin cold" if rw == "read" else "final sync") in text


def runner_of(layer: str, path: Path, **options: Any) -> tuple[Job, Runner]:
    job = make_job(
        Options(
            path=path,
            layer=layer,  # type: ignore[arg-type]
            bs="64k",
            size="4m",
            iodepth=4,
            runtime="50ms",
            **options,
        )
    )
    return job, RawRunner(job) if layer == "raw" else WholeRunner(job)


def nothing(_: int) -> None:
    pass


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a35_data_is_unique_and_incompressible(layer: str, direct: str, tmp_path: Path) -> None:
    _, runner = runner_of(layer, tmp_path, direct=direct)
    try:
        runner.fill(nothing)
        content = Path(f"/proc/self/fd/{runner.data_fd}").read_bytes()
    finally:
        runner.close()
    assert len(content) == 4 * 1024**2
    sectors = {content[at : at + 512] for at in range(0, len(content), 512)}
    assert len(sectors) == len(content) // 512
    assert len(zlib.compress(content, 9)) > 0.98 * len(content)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("place", [0, 100_000, 4 * 1024**2 - 1])
def test_one_wrong_byte_is_found(layer: str, place: int, tmp_path: Path) -> None:
    _, runner = runner_of(layer, tmp_path)
    try:
        runner.fill(nothing)
        runner.run(nothing)
        with open(f"/proc/self/fd/{runner.data_fd}", "r+b", buffering=0) as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())
        verdict = runner.verify(nothing)
    finally:
        runner.close()
    assert verdict.wrong == 1


@pytest.mark.parametrize("layer", LAYERS)
def test_wrong_data_is_exit_status_1(
    layer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = RawRunner if layer == "raw" else WholeRunner
    verify = kind.verify

    def spoil_and_verify(self: Any, progress: Any) -> Any:
        with open(f"/proc/self/fd/{self.data_fd}", "r+b", buffering=0) as file:
            file.write(b"spoiled")
            os.fsync(file.fileno())
        return verify(self, progress)

    monkeypatch.setattr(kind, "verify", spoil_and_verify)
    with pytest.raises(SystemExit) as exit_info:
        main(["bench", str(tmp_path), "--layer", layer, *SMALL], prog_name="kvdisk")
    assert exit_info.value.code == 1
    assert "WRONG DATA: 1 blocks" in capsys.readouterr().out


def wait_for_line(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return
    pytest.fail(f"{words!r} never came")


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("phase", ["laying out", "kvdisk", pytest.param("fio", marks=needs_fio)])
def test_a35_interrupt_leaves_nothing_behind(layer: str, phase: str, directory: Path) -> None:
    other = directory / "other"
    other.mkdir()
    (other / "file").write_bytes(b"precious" * 1000)
    (directory / ".kvdisk-bench-of-somebody-else").write_text("not ours")
    before = {path: path.stat().st_mtime_ns for path in directory.rglob("*")}
    command = [sys.executable, "-m", "kvdisk", "bench", str(directory), "--layer", layer]
    command += ["--bs", "64k", "--size", "32m", "--iodepth", "4", "--runtime", "60"]
    if phase == "fio":
        command += ["--compare", "fio"]
    with subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        wait_for_line(process, phase)
        assert set(directory.rglob("*")) == before.keys()
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        rest = process.stderr.read()
        assert process.wait(timeout=30) == 130
    assert "Traceback" not in rest
    assert "interrupted" in rest
    assert {path: path.stat().st_mtime_ns for path in directory.rglob("*")} == before
    assert (other / "file").read_bytes() == b"precious" * 1000


@pytest.mark.parametrize("layer", LAYERS)
def test_a35_a_killed_bench_leaves_nothing_behind(layer: str, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("stays")
    command = [sys.executable, "-m", "kvdisk", "bench", str(tmp_path), "--layer", layer]
    command += ["--bs", "64k", "--size", "32m", "--iodepth", "4", "--runtime", "60"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for_line(process, "kvdisk")
        process.kill()
        process.wait(timeout=30)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_plain_lines_where_there_is_no_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", str(tmp_path), *SMALL], prog_name="kvdisk")
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "laying out the file ...",
        "kvdisk ...",
        "reading back ...",
    ]
    assert "\x1b" not in captured.out + captured.err
    for word in ("MB/s", "MiB/s", "IOPS", "p99", "s per GB", "occupied", "alignment", "backend"):
        assert word in captured.out

"""The yardstick: the same job by fio, on the same file, as its own users would run it.

Same block size, depth, direction, seed of randomness and O_DIRECT; registered buffers and files
where ours are registered; no verification and no refilling of buffers in the timed part, on either
side. fio's bandwidth and run time are taken as it reports them.

Its buffers lie in large pages, as far as malloc gives it them, because ours do: a disk bound
by segments (docs/adr/0004) makes fio several times slower without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from typing import Any, Final

from kvdisk.bench.job import Job
from kvdisk.bench.result import DIRECTIONS, DirectionName, Latency, Round
from kvdisk.bench.runner import PROGRESS_GAP_S, Progress
from kvdisk.bench.scratch import path_for_others
from kvdisk.errors import ConfigError, KVDiskError

_GRACE_S: Final = 120.0
_LARGE_PAGES: Final = "glibc.malloc.hugetlb=1"


def require_fio() -> str:
    """The path of fio; raises ConfigError when there is none."""
    program = shutil.which("fio")
    if program is None:
        raise ConfigError(
            "compare=fio: fio is not installed. Install it (apt install fio), or leave it out."
        )
    return program


def fio_command(
    program: str, job: Job, file: int, *, direct: bool, ring: bool, registered: bool
) -> list[str]:
    """``ring``: io_uring, else libaio (or psync through the page cache)."""
    engine = "io_uring" if ring else "libaio" if direct else "psync"
    command = [
        program,
        "--name=kvdisk-bench",
        f"--filename={path_for_others(file)}",
        f"--rw={job.rw}",
        f"--bs={job.io_bytes}",
        f"--size={job.size_bytes}",
        f"--iodepth={job.iodepth}",
        f"--numjobs={job.numjobs}",
        f"--ioengine={engine}",
        f"--direct={int(direct)}",
        "--time_based",
        f"--runtime={max(1, round(job.runtime_ns / 1e6))}ms",
        f"--randseed={job.seed}",
        "--norandommap",
        "--thread",
        "--group_reporting",
        "--allow_file_create=0",
        "--output-format=json",
    ]
    if job.numjobs > 1:
        command.append(f"--offset_increment={job.size_bytes}")
    if job.reads and job.writes:
        command.append(f"--rwmixread={job.read_percent}")
    if ring and registered:
        command += ["--fixedbufs", "--registerfiles"]
    if not direct and job.writes:
        command.append("--end_fsync=1")
    return command


def run_fio(command: list[str], job: Job, progress: Progress) -> Round:
    """Raises KVDiskError with fio's own words when it fails. Ended with us on a signal."""
    # In a session of its own, so that Ctrl-C reaches us alone and we end it.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=_environment(),
    ) as process:
        try:
            output, errors = _communicate(process, job, progress)
        except BaseException:
            process.kill()
            raise
    if process.returncode != 0:
        raise KVDiskError(f"fio failed ({process.returncode}): {_last_line(errors or output)}")
    try:
        # Warnings may stand before the JSON.
        report = json.loads(output[output.index(b"{") :])
        return parse_job(report["jobs"][0])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise KVDiskError(f"fio's report cannot be read: {_last_line(errors or output)}") from error


def _environment() -> dict[str, str]:
    """With glibc's malloc asking for large pages (glibc 2.35; others ignore it)."""
    given = os.environ.get("GLIBC_TUNABLES")
    return {**os.environ, "GLIBC_TUNABLES": f"{given}:{_LARGE_PAGES}" if given else _LARGE_PAGES}


def parse_job(report: dict[str, Any]) -> Round:
    """One entry of ``jobs`` in fio's JSON."""
    elapsed_ns = max(report[name]["runtime"] for name in DIRECTIONS) * 1_000_000
    cpu_ns = report.get("job_runtime", 0) * 1e6 / 100
    if report.get("error"):
        raise KVDiskError(f"fio reports error {report['error']}.")
    return Round(
        bytes={name: report[name]["io_bytes"] for name in DIRECTIONS},
        ios={name: report[name]["total_ios"] for name in DIRECTIONS},
        elapsed_ns=elapsed_ns,
        cpu_user_ns=round(report["usr_cpu"] * cpu_ns),
        cpu_system_ns=round(report["sys_cpu"] * cpu_ns),
        latency={name: _latency(report, name) for name in DIRECTIONS},
    )


def _latency(report: dict[str, Any], name: DirectionName) -> Latency:
    clat = report[name]["clat_ns"]
    return Latency(
        clat["N"],
        clat["min"],
        clat["max"],
        clat["mean"],
        clat["stddev"],
        {float(percent): value for percent, value in clat.get("percentile", {}).items()},
    )


def _communicate(
    process: subprocess.Popen[bytes], job: Job, progress: Progress
) -> tuple[bytes, bytes]:
    until = time.monotonic() + job.runtime_ns / 1e9 + _GRACE_S
    while True:
        try:
            return process.communicate(timeout=PROGRESS_GAP_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() > until:
                raise KVDiskError(
                    f"fio did not end within {_GRACE_S:.0f} s after its run time."
                ) from None
            progress(0)


def _last_line(text: bytes) -> str:
    lines = [line for line in text.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no message"

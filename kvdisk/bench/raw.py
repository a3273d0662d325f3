"""The raw layer: fio's job loop over our backend (native/io/workload.hpp), one thread per job.

The loops run without the GIL for a whole phase; this thread only reports progress and, when a
signal comes, tells them to stop.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Final

from kvdisk import _native
from kvdisk.bench.job import Job, require_aligned
from kvdisk.bench.result import (
    DIRECTIONS,
    DirectionName,
    Latency,
    Round,
    Verdict,
    cpu_times_ns,
)
from kvdisk.bench.runner import PROGRESS_GAP_S, Facts, Progress
from kvdisk.bench.scratch import ScratchFile, drop_from_page_cache
from kvdisk.errors import ConfigError, DeviceError
from kvdisk.memory import require_memory
from kvdisk.units import display_size

_WRITE_BUFFERS_BYTES_MIN: Final = 8 << 20  # workload.cpp: random data repeats after this


class RawRunner:
    """``numjobs`` raw jobs, each on its own part of one file without a name."""

    def __init__(self, job: Job) -> None:
        """Raises ConfigError or DeviceError for what this machine cannot do."""
        self._job = job
        buffers = 2 * job.iodepth * job.io_bytes + _WRITE_BUFFERS_BYTES_MIN
        require_memory(
            buffers * job.numjobs, f"iodepth={job.iodepth} of {display_size(job.io_bytes)}"
        )
        self._file = ScratchFile(job.path, job.file_bytes, job.direct)
        try:
            self.mode = self._file.mode
            self.data_fd = self._file.fd
            require_aligned(job, self.mode.alignment)
            self._jobs = [self._make(number) for number in range(job.numjobs)]
            self._require_registered()
        except BaseException:
            self._file.close()
            raise
        self._threads = [_JobThread() for _ in self._jobs]
        self._results: list[list[dict[str, Any]]] = []  # by round, by job

    def fill(self, progress: Progress) -> None:
        for result in self._on_all(lambda job: job.fill(), progress):
            self._require_no_error(result)

    def run(self, progress: Progress) -> Round:
        if not self.mode.direct:
            drop_from_page_cache(self.data_fd)
        user_before, system_before = cpu_times_ns()
        runtime_ns = self._job.runtime_ns
        results = self._on_all(lambda job: job.run(runtime_ns), progress)
        user_after, system_after = cpu_times_ns()
        for result in results:
            self._require_no_error(result)
        self._results.append(results)
        return Round(
            bytes={name: sum(each[name]["bytes"] for each in results) for name in DIRECTIONS},
            ios={name: sum(each[name]["ios"] for each in results) for name in DIRECTIONS},
            elapsed_ns=max(each["elapsed_ns"] for each in results),
            cpu_user_ns=user_after - user_before,
            cpu_system_ns=system_after - system_before,
            latency={name: _latency(results, name) for name in DIRECTIONS},
        )

    def verify(self, progress: Progress) -> Verdict:
        if not self.mode.direct:
            drop_from_page_cache(self.data_fd)
        checked = wrong = 0
        for job_checked, job_wrong, offset, error in self._on_all(
            lambda job: job.verify(), progress
        ):
            if error:
                raise _failure("read back", error, offset)
            checked += job_checked
            wrong += job_wrong
        wrong += sum(each["wrong_reads"] for results in self._results for each in results)
        return Verdict(checked, wrong, self._job.blocks_per_job * self._job.numjobs)

    def forget(self) -> None:
        for job in self._jobs:
            job.forget()

    def facts(self) -> Facts:
        first = self._jobs[0]
        stats = first.backend_stats()
        every = [each for results in self._results for each in results]
        elapsed_ns = sum(max(each["elapsed_ns"] for each in results) for results in self._results)
        in_flight_ns = sum(each["in_flight_ns"] for each in every)
        depth = self._job.iodepth * self._job.numjobs
        return Facts(
            backend=first.backend,
            backend_reason=first.backend_reason,
            notes=tuple(note for note in (stats["note"],) if note),
            buffers_registered=stats["areas_registered"],
            files_registered=stats["files_registered"],
            ring_bytes=sum(job.buffer_bytes for job in self._jobs),
            ring_occupancy=in_flight_ns / (elapsed_ns * depth) if elapsed_ns else 0.0,
            in_flight=in_flight_ns / elapsed_ns if elapsed_ns else 0.0,
            short_ios={name: sum(each[name]["short_ios"] for each in every) for name in DIRECTIONS},
            engine_cpu_ns=sum(each["thread_cpu_ns"] for each in every),
            latency={name: _latency(every, name) for name in DIRECTIONS},
        )

    def close(self) -> None:
        for job in self._jobs:
            job.stop()
        for thread in self._threads:
            thread.close()
        self._file.close()

    def _make(self, number: int) -> _native.RawJob:
        options = _native.RawJobOptions()
        options.file = self.data_fd
        options.offset = number * self._job.size_bytes
        options.size_bytes = self._job.size_bytes
        options.block_bytes = self._job.io_bytes
        options.depth = self._job.iodepth
        options.read_percent = self._job.read_percent
        options.random = self._job.random
        options.sync_after_writes = not self.mode.direct
        options.seed = self._job.seed
        options.backend = self._job.backend
        try:
            return _native.RawJob(options)
        except OSError as error:
            raise DeviceError(
                f"backend={self._job.backend} cannot be used: {error}",
                errno=error.errno or 0,
                op="open",
            ) from error
        except ValueError as error:
            raise ConfigError(f"{error}.") from error

    def _require_registered(self) -> None:
        first = self._jobs[0]
        stats = first.backend_stats()
        if first.backend == "uring" and not stats["areas_registered"]:
            require_registered(self._job, stats["note"])

    def _on_all(self, work: Callable[[_native.RawJob], Any], progress: Progress) -> list[Any]:
        """``work`` on every job at once, each on its own thread; a signal stops them all."""
        for thread, job in zip(self._threads, self._jobs, strict=True):
            thread.begin(work, job)
        try:
            while not all(thread.wait(PROGRESS_GAP_S) for thread in self._threads):
                progress(sum(job.progress_bytes for job in self._jobs))
        except BaseException:
            for job in self._jobs:
                job.stop()
            for thread in self._threads:
                thread.wait(None)
            raise
        return [thread.result() for thread in self._threads]

    def _require_no_error(self, result: dict[str, Any]) -> None:
        if result["error"]:
            raise _failure("an I/O", result["error"], result["error_offset"])


def require_registered(job: Job, note: str) -> None:
    """Raise ConfigError unless the user accepts buffers that could not be registered."""
    if job.allow_unregistered:
        return
    reason = note or "the buffers could not be registered with io_uring"
    raise ConfigError(
        f"{reason.rstrip('.')}. Raise the limit (ulimit -l), lower iodepth or bs, or measure "
        "without with --allow-unregistered."
    )


def _failure(what: str, error: int, offset: int) -> DeviceError:
    return DeviceError(
        f"{what} failed at byte {offset} of the file: {os.strerror(error)}. "
        "Check the disk (dmesg).",
        errno=error,
        op=what,
    )


def _latency(results: list[dict[str, Any]], name: DirectionName) -> Latency:
    return Latency.from_histograms([each[name]["latency_ns"] for each in results])


class _JobThread:
    """One thread for a job's whole life: a ring belongs to the thread that first used it."""

    def __init__(self) -> None:
        self._wanted = threading.Event()
        self._done = threading.Event()
        self._work: Callable[[], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name="kvdisk-bench")
        self._thread.start()

    def begin(self, work: Callable[[_native.RawJob], Any], job: _native.RawJob) -> None:
        self._done.clear()
        self._work = lambda: work(job)
        self._wanted.set()

    def wait(self, timeout_s: float | None) -> bool:
        return self._done.wait(timeout_s)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def close(self) -> None:
        self._work = None
        self._wanted.set()
        self._thread.join()

    def _serve(self) -> None:
        while True:
            self._wanted.wait()
            self._wanted.clear()
            if self._work is None:
                return
            try:
                self._result = self._work()
            except BaseException as error:  # carried over to the thread that asks for the result
                self._error = error
            self._done.set()

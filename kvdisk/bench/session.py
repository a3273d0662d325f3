"""One measurement from start to end: lay out, alternate, read back.

The contenders of a round run one directly after the other, ours last, and ratios are taken within
a round: a shared disk that is fast this minute and slow the next then hits both alike. Ours is last
so that what it wrote can be read back after the final round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Final

from kvdisk.bench.fio import fio_command, require_fio, run_fio
from kvdisk.bench.job import Job
from kvdisk.bench.one_by_one import OneByOne
from kvdisk.bench.raw import RawRunner
from kvdisk.bench.result import Comparison, Round, Verdict, compare
from kvdisk.bench.runner import Facts, Progress, Runner
from kvdisk.bench.scratch import Place, describe_place
from kvdisk.bench.whole import WholeRunner
from kvdisk.direct_mode import DirectMode
from kvdisk.errors import ConfigError

CONTENDERS: Final = ("fio", "threads")

# Called when a phase begins: its name, how many bytes it moves (None: as many as it can) and how
# long it takes (None: as long as that takes). Returns what to tell the phase's progress.
BeginPhase = Callable[[str, int | None, float | None], Progress]


@dataclass(frozen=True)
class Outcome:
    """Everything that a report says. ``verdict`` is None when nothing was verified."""

    job: Job
    place: Place
    mode: DirectMode
    facts: Facts
    rounds: Sequence[Round]
    comparisons: Sequence[Comparison]
    verdict: Verdict | None


def run_session(job: Job, contenders: Sequence[str], begin: BeginPhase) -> Outcome:
    """Raises KVDiskError for what cannot be measured; leaves nothing behind in any case."""
    for name in contenders:
        if name not in CONTENDERS:
            raise ConfigError(f'compare="{name}": must be one of {", ".join(CONTENDERS)}.')
    program = require_fio() if "fio" in contenders else ""
    runtime_s = job.runtime_ns / 1e9
    with ExitStack() as stack:
        runner = _open(job, stack)
        command: list[str] = []
        threads = None
        if "threads" in contenders:
            slow = replace(job, backend="threads", iodepth=1, numjobs=1)
            threads = _open_threads(slow, stack)
            threads.fill(begin("laying out the file of threads", slow.file_bytes, None))
        runner.fill(begin("laying out the file", job.file_bytes, None))
        if program:
            facts = runner.facts()
            command = fio_command(
                program,
                job,
                runner.data_fd,
                direct=runner.mode.direct,
                ring=facts.backend == "uring",
                registered=facts.buffers_registered,
            )
        ours: list[Round] = []
        theirs: dict[str, list[Round]] = {name: [] for name in contenders}
        for number in range(1, job.rounds + 1):
            where = f"round {number} of {job.rounds}: " if job.rounds > 1 else ""
            for name in contenders:
                progress = begin(f"{where}{name}", None, runtime_s)
                if name == "threads" and threads is not None:
                    theirs[name].append(threads.run(progress))
                else:
                    theirs[name].append(run_fio(command, job, progress))
                    _after_fio(job, runner, begin)
            ours.append(runner.run(begin(f"{where}kvdisk", None, runtime_s)))
        verdict = None
        if job.verify:
            verdict = runner.verify(begin("reading back", job.file_bytes, None))
        return Outcome(
            job=job,
            place=describe_place(job.path),
            mode=runner.mode,
            facts=runner.facts(),
            rounds=ours,
            comparisons=[
                compare(name, command if name == "fio" else [], ours, theirs[name])
                for name in contenders
            ],
            verdict=verdict,
        )


def _open(job: Job, stack: ExitStack) -> Runner:
    runner: Runner = RawRunner(job) if job.layer == "raw" else WholeRunner(job)
    stack.callback(runner.close)
    return runner


def _open_threads(job: Job, stack: ExitStack) -> Runner | OneByOne:
    """One I/O in flight; for blocks in host memory as engines' own disk tiers do it."""
    if job.layer == "raw" or job.device != "cpu":
        return _open(job, stack)
    threads = OneByOne(job)
    stack.callback(threads.close)
    return threads


def _after_fio(job: Job, runner: Runner, begin: BeginPhase) -> None:
    """fio has overwritten our blocks. A job that also reads needs them back, untimed."""
    if not job.writes:
        return
    runner.forget()
    if job.reads:
        runner.fill(begin("laying out the file again", job.file_bytes, None))

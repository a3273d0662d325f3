"""All runs of one replay: each setup on the disk or simulated, and what other sizes would give."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvdisk.bench.scratch import Place, describe_place
from kvdisk.bench.session import BeginPhase
from kvdisk.errors import ConfigError
from kvdisk.replay.curve import LruCurve
from kvdisk.replay.job import ReplayJob, Setup, make_setup
from kvdisk.replay.result import Outcome
from kvdisk.replay.run import run
from kvdisk.replay.simulate import simulate
from kvdisk.replay.trace import Numbers
from kvdisk.replay.ttft import Demand, Server, Ttft, model_ttft
from kvdisk.units import display_size

# The curve's capacities, as shares of all that the trace touches; the last holds the slots' records
# as well.
_SHARES: Final = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.05)
_EXACT_STEPS: Final = 8  # between two of those


@dataclass(frozen=True)
class Run:
    """A setup's outcome; the same simulated, and simulated with twice the capacity."""

    outcome: Outcome
    simulated: Outcome
    doubled: Outcome
    ttft: Ttft


@dataclass(frozen=True)
class CurvePoint:
    """Shares of all references and of all tokens that come from the tier at some capacity."""

    capacity_bytes: int
    hit_share: float
    hit_token_share: float


@dataclass(frozen=True)
class Curve:
    """Hit rate against capacity of one policy. ``exact``: LRU by stack distances."""

    policy: str
    exact: bool
    points: Sequence[CurvePoint]


@dataclass(frozen=True)
class Replayed:
    """Everything that a report says. ``without`` is the model without the tier."""

    job: ReplayJob
    place: Place | None
    without: Ttft
    runs: Sequence[Run]
    curves: Sequence[Curve]


def replay(job: ReplayJob, begin: BeginPhase, *, with_curves: bool = True) -> Replayed:
    """Raises KVDiskError for what cannot be replayed; leaves nothing behind in any case."""
    simulations = _Simulations(job, begin)
    runs = []
    for number, setup in enumerate(job.setups, 1):
        if job.path is None:
            outcome = simulations.of(setup)
        else:
            where = f"run {number} of {len(job.setups)}: {_name(setup)}"
            outcome = run(job, setup, begin(where, _total_bytes(job), None))
        twice = _resized(job, setup, 2 * setup.capacity_bytes)
        runs.append(
            Run(outcome, simulations.of(setup), simulations.of(twice), ttft_of(job, outcome))
        )
    return Replayed(
        job=job,
        place=describe_place(job.path) if job.path is not None else None,
        without=_ttft_without(job, runs[0].outcome),
        runs=runs,
        curves=_curves(job, simulations) if with_curves else [],
    )


def ttft_of(job: ReplayJob, outcome: Outcome) -> Ttft:
    """By the model, with what the outcome found and how long its loads took."""
    return _ttft(job, outcome, outcome.hit_tokens(job.trace))


def _ttft_without(job: ReplayJob, outcome: Outcome) -> Ttft:
    """As if all that the tier served had been computed; the device's cache stays."""
    return _ttft(job, outcome, np.zeros_like(outcome.hit_blocks))


def _ttft(job: ReplayJob, outcome: Outcome, hit_tokens: Numbers) -> Ttft:
    demand = Demand(
        arrivals_ns=_arrivals(job),
        hit_tokens=hit_tokens,
        load_ns=outcome.load_ns,
        rest_tokens=job.trace.input_tokens - outcome.device_tokens(job.trace) - hit_tokens,
    )
    server = Server(
        prefill_rate=job.prefill_rate,
        token_bytes=job.block_bytes / job.trace.block_tokens,
        partial_loads=job.partial_loads,
        loads_queue=not job.speed,  # else they were measured beside one another
    )
    return model_ttft(demand, server)


def _arrivals(job: ReplayJob) -> Numbers:
    """At the replay's speed; at full speed those of the trace."""
    arrivals = job.trace.arrivals_ns
    return (arrivals / job.speed).astype(np.int64) if job.speed else arrivals


class _Simulations:
    """Each setup simulated once."""

    def __init__(self, job: ReplayJob, begin: BeginPhase) -> None:
        self._job = job
        self._begin = begin
        self._known: dict[Setup, Outcome] = {}

    def of(self, setup: Setup) -> Outcome:
        if setup not in self._known:
            progress = self._begin(f"simulating {_name(setup)}", _total_bytes(self._job), None)
            self._known[setup] = simulate(self._job, setup, progress)
        return self._known[setup]


def _curves(job: ReplayJob, simulations: _Simulations) -> list[Curve]:
    curves = []
    for policy in {setup.policy: setup for setup in job.setups}.values():
        if policy.policy == "lru" and not job.device_blocks:
            curves.append(_exact(job, policy))
        else:
            setups = _along(job, policy, _SHARES)
            points = [_point(job, simulations.of(each)) for each in setups]
            curves.append(Curve(policy.policy, False, points))
    return curves


def _exact(job: ReplayJob, policy: Setup) -> Curve:
    curve = LruCurve(job.trace)
    tokens = int(job.trace.input_tokens.sum())
    shares = [
        step
        for low, high in itertools.pairwise(_SHARES)
        for step in np.geomspace(low, high, _EXACT_STEPS, endpoint=False).tolist()
    ]
    points = [
        CurvePoint(
            setup.capacity_bytes,
            curve.hit_blocks(setup.slots) / job.trace.references,
            curve.hit_tokens(setup.slots) / tokens,
        )
        for setup in _along(job, policy, [*shares, _SHARES[-1]])
    ]
    return Curve("lru", True, points)


def _along(job: ReplayJob, policy: Setup, shares: Sequence[float]) -> list[Setup]:
    """``policy`` with each share of the working set, as far as that holds a block."""
    setups = []
    for share in shares:
        with suppress(ConfigError):
            setups.append(_resized(job, policy, round(share * job.working_set_bytes)))
    return setups


def _resized(job: ReplayJob, setup: Setup, capacity_bytes: int) -> Setup:
    return make_setup(capacity_bytes, job.block_bytes, setup.eviction, setup.admission)


def _point(job: ReplayJob, outcome: Outcome) -> CurvePoint:
    hit_tokens = int(outcome.hit_tokens(job.trace).sum())
    return CurvePoint(
        outcome.setup.capacity_bytes,
        outcome.blocks_read / job.trace.references,
        hit_tokens / int(job.trace.input_tokens.sum()),
    )


def _total_bytes(job: ReplayJob) -> int:
    return job.trace.references * job.block_bytes


def _name(setup: Setup) -> str:
    return f"{setup.policy}, {display_size(setup.capacity_bytes)}"

"""What to replay and how, checked before anything is created: one line per mistake."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar, get_args

from kvdisk.bench.job import Geometry, existing_directory, geometry_of_size
from kvdisk.bench.presets import find_preset
from kvdisk.config import Admission, Backend, Direct, Eviction, PartialLoads, TierConfig
from kvdisk.errors import ConfigError
from kvdisk.placement import Placement
from kvdisk.replay.synthetic import PREFIX, generate, parse_synthetic
from kvdisk.replay.trace import BLOCK_TOKENS, Trace, read_trace
from kvdisk.units import format_size, parse_size

_MODEL_DEFAULT: Final = "llama-3-8b"
_BLOCK_BYTES_MIN: Final = 4096
_BLOCK_BYTES_MAX: Final = 1 << 29
# Of what the trace touches, when no capacity is given.
_SHARES: Final = (0.1, 0.25, 0.5)
_CAPACITY_MIN: Final = 1 << 20
_SETUPS_MAX: Final = 64
_PREFILL_RATE_MIN: Final = 1e-3  # tokens a second: with less no answer would fit a clock

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True)
class Setup:
    """One tier to try. ``slots`` is how many blocks ``capacity_bytes`` hold, records included."""

    capacity_bytes: int
    slots: int
    eviction: Eviction
    admission: Admission

    @property
    def policy(self) -> str:
        """Eviction, and admission unless everything is stored."""
        return self.eviction if self.admission == "all" else f"{self.eviction}, {self.admission}"


@dataclass(frozen=True, kw_only=True)
class ReplayJob:
    """Sizes in bytes. ``speed`` is a factor on the trace's time, 0 as fast as it goes.

    ``prefill_rate`` is tokens a second; ``load_rate`` bytes a second, of the simulated disk.
    ``partial_loads``: how much of a hit is loaded, in the model alone.
    ``device_blocks`` blocks are cached in front of the tier, 0 for none. ``path`` is None when
    nothing but simulation is asked for.
    """

    trace: Trace
    path: Path | None
    geometry: Geometry
    setups: Sequence[Setup]
    speed: float
    prefill_rate: float
    load_rate: int
    partial_loads: PartialLoads
    device_blocks: int
    backend: Backend
    direct: Direct
    verify: bool
    seed: int

    @property
    def block_bytes(self) -> int:
        return self.geometry.block_bytes

    @property
    def working_set_bytes(self) -> int:
        """Of all different blocks of the trace."""
        return self.trace.distinct_blocks * self.block_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """As the command line has them: text, or None for what was not given."""

    trace: str
    path: Path | None = None
    capacity: str | None = None
    eviction: str = "lru"
    admission: str = "all"
    bs: str | None = None
    model: str | None = None
    tokens: int = BLOCK_TOKENS
    speed: str = "max"
    prefill_rate: float = 40_000.0
    load_rate: str = "2GB"
    partial_loads: PartialLoads = "auto"
    limit: int = 0
    device_cache: str | None = None
    backend: Backend = "auto"
    direct: Direct = "auto"
    simulate: bool = False
    verify: bool = True
    seed: int = 1


def make_job(options: Options) -> ReplayJob:
    """Reads or generates the trace. Raises ConfigError for the first thing that cannot be."""
    path = None if options.simulate else existing_directory(options.path)
    if not 1 <= options.tokens <= 65536:
        raise ConfigError(f"tokens={options.tokens}: must be between 1 and 65536.")
    geometry = _geometry(options)
    evictions = _words("eviction", options.eviction, get_args(Eviction))
    admissions = _words("admission", options.admission, get_args(Admission))
    speed = _speed(options.speed, options.simulate)
    load_rate = parse_size(options.load_rate, "load-rate")
    _require_positive("load-rate", load_rate)
    _require_positive("prefill-rate", options.prefill_rate)
    if options.prefill_rate < _PREFILL_RATE_MIN:
        raise ConfigError(f"prefill-rate={options.prefill_rate:g}: at least {_PREFILL_RATE_MIN:g}.")
    if options.limit < 0 or options.seed < 0:
        raise ConfigError("limit and seed cannot be negative.")
    given = _capacities(options.capacity)
    device_blocks = _device_blocks(options.device_cache, geometry.block_bytes)
    trace = _trace(options)
    if trace.references == 0:
        raise ConfigError(f"{trace.source}: no request names a block.")
    capacities = given or _shares_of(trace.distinct_blocks * geometry.block_bytes, geometry)
    setups = [
        make_setup(capacity, geometry.block_bytes, eviction, admission)
        for capacity in capacities
        for eviction in evictions
        for admission in admissions
    ]
    if len(setups) > _SETUPS_MAX:
        raise ConfigError(f"{len(setups)} combinations are too many: at most {_SETUPS_MAX}.")
    return ReplayJob(
        trace=trace,
        path=path,
        geometry=geometry,
        setups=setups,
        speed=speed,
        prefill_rate=options.prefill_rate,
        load_rate=load_rate,
        partial_loads=options.partial_loads,
        device_blocks=device_blocks,
        backend=options.backend,
        direct=options.direct,
        verify=options.verify,
        seed=options.seed,
    )


def make_setup(
    capacity_bytes: int, block_bytes: int, eviction: Eviction, admission: Admission
) -> Setup:
    """With as many slots as a tier of that capacity has. Raises ConfigError below one block."""
    config = TierConfig(paths=(Path("/"),), capacity_bytes=capacity_bytes)
    slots = Placement.of(config, block_bytes, 1).slot_count
    return Setup(capacity_bytes, slots, eviction, admission)


def _trace(options: Options) -> Trace:
    if options.trace.startswith(PREFIX):
        kind, workload = parse_synthetic(options.trace)
        return generate(
            kind, workload, block_tokens=options.tokens, seed=options.seed, limit=options.limit
        )
    return read_trace(Path(options.trace), block_tokens=options.tokens, limit=options.limit)


def _geometry(options: Options) -> Geometry:
    if options.bs is not None:
        if options.model is not None:
            raise ConfigError("bs and model both set the block's size: give one of them.")
        block_bytes = parse_size(options.bs, "bs")
        source = geometry_of_size(block_bytes, None, "whole")
    else:
        preset = find_preset(options.model or _MODEL_DEFAULT)
        source = Geometry(
            preset.layers,
            preset.token_bytes * options.tokens,
            f"{preset.source}, {options.tokens} tokens a block",
        )
    if not _BLOCK_BYTES_MIN <= source.block_bytes <= _BLOCK_BYTES_MAX:
        raise ConfigError(
            f"a block of {format_size(source.block_bytes)}: must be between "
            f"{format_size(_BLOCK_BYTES_MIN)} and {format_size(_BLOCK_BYTES_MAX)}; "
            "change bs, or model and tokens."
        )
    return source


def _words(name: str, text: str, known: Sequence[Word]) -> list[Word]:
    """A list with commas, each word once."""
    found: list[Word] = []
    for word in dict.fromkeys(each.strip() for each in text.split(",")):
        match = [each for each in known if each == word]
        if not match:
            raise ConfigError(f'{name}="{word}": must be one of {", ".join(known)}.')
        found += match
    return found


def _speed(text: str, simulate: bool) -> float:
    if text == "max":
        return 0.0
    if simulate:
        raise ConfigError("speed is for real runs: a simulation has no time of its own.")
    try:
        speed = float(text)
    except ValueError:
        speed = math.nan
    if not 0 < speed < math.inf:
        raise ConfigError(f'speed="{text}": give a factor such as 10, or max.')
    return speed


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{name}={value:g}: must be more than 0.")


def _capacities(text: str | None) -> list[int]:
    if text is None:
        return []
    return sorted({parse_size(each.strip(), "capacity") for each in text.split(",")})


def _shares_of(working_set_bytes: int, geometry: Geometry) -> list[int]:
    """At least two blocks: less is no tier."""
    wanted = (max(round(share * working_set_bytes), 2 * geometry.block_bytes) for share in _SHARES)
    mebibytes = {max(1, -(-each // _CAPACITY_MIN)) for each in wanted}
    return [each * _CAPACITY_MIN for each in sorted(mebibytes)]


def _device_blocks(text: str | None, block_bytes: int) -> int:
    if text is None:
        return 0
    size = parse_size(text, "device-cache")
    if size < block_bytes:
        raise ConfigError(
            f"device-cache={text}: holds not even one block of {format_size(block_bytes)}."
        )
    return size // block_bytes

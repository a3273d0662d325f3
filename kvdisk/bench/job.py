"""What to measure, checked before anything is created: one line per mistake.

The options are fio's where fio has them (``bs``, ``size``, ``iodepth``, ``numjobs``, ``rw``,
``rwmixread``), with fio's meaning: ``size`` is one job's part of the file, ``rw`` alternates
directions in order and ``randrw`` at random places. A ``Job`` that exists is consistent in itself;
whether this machine can do it, the runners find out when they open.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from kvdisk.bench.presets import find_preset
from kvdisk.config import Backend, Direct
from kvdisk.errors import ConfigError
from kvdisk.units import display_size, format_size, parse_duration, parse_size

Layer = Literal["whole", "raw"]

PATTERNS: Final = ("read", "write", "randread", "randwrite", "rw", "randrw")
_SYNONYMS: Final = {"readwrite": "rw", "seqread": "read", "seqwrite": "write"}
_DEPTH_MAX: Final = {"raw": 4096, "whole": 1024}
_JOBS_MAX: Final = 64
_LAYERS_MAX: Final = 65536
_LAYERS_DEFAULT: Final = 32
_MODEL_DEFAULT: Final = "llama-3-8b"
_SIZE_DEFAULT: Final = 1 << 30
_SECTOR_BYTES: Final = 512
_PAGE_BYTES: Final = 4096
_BLOCK_BYTES_MAX: Final = 1 << 29
_RUNTIME_NS_MAX: Final = 24 * 3600 * 10**9
_ROUNDS_MAX: Final = 1000


@dataclass(frozen=True)
class Geometry:
    """How a KV block lies in memory: ``layers`` segments of ``segment_bytes`` each."""

    layers: int
    segment_bytes: int
    source: str

    @property
    def block_bytes(self) -> int:
        return self.layers * self.segment_bytes


@dataclass(frozen=True, kw_only=True)
class Job:
    """One measurement. Sizes in bytes, times in nanoseconds.

    ``io_bytes`` is what one I/O moves: the block, rounded up to whole pages in the whole layer.
    ``size_bytes`` is one job's part of the file, a multiple of ``io_bytes``; ``numjobs`` parts make
    the file. ``read_percent`` of the requests are reads.
    """

    path: Path
    layer: Layer
    rw: str
    read_percent: int
    geometry: Geometry
    io_bytes: int
    size_bytes: int
    iodepth: int
    numjobs: int
    runtime_ns: int
    rounds: int
    backend: Backend
    direct: Direct
    verify: bool
    allow_unregistered: bool
    ring_bytes: int  # of each shard, whole layer; 0: enough for the depth
    device: str  # where the blocks lie: cpu, cuda or cuda:N
    seed: int
    notes: tuple[str, ...] = ()  # where the job is not quite what was asked for

    @property
    def random(self) -> bool:
        return self.rw.startswith("rand")

    @property
    def reads(self) -> bool:
        return self.read_percent > 0

    @property
    def writes(self) -> bool:
        return self.read_percent < 100

    @property
    def file_bytes(self) -> int:
        return self.size_bytes * self.numjobs

    @property
    def blocks_per_job(self) -> int:
        return self.size_bytes // self.io_bytes


@dataclass(frozen=True, kw_only=True)
class Options:
    """As the command line has them: text, or None for what was not given."""

    path: Path | None
    layer: Layer = "whole"
    rw: str = "write"
    rwmixread: int = 50
    bs: str | None = None
    size: str | None = None
    model: str | None = None
    layers: int | None = None
    segment: str | None = None
    tokens: int | None = None
    iodepth: int = 32
    numjobs: int = 1
    runtime: str = "5s"
    rounds: int = 1
    backend: Backend = "auto"
    direct: Direct = "auto"
    verify: bool = True
    allow_unregistered: bool = False
    ring: str | None = None
    device: str = "cpu"
    seed: int = 1


def make_job(options: Options) -> Job:
    """Raises ConfigError for the first thing that cannot be."""
    path = existing_directory(options.path)
    rw = _pattern(options.rw)
    _within("iodepth", options.iodepth, 1, _DEPTH_MAX[options.layer])
    _within("numjobs", options.numjobs, 1, _JOBS_MAX)
    _within("rounds", options.rounds, 1, _ROUNDS_MAX)
    _within("rwmixread", options.rwmixread, 0, 100)
    _within("seed", options.seed, 0, 2**63 - 1)
    device = _device(options.device, options.layer)
    geometry = _geometry(options)
    io_bytes = geometry.block_bytes
    if options.layer == "whole":
        io_bytes = -(-io_bytes // _PAGE_BYTES) * _PAGE_BYTES
    _require_block_size(geometry.block_bytes)
    size_bytes = _size(options.size, io_bytes, options.iodepth)
    return Job(
        path=path,
        layer=options.layer,
        rw=rw,
        read_percent=_read_percent(rw, options.rwmixread),
        geometry=geometry,
        io_bytes=io_bytes,
        size_bytes=size_bytes,
        iodepth=options.iodepth,
        numjobs=options.numjobs,
        runtime_ns=parse_runtime(options.runtime),
        rounds=options.rounds,
        backend=options.backend,
        direct=options.direct,
        verify=options.verify,
        allow_unregistered=options.allow_unregistered,
        ring_bytes=_ring(options.ring, options.layer, io_bytes),
        device=device,
        seed=options.seed,
        notes=_rounding(options.size, size_bytes, io_bytes),
    )


def parse_runtime(text: str) -> int:
    """Nanoseconds; a bare number is seconds, as in fio."""
    plain = text.strip()
    bare = plain.replace(".", "", 1).isdecimal() and plain.isascii()
    runtime_ns = parse_duration(plain + "s" if bare else plain, "runtime")
    if not 0 < runtime_ns <= _RUNTIME_NS_MAX:
        raise ConfigError(f"runtime={text}: must be more than 0 and at most 24h.")
    return runtime_ns


def existing_directory(path: Path | None) -> Path:
    """Where to measure. Raises ConfigError, with what to do, when it is no directory."""
    if path is None:
        raise ConfigError("path is missing: name a directory on the disk to measure.")
    if "\0" in str(path):
        raise ConfigError("path: not the name of a directory.")
    try:
        path.stat()
    except OSError as error:
        raise ConfigError(f"path={path}: {error.strerror}. Name an existing directory.") from None
    if not path.is_dir():
        raise ConfigError(
            f"path={path} is not a directory: the file that is measured is made anew, without a "
            "name; name the directory to make it in."
        )
    return path.resolve()


def _pattern(rw: str) -> str:
    pattern = _SYNONYMS.get(rw.lower(), rw.lower())
    if pattern not in PATTERNS:
        raise ConfigError(f'rw="{rw}": must be one of {", ".join(PATTERNS)}.')
    return pattern


def _read_percent(rw: str, mix: int) -> int:
    if rw.endswith("read"):
        return 100
    return 0 if rw.endswith("write") else mix


def _device(device: str, layer: Layer) -> str:
    name = f"cuda:{device}" if device.isdecimal() and device.isascii() else device.lower()
    kind, colon, index = name.partition(":")
    indexed = index.isdecimal() and index.isascii()
    if name != "cpu" and (kind != "cuda" or indexed != bool(colon)):
        raise ConfigError(f'device="{device}": must be cpu, cuda or cuda:N.')
    if name != "cpu" and layer == "raw":
        raise ConfigError(f"device={device}: the raw layer copies no blocks; use layer=whole.")
    return name


def _geometry(options: Options) -> Geometry:
    """From a model, or from sizes; never from two that say the same thing differently."""
    if options.layers is not None:
        _within("layers", options.layers, 1, _LAYERS_MAX)
    if options.tokens is not None:
        _within("tokens", options.tokens, 1, 65536)
    if options.bs is not None:
        for name in ("model", "segment", "tokens"):
            if getattr(options, name) is not None:
                raise ConfigError(f"bs and {name} both set the block's size: give one of them.")
        return geometry_of_size(parse_size(options.bs, "bs"), options.layers, options.layer)
    if options.segment is not None:
        if options.model is not None or options.tokens is not None:
            raise ConfigError("segment is what model and tokens make: give one or the other.")
        segment_bytes = parse_size(options.segment, "segment")
        if segment_bytes < 8 or segment_bytes % 8:
            raise ConfigError(f"segment={options.segment}: must be a multiple of 8 bytes.")
        return Geometry(options.layers or _LAYERS_DEFAULT, segment_bytes, "as given")
    preset = find_preset(options.model or _MODEL_DEFAULT)
    tokens = options.tokens or preset.tokens
    return Geometry(
        options.layers or preset.layers,
        preset.token_bytes * tokens,
        f"{preset.source}, {tokens} tokens a block",
    )


def geometry_of_size(block_bytes: int, layers: int | None, layer: Layer) -> Geometry:
    """A block of that size in ``layers`` segments, or as many as suit it. Raises ConfigError."""
    _require_block_size(block_bytes)
    if layer == "whole" and block_bytes % _PAGE_BYTES:
        raise ConfigError(
            f"bs={format_size(block_bytes)} is not a multiple of {_PAGE_BYTES} bytes: change bs, "
            "or describe a block that does not fill its slot with layers and segment."
        )
    if layers is None:
        layers = _LAYERS_DEFAULT if block_bytes % (_LAYERS_DEFAULT * 8) == 0 else 1
    if block_bytes % 8:
        raise ConfigError(f"bs={format_size(block_bytes)} is not a multiple of 8 bytes: change bs.")
    if block_bytes % (layers * 8):
        raise ConfigError(
            f"bs={format_size(block_bytes)} does not fall into {layers} layers of whole 8-byte "
            "words: change bs or layers."
        )
    return Geometry(layers, block_bytes // layers, "as given")


def _require_block_size(block_bytes: int) -> None:
    if not _SECTOR_BYTES <= block_bytes <= _BLOCK_BYTES_MAX:
        raise ConfigError(
            f"bs={format_size(block_bytes)}: must be between {_SECTOR_BYTES}B and "
            f"{format_size(_BLOCK_BYTES_MAX)}."
        )


def require_aligned(job: Job, alignment: int) -> None:
    """Raise ConfigError unless every I/O of ``job`` is a whole number of ``alignment`` bytes."""
    if job.io_bytes % alignment:
        raise ConfigError(
            f"bs={format_size(job.io_bytes)} is not a multiple of {alignment} bytes, which "
            f"{job.path} needs: change bs"
            + (", or use --no-direct." if alignment > _SECTOR_BYTES else ".")
        )


def _size(text: str | None, io_bytes: int, iodepth: int) -> int:
    least = io_bytes * iodepth
    if text is None:
        return max(least, _SIZE_DEFAULT // io_bytes * io_bytes)
    size_bytes = parse_size(text, "size") // io_bytes * io_bytes  # whole blocks, as fio does
    if size_bytes < least:
        raise ConfigError(
            f"size={text} holds {size_bytes // io_bytes} blocks of {display_size(io_bytes)}, fewer "
            f"than iodepth={iodepth}: raise size to {format_size(least)} or lower iodepth."
        )
    return size_bytes


def _rounding(text: str | None, size_bytes: int, io_bytes: int) -> tuple[str, ...]:
    """What to say of a size that was no whole number of blocks."""
    if text is None or parse_size(text, "size") == size_bytes:
        return ()
    blocks = f"{size_bytes // io_bytes} whole blocks of {display_size(io_bytes)}"
    return (f"size={text} was rounded down to {blocks}, {display_size(size_bytes)}",)


def _ring(text: str | None, layer: Layer, io_bytes: int) -> int:
    if text is None:
        return 0
    if layer == "raw":
        raise ConfigError("ring: the raw layer has just the buffers that its depth needs.")
    ring_bytes = parse_size(text, "ring")
    if ring_bytes < 2 * io_bytes:
        raise ConfigError(f"ring={text}: must hold 2 blocks, {format_size(2 * io_bytes)}.")
    if ring_bytes // io_bytes > 0xFFFF:
        raise ConfigError(f"ring={text}: at most {format_size(0xFFFF * io_bytes)}.")
    return ring_bytes


def _within(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name}={value}: must be between {least} and {most}.")

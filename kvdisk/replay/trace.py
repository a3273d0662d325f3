"""A trace: which blocks each request needs, and when it came. Read, checked, written.

The format is that of the traces published with Mooncake (Qin et al., "Mooncake: Trading More
Storage for Less Computation", FAST 2025): a JSON object per line with ``timestamp`` (milliseconds),
``input_length`` and ``output_length`` (tokens) and ``hash_ids``, one id for each block of the
prompt, the last one perhaps partly filled. Equal ids mean equal tokens up to and with that block.
Other fields are ignored.

What always holds: a trace that exists has requests in the order of their time, each with distinct
ids and no more of them than its tokens fill; a mistake in a file is named with its line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvdisk.errors import ConfigError
from kvdisk.key_index import KeyBatch

BLOCK_TOKENS: Final = 512  # of the published traces

_FIELDS: Final = ("timestamp", "input_length", "output_length", "hash_ids")
_ID_BYTES: Final = 8
_TIMESTAMP_MS_MAX: Final = 1e12
_LENGTH_MAX: Final = 2**31 - 1

Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Request:
    """One line of a trace. ``arrival_ms`` since the trace began."""

    arrival_ms: float
    input_tokens: int
    output_tokens: int
    ids: Sequence[int]


class Trace:
    """Requests as columns. ``block_tokens`` is what an id stands for."""

    def __init__(self, requests: Sequence[Request], *, block_tokens: int, source: str) -> None:
        self.block_tokens = block_tokens
        self.source = source
        self.arrivals_ns: Numbers = np.array(
            [round(each.arrival_ms * 1e6) for each in requests], dtype=np.int64
        )
        self.input_tokens: Numbers = np.array([r.input_tokens for r in requests], dtype=np.int64)
        self.output_tokens: Numbers = np.array([r.output_tokens for r in requests], dtype=np.int64)
        counts = [len(each.ids) for each in requests]
        self.starts: Numbers = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        """Where each request's blocks begin in ``ids``, and at last where all end."""
        self.ids: Numbers = np.fromiter(
            (one for each in requests for one in each.ids), np.int64, int(self.starts[-1])
        )

    def __len__(self) -> int:
        return len(self.arrivals_ns)

    @property
    def references(self) -> int:
        """Blocks of all requests together, each as often as it occurs."""
        return len(self.ids)

    @cached_property
    def distinct_blocks(self) -> int:
        return len(np.unique(self.ids))

    @property
    def span_s(self) -> float:
        """From the first request to the last."""
        return float(self.arrivals_ns[-1] - self.arrivals_ns[0]) / 1e9

    @cached_property
    def reference_tokens(self) -> Numbers:
        """Tokens in each of ``ids``: a block's worth, or what is left in the prompt's last."""
        sizes = np.diff(self.starts)
        owner = np.repeat(np.arange(len(self)), sizes)
        within = np.arange(self.references) - self.starts[:-1][owner]
        left = self.input_tokens[owner] - within * self.block_tokens
        return np.minimum(left, self.block_tokens)

    @cached_property
    def keys(self) -> KeyBatch:
        """The key of each of ``ids``, encoded and hashed once; slices share that."""
        rows = np.zeros((self.references, 8), dtype=np.int64)  # of 64 bytes
        rows[:, 0] = self.ids
        lengths = np.full(self.references, _ID_BYTES, dtype=np.uint8)
        batch = KeyBatch.from_rows(rows.view(np.uint8), lengths)
        _ = batch.keys, batch.hashes
        return batch

    def slice_of(self, request: int) -> slice:
        """Where a request's blocks are in ``ids``, ``keys`` and ``reference_tokens``."""
        return slice(int(self.starts[request]), int(self.starts[request + 1]))

    def requests(self) -> Iterator[Request]:
        for number in range(len(self)):
            yield Request(
                float(self.arrivals_ns[number]) / 1e6,
                int(self.input_tokens[number]),
                int(self.output_tokens[number]),
                self.ids[self.slice_of(number)].tolist(),
            )


def read_trace(path: Path, *, block_tokens: int = BLOCK_TOKENS, limit: int = 0) -> Trace:
    """The first ``limit`` requests of a file, all when 0. Raises ConfigError, naming the line."""
    requests: list[Request] = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    request = _parse(line, block_tokens)
                    if requests and request.arrival_ms < requests[-1].arrival_ms:
                        raise ConfigError(
                            f"timestamp {request.arrival_ms:g} is before the line above's "
                            f"{requests[-1].arrival_ms:g}: sort the trace by time."
                        )
                except ConfigError as error:
                    raise ConfigError(f"{path}, line {number}: {error}") from None
                requests.append(request)
                if len(requests) == limit:
                    break
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from error
    if not requests:
        raise ConfigError(f"{path}: no requests in it.")
    return Trace(requests, block_tokens=block_tokens, source=path.name)


def write_trace(trace: Trace, path: Path) -> None:
    """As ``read_trace`` reads it. Raises ConfigError when the file cannot be written."""
    try:
        with path.open("w") as file:
            for request in trace.requests():
                values = (
                    _plain(request.arrival_ms),
                    request.input_tokens,
                    request.output_tokens,
                    request.ids,
                )
                file.write(json.dumps(dict(zip(_FIELDS, values, strict=True))) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}.") from error


def _parse(line: bytes, block_tokens: int) -> Request:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not JSON ({error}).") from None
    if not isinstance(content, dict):
        raise ConfigError("not a JSON object with " + ", ".join(_FIELDS) + ".")
    for name in _FIELDS:
        if name not in content:
            raise ConfigError(f'"{name}" is missing.')
    timestamp = content["timestamp"]
    if not _is_number(timestamp) or not 0 <= timestamp <= _TIMESTAMP_MS_MAX:
        raise ConfigError(
            f'"timestamp" is {_shown(timestamp)}: give milliseconds since the '
            "trace's beginning, below 10^12."
        )
    tokens = _count("input_length", content["input_length"], 1)
    ids = _ids(content["hash_ids"])
    blocks = -(-tokens // block_tokens)
    if len(ids) > blocks:
        raise ConfigError(
            f'"hash_ids" has {len(ids)} ids, but {tokens} tokens are {blocks} blocks of '
            f"{block_tokens}: set tokens to what an id of this trace stands for."
        )
    return Request(float(timestamp), tokens, _count("output_length", content["output_length"]), ids)


def _count(name: str, value: object, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LENGTH_MAX:
        raise ConfigError(f'"{name}" is {_shown(value)}: give a whole number from {least} on.')
    return value


def _ids(value: object) -> list[int]:
    if not isinstance(value, list) or not all(
        isinstance(each, int) and not isinstance(each, bool) and -(2**63) <= each < 2**63
        for each in value
    ):
        raise ConfigError(f'"hash_ids" is {_shown(value)}: give a list of 64-bit whole numbers.')
    if len(set(value)) != len(value):
        raise ConfigError('"hash_ids" names a block twice: a prefix has each of its blocks once.')
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _plain(milliseconds: float) -> int | float:
    return int(milliseconds) if milliseconds.is_integer() else milliseconds

"""Sizes and durations as people write them, turned into exact integers.

A size limit that is read 7 % wrong is a disk that fills up, so every value here is exact: nothing
passes through a float, a value that is not a whole number of bytes or nanoseconds is an error, and
so is a unit that two people would read differently ("gb").

Sizes
    ``k m g t p`` alone, in either case, are powers of 1024, as in fio: ``128k`` = 131072.
    ``KiB MiB GiB TiB PiB`` are powers of 1024, in either case.
    ``kB KB MB GB TB PB`` are powers of 1000, as disk vendors count.
    ``B`` or no unit: bytes.
Durations
    ``ns us ms s min h d``; a bare number is refused, since nobody can tell what it means.
"""

from __future__ import annotations

import difflib
import re
from fractions import Fraction
from typing import Final

from kvdisk.errors import ConfigError

_BINARY_LETTERS: Final = "kmgtp"
_SIZE_UNITS: Final[dict[str, int]] = {
    "": 1,
    "B": 1,
    **{letter: 1024**power for power, letter in enumerate(_BINARY_LETTERS, 1)},
    **{letter.upper(): 1024**power for power, letter in enumerate(_BINARY_LETTERS, 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate(_BINARY_LETTERS, 1)},
    **{f"{letter.upper()}B": 1000**power for power, letter in enumerate(_BINARY_LETTERS, 1)},
    "kB": 1000,
}
_BINARY_NAMES: Final = ("PiB", "TiB", "GiB", "MiB", "KiB")
_SIZE_NAMES: Final = (*_BINARY_NAMES, "PB", "TB", "GB", "MB", "kB", "B", *_BINARY_LETTERS)

_DURATION_UNITS: Final[dict[str, int]] = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "min": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 24 * 3600 * 10**9,
}
_NUMBER_AND_UNIT: Final = re.compile(r"([0-9]{1,24}(?:\.[0-9]{1,24})?)\s*([A-Za-z]*)", re.ASCII)


def parse_size(value: object, what: str = "size") -> int:
    """Bytes, as an int >= 0. ``what`` names the option in errors.

    Takes an int (bytes) or text such as ``"200GiB"``, ``"128k"``, ``"1.5 TB"``.
    Raises ConfigError for anything else, and for a value that is not a whole number of bytes.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise ConfigError(f"{what}={value}: a size cannot be negative.")
        return value
    if not isinstance(value, str):
        raise ConfigError(f'{what}={value!r}: write a whole number of bytes or text like "200GiB".')
    number, unit = _split(value, what, '"200GiB", "128k" (1024) or "2TB" (1000)')
    scale = _SIZE_UNITS.get(unit) or _SIZE_UNITS.get(unit.lower() if unit[1:2] in "iI" else unit)
    if scale is None:
        raise ConfigError(f'{what}="{value}": {_size_unit_advice(number, unit)}')
    return _whole(number * scale, what, value, "bytes")


def format_size(size_bytes: int) -> str:
    """The shortest exact text: ``parse_size(format_size(n)) == n`` for every n >= 0."""
    for power, name in zip(range(len(_BINARY_NAMES), 0, -1), _BINARY_NAMES, strict=True):
        if size_bytes and size_bytes % 1024**power == 0:
            return f"{size_bytes // 1024**power}{name}"
    return f"{size_bytes}B"


def display_size(size_bytes: int) -> str:
    """Rounded for people, never to be parsed back: ``"1.46 GiB"``."""
    for power, name in zip(range(len(_BINARY_NAMES), 0, -1), _BINARY_NAMES, strict=True):
        if size_bytes >= 1024**power:
            return f"{size_bytes / 1024**power:.2f} {name}"
    return f"{size_bytes} B"


def parse_duration(value: object, what: str = "duration") -> int:
    """Nanoseconds, as an int >= 0, from text such as ``"500ms"`` or ``"1.5s"``.

    Raises ConfigError for a number without a unit, an unknown unit or a fraction of a nanosecond.
    """
    if not isinstance(value, str):
        raise ConfigError(f'{what}={value!r}: write the unit, such as "500ms" or "2s".')
    number, unit = _split(value, what, '"500ms" or "2s"')
    scale = _DURATION_UNITS.get(unit)
    if scale is None:
        problem = "has no unit" if unit == "" else f'has the unknown unit "{unit}"'
        known = ", ".join(_DURATION_UNITS)
        raise ConfigError(f'{what}="{value}": {problem}; use one of {known}.')
    return _whole(number * scale, what, value, "nanoseconds")


def format_duration(duration_ns: int) -> str:
    """The shortest exact text: ``parse_duration(format_duration(n)) == n`` for every n >= 0."""
    for name in ("h", "min", "s", "ms", "us"):
        if duration_ns and duration_ns % _DURATION_UNITS[name] == 0:
            return f"{duration_ns // _DURATION_UNITS[name]}{name}"
    return f"{duration_ns}ns"


def _split(text: str, what: str, example: str) -> tuple[Fraction, str]:
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f'{what}="{text}": expected a number and a unit, such as {example}.')
    return Fraction(match[1]), match[2]


def _whole(amount: Fraction, what: str, text: str, unit: str) -> int:
    if amount.denominator != 1:
        raise ConfigError(f'{what}="{text}": not a whole number of {unit}; use a smaller unit.')
    return int(amount)


def _size_unit_advice(number: Fraction, unit: str) -> str:
    """What to write instead of ``unit``."""
    plain = f"{float(number):g}"
    letter = unit[:1].upper()
    if unit.lower() in {f"{known}b" for known in _BINARY_LETTERS}:
        decimal = "kB" if letter == "K" else f"{letter}B"
        return (
            f'"{unit}" can be read in two ways; write {plain}{letter}iB (powers of 1024) '
            f"or {plain}{decimal} (powers of 1000)."
        )
    near = difflib.get_close_matches(unit.lower(), [name.lower() for name in _SIZE_NAMES], n=1)
    if near:
        name = next(name for name in _SIZE_NAMES if name.lower() == near[0])
        return f'unknown unit "{unit}"; did you mean {plain}{name}?'
    return f'unknown unit "{unit}"; use KiB, MiB, GiB, TiB, or kB, MB, GB, TB.'

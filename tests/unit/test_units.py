"""Sizes and durations are exact: what is written is what is meant, or it is an error."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdisk.errors import ConfigError
from kvdisk.units import (
    display_size,
    format_duration,
    format_size,
    parse_duration,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("128k", 128 * 1024),
        ("128K", 128 * 1024),
        ("4m", 4 * 1024**2),
        ("2g", 2 * 1024**3),
        ("1T", 1024**4),
        ("1p", 1024**5),
        ("200GiB", 200 * 1024**3),
        ("200 gib", 200 * 1024**3),
        (" 1MIB ", 1024**2),
        ("1kB", 1000),
        ("1KB", 1000),
        ("2TB", 2 * 10**12),
        ("1.5GiB", 1536 * 1024**2),
        ("1.92TB", 1_920_000_000_000),
        (4096, 4096),
    ],
)
def test_sizes(text: object, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("200GIGS", "unknown unit"),
        ("200GiBs", "did you mean 200GiB"),
        ("200gb", "write 200GiB"),
        ("8Kb", "8kB"),
        ("200Gbit", "unknown unit"),
        ("", "expected a number"),
        ("GiB", "expected a number"),
        ("-1GiB", "expected a number"),
        ("1e9", "expected a number"),
        ("1_000", "expected a number"),
        ("1,5GiB", "expected a number"),
        ("0.1B", "whole number of bytes"),
        ("0.3k", "whole number of bytes"),
        ("٣GiB", "expected a number"),
        ("9" * 5000, "expected a number"),
        (-1, "negative"),
        (1.5, "whole number"),
        (True, "whole number"),
        (None, "whole number"),
    ],
)
def test_wrong_sizes_name_the_option_and_the_cure(text: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text, "capacity")
    assert says in str(caught.value)
    assert str(caught.value).startswith("capacity=")


@given(st.integers(0, 2**63))
def test_formatted_sizes_are_exact(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes
    display_size(size_bytes)


def test_display_is_rounded() -> None:
    assert display_size(1_570_000_000) == "1.46 GiB"
    assert display_size(17) == "17 B"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 500 * 10**6),
        ("2s", 2 * 10**9),
        ("1.5 s", 1_500_000_000),
        ("7us", 7000),
        ("7ns", 7),
        ("1min", 60 * 10**9),
        ("1h", 3600 * 10**9),
        ("30d", 30 * 24 * 3600 * 10**9),
        ("0s", 0),
    ],
)
def test_durations(text: str, expected: int) -> None:
    assert parse_duration(text) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("2", "has no unit"),
        (2, "write the unit"),
        (2.0, "write the unit"),
        ("2m", 'unknown unit "m"'),
        ("2 sec", 'unknown unit "sec"'),
        ("0.5ns", "whole number of nanoseconds"),
        ("-2s", "expected a number"),
    ],
)
def test_wrong_durations(text: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_duration(text, "load_deadline")
    assert says in str(caught.value)
    assert str(caught.value).startswith("load_deadline=")


@given(st.integers(0, 2**63))
def test_formatted_durations_are_exact(duration_ns: int) -> None:
    assert parse_duration(format_duration(duration_ns)) == duration_ns

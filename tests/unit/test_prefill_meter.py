"""Rates that are measured all the time: of a disk's loads, and of a GPU's steps by their size."""

from __future__ import annotations

import pytest

from kvdisk.prefill_meter import PrefillMeter
from kvdisk.rate_meter import RateMeter


def rate_of(meter: PrefillMeter, tokens: int) -> float | None:
    found = meter.of_size(tokens)
    return found.rate if found else None


def test_the_prefill_rate_leaves_out_idle_time() -> None:
    meter = PrefillMeter()
    assert rate_of(meter, 1000) is None
    for began_s in (0.0, 100.0, 200.0):
        meter.began(1000, began_s)
        meter.ended(began_s + 0.5)
        meter.began(0, began_s + 0.5)
        meter.ended(began_s + 50)
    assert rate_of(meter, 1000) == rate_of(meter, 10) == pytest.approx(2000)
    assert meter.largest == 1000
    assert meter.step_s == pytest.approx(0.5)


def test_the_prefill_rate_of_steps_that_overlap() -> None:
    """Each step is given to the GPU while the one before it runs."""
    meter = PrefillMeter()
    meter.began(1000, 0.0)
    meter.began(1000, 0.001)
    for number in range(1, 50):
        meter.ended(0.5 * number)
        meter.began(1000, 0.5 * number + 0.001)
    assert rate_of(meter, 1000) == pytest.approx(2000, rel=0.05)
    assert meter.tokens_under_way == 2000


def test_steps_nearly_as_large_as_they_may_be_are_of_one_size() -> None:
    """Beside answers of one token each, which are no prefill."""
    meter = PrefillMeter()
    for number, tokens in enumerate((8192, 8191, 8000, 7000)):
        meter.began(tokens, number)
        meter.ended(number + 0.5)
    assert rate_of(meter, 8192) == pytest.approx(2 * (8191 + 8000 + 7000) / 3, rel=0.05)


def test_a_step_counts_for_a_few_times_what_was_expected_at_most() -> None:
    meter = PrefillMeter()
    for began_s, seconds in ((0.0, 0.1), (1.0, 0.1), (2.0, 60.0)):
        meter.began(1000, began_s)
        meter.ended(began_s + seconds)
    assert rate_of(meter, 1000) > 10_000 / 3
    for number in range(20):
        meter.began(1000, 100.0 + number)
        meter.ended(100.5 + number)
    assert rate_of(meter, 1000) == pytest.approx(2000, rel=0.05), "one that is slow is found out"


def test_more_steps_under_way_than_two_are_paired_with_their_outputs() -> None:
    meter = PrefillMeter()
    for _ in range(10):
        meter.began(1000, 0.0)
    for number in range(10):
        meter.ended(0.1 * (number + 1))
    assert rate_of(meter, 1000) == pytest.approx(10_000)
    assert meter.tokens_under_way == 0


def test_a_rate_follows_what_came_last() -> None:
    meter = RateMeter()
    for _ in range(20):
        meter.add(100, 0.1)
    assert meter.rate == pytest.approx(1000)
    for _ in range(30):
        meter.add(10, 0.1)
    assert meter.rate == pytest.approx(100, rel=0.5)

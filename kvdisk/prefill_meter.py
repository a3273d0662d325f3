"""How many tokens of prompts a second the GPU computes, for each size of its steps.

No clock of its own: times are passed in, in seconds, amounts in tokens.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from kvdisk.rate_meter import RateMeter

# Guesses: of hits from a disk twenty times as fast as the GPU, one in 300 is computed to measure
# it; a GPU that was three times as slow for a while is found out after 128.
_BELIEVED: Final = 64  # hits; then a GPU's rate counts for twice as much, until it is measured
_DOUBLINGS_MAX: Final = 10
_FULL_STEPS: Final = 16  # then the largest of these is what a step takes, whatever it took before
_HELD_UP: Final = 3.0  # times as long as expected: what a step takes beyond that was not the GPU
_STEPS_AHEAD: Final = 64  # many more than are ever given to a GPU before the output of the first


@dataclass
class StepRate:
    """Of the steps of some size."""

    meter: RateMeter = field(default_factory=RateMeter)
    believed: int = 0  # so many hits were loaded by it since it was measured

    @property
    def rate(self) -> float | None:
        if self.meter.rate is None:
            return None
        return self.meter.rate * 2.0 ** min(self.believed // _BELIEVED, _DOUBLINGS_MAX)


class PrefillMeter:
    """How many tokens a second the GPU computes, from when its steps begin and end.

    Each size of a step has a rate of its own, since what a step costs in any case is much of a
    small one's time. Steps may overlap: the next one is given to the GPU before the output of the
    last one is here.
    """

    def __init__(self) -> None:
        self._rates: dict[int, StepRate] = {}  # by ``_size_of`` them
        self._under_way: deque[tuple[int, float]] = deque(maxlen=_STEPS_AHEAD)
        self._largest = 0
        self._full: deque[int] = deque(maxlen=_FULL_STEPS)  # that took no more
        self._ended_s = -math.inf

    @property
    def largest(self) -> int:
        """How many tokens of prompts a step takes at the most, as far as is known: what else the
        engine does may leave less of it than before.
        """
        return max(self._full) if len(self._full) == _FULL_STEPS else self._largest

    @property
    def tokens_under_way(self) -> int:
        """Of the steps whose output is not here yet."""
        return sum(tokens for tokens, _ in self._under_way)

    @property
    def step_s(self) -> float:
        """How long its largest step takes; 0: not yet known."""
        found = self.of_size(self.largest)
        return self.largest / found.rate if found and found.rate else 0.0

    def of_size(self, tokens: float, of_one: float = 0) -> StepRate | None:
        """What steps make where so many tokens wait to be computed, or the next larger ones; None:
        not known. ``of_one``: so many are of one prompt, for which a step may be the largest yet;
        for all together the largest will do that is known.
        """
        most = self.largest if self._full else max(self._largest, of_one)
        size, own_size = _size_of(min(tokens, most)), _size_of(min(of_one or tokens, most))
        known = [each for each, found in self._rates.items() if each >= own_size and found.rate]
        if not known:
            return None
        return self._rates[min((each for each in known if each >= size), default=max(known))]

    def began(self, tokens: int, now_s: float, *, full: bool = False) -> None:
        """A step of so many tokens of prompts, after all before it; ``full``: it takes no more."""
        self._under_way.append((tokens, now_s))
        if full or (self._full and tokens > self.largest):
            self._full.append(tokens)  # a step that takes them shows as well what steps may take
        self._largest = max(self._largest, tokens)

    def ended(self, now_s: float) -> None:
        """The output of the first step under way is here."""
        if not self._under_way:
            return
        tokens, began_s = self._under_way.popleft()
        seconds = now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        if tokens:
            self._measured(tokens, seconds)

    def _measured(self, tokens: int, seconds: float) -> None:
        size = _size_of(tokens)
        found = self._rates.get(size)
        if found is None:  # the first of its size may be compiled or tuned for
            self._rates[size] = StepRate()
            return
        if found.believed >= _BELIEVED:
            found.meter = RateMeter()  # what was doubted does not weigh on what is found out
        expected_s = tokens / found.meter.rate if found.meter.rate else math.inf
        found.meter.add(tokens, min(seconds, _HELD_UP * expected_s))
        found.believed = 0


def _size_of(tokens: float) -> int:
    """The exponent of the nearest power of two: steps nearly as large as they may be are of one."""
    return round(math.log2(tokens)) if tokens > 1 else 0

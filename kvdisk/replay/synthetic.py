"""Workloads for when no trace is at hand, generated from a few stated numbers and a seed.

``synthetic:conversation``
    Conversations begin at random (Poisson). Each has one of ``prompts`` shared system prompts,
    chosen by Zipf's law, and grows turn by turn: the question and answer of a turn are the context
    of the next. After an answer the user thinks for an exponentially distributed time, and goes on
    with probability 1 - 1/``turns``; so turns are geometric with that mean.
``synthetic:documents``
    Questions about ``documents`` documents, chosen by Zipf's law: document first, question after.
``synthetic:mixed``
    Both at once, ``share`` of the requests about documents.

Lengths are exponentially distributed about their means. Blocks get their ids as in a published
trace, numbered by first appearance; a block that is partly filled is another than the same block
filled up. What always holds: equal numbers and seed give the equal trace, on every machine.
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Final

from kvdisk.errors import ConfigError
from kvdisk.replay.trace import Request, Trace
from kvdisk.units import parse_duration

PREFIX: Final = "synthetic:"
KINDS: Final = ("conversation", "documents", "mixed")

_COUNT_MAX: Final = 10_000_000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What ``synthetic:`` takes after the kind. Lengths in tokens, means where not said otherwise.

    ``rate`` requests a second. ``zipf`` is the exponent: 0 makes all equally popular.
    ``context_tokens`` ends a conversation that has grown beyond.
    """

    requests: int = 5000
    rate: float = 2.0
    zipf: float = 1.0
    prompts: int = 50
    prompt_tokens: int = 2048
    turns: float = 5.0
    turn_tokens: int = 1000
    answer_tokens: int = 300
    think_ns: int = 60 * 10**9
    context_tokens: int = 131_072
    documents: int = 400
    document_tokens: int = 16_384
    question_tokens: int = 100
    share: float = 0.3


def parse_synthetic(text: str) -> tuple[str, Workload]:
    """Kind and numbers from ``synthetic:KIND,name=value,...``. Raises ConfigError."""
    kind, *settings = text.removeprefix(PREFIX).split(",")
    if kind not in KINDS:
        raise ConfigError(f'trace="{text}": the kinds are {", ".join(KINDS)}.')
    values: dict[str, int | float] = {}
    for setting in settings:
        name, equals, value = setting.strip().partition("=")
        if name not in _NAMES:
            near = difflib.get_close_matches(name, _NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(_NAMES)}."
            raise ConfigError(f'trace="{text}": nothing is called "{name}"; {hint}')
        if not equals or not value:
            raise ConfigError(f'trace="{text}": {name} needs a value, as in {name}=1.')
        if _NAMES[name] in values:
            raise ConfigError(f'trace="{text}": {name} is given twice.')
        values[_NAMES[name]] = _value(text, name, value)
    return kind, Workload(**values)  # type: ignore[arg-type]


def generate(kind: str, workload: Workload, *, block_tokens: int, seed: int, limit: int) -> Trace:
    """At most ``limit`` requests of the workload, when that is not 0."""
    count = min(workload.requests, limit or workload.requests)
    chance = random.Random(f"{kind} {seed}")
    ids = _Ids(block_tokens)
    share = {"conversation": 0.0, "documents": 1.0, "mixed": workload.share}[kind]
    sources = []
    if share < 1:
        sources.append(_conversations(workload, workload.rate * (1 - share), chance))
    if share > 0:
        sources.append(_questions(workload, workload.rate * share, chance))
    drafts = heapq.merge(*sources, key=lambda draft: draft.arrival_s)
    requests = [
        Request(round(draft.arrival_s * 1000), draft.tokens, draft.answer, ids.of(draft))
        for draft in itertools.islice(drafts, count)
    ]
    return Trace(requests, block_tokens=block_tokens, source=f"{PREFIX}{kind}")


@dataclass(frozen=True)
class _Draft:
    """A request before its blocks have ids: ``shared_tokens`` of the prompt are ``shared``'s, the
    others ``owner``'s."""

    arrival_s: float
    tokens: int
    answer: int
    shared: tuple[str, int]
    shared_tokens: int
    owner: tuple[str, int]


class _Ids:
    """Ids in the order of first appearance."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        self._known: dict[tuple[object, ...], int] = {}

    def of(self, draft: _Draft) -> list[int]:
        found = []
        for number in range(-(-draft.tokens // self._block_tokens)):
            end = (number + 1) * self._block_tokens
            key: tuple[object, ...] = (draft.owner, number)
            if end <= draft.shared_tokens:
                key = (draft.shared, number)
            elif end > draft.tokens:
                key = (draft.owner, number, draft.tokens)
            found.append(self._known.setdefault(key, len(self._known)))
        return found


def _conversations(workload: Workload, rate: float, chance: random.Random) -> Iterator[_Draft]:
    lengths = [_length(chance, workload.prompt_tokens) for _ in range(workload.prompts)]
    weights = _zipf(workload.prompts, workload.zipf)
    numbers = itertools.count()
    # When, a number that tells equal times apart, which prompt (-1: one begins), tokens so far.
    begins: tuple[float, int, int, int] = (0.0, next(numbers), -1, 0)
    due = [begins]
    while True:
        arrival_s, owner, prompt, context = heapq.heappop(due)
        if prompt < 0:
            gap_s = chance.expovariate(rate / workload.turns)
            heapq.heappush(due, (arrival_s + gap_s, next(numbers), -1, 0))
            [prompt] = chance.choices(range(workload.prompts), cum_weights=weights)
            context = lengths[prompt]
        tokens = context + _length(chance, workload.turn_tokens)
        answer = _length(chance, workload.answer_tokens)
        shared = ("prompt", prompt)
        yield _Draft(arrival_s, tokens, answer, shared, lengths[prompt], ("conversation", owner))
        context = tokens + answer
        if chance.random() >= 1 / workload.turns and context <= workload.context_tokens:
            think_s = chance.expovariate(1e9 / workload.think_ns) if workload.think_ns else 0.0
            heapq.heappush(due, (arrival_s + think_s, owner, prompt, context))


def _questions(workload: Workload, rate: float, chance: random.Random) -> Iterator[_Draft]:
    lengths = [_length(chance, workload.document_tokens) for _ in range(workload.documents)]
    weights = _zipf(workload.documents, workload.zipf)
    arrival_s = 0.0
    for owner in itertools.count():
        arrival_s += chance.expovariate(rate)
        [document] = chance.choices(range(workload.documents), cum_weights=weights)
        tokens = lengths[document] + _length(chance, workload.question_tokens)
        answer = _length(chance, workload.answer_tokens)
        shared = ("document", document)
        yield _Draft(arrival_s, tokens, answer, shared, lengths[document], ("question", owner))


def _length(chance: random.Random, mean: int) -> int:
    return max(1, round(chance.expovariate(1 / mean)))


def _zipf(count: int, exponent: float) -> list[float]:
    """Cumulative weights 1/rank^exponent."""
    return list(itertools.accumulate(rank**-exponent for rank in range(1, count + 1)))


# By the name that people write: without the unit, which the value carries.
_NAMES: Final = {each.name.removesuffix("_ns"): each.name for each in fields(Workload)}
_FRACTIONS: Final = {"rate": (1e-6, 1e6), "zipf": (0.0, 10.0), "turns": (1.0, 1e6)}
_SHARE: Final = (0.0, 1.0)


def _value(text: str, name: str, value: str) -> int | float:
    if name == "think":
        return parse_duration(value, "think")
    least, most = _FRACTIONS.get(name, _SHARE if name == "share" else (1, _COUNT_MAX))
    whole = name not in _FRACTIONS and name != "share"
    try:
        number: int | float = int(value) if whole else float(value)
    except ValueError:
        kind = "whole number" if whole else "number"
        raise ConfigError(f'trace="{text}": {name}={value} is not a {kind}.') from None
    if not least <= number <= most:  # NaN fails the comparison
        raise ConfigError(f'trace="{text}": {name} must be between {least:g} and {most:g}.')
    return number

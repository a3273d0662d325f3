"""A model of a serving engine that schedules a step while the one before it runs.

As vLLM's does by default: a step is given to the GPU before the output of the last one is there, so
that what a step has found out is known two steps later. Loads begin with the step that asked for
them, may write once the steps before it have ended, and are seen when a later step is launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdisk.load_plan import LOOK_AHEAD, LoadPlanner

TOKENS = 8192  # of a prompt, as far as the cache of the disk goes
QUESTION = 32  # more, which are computed in any case
STEP_TOKENS = 8192
CACHE_TOKENS = 8 * TOKENS + 1024  # what the device's cache holds
LAUNCH_S = 0.02
TOKEN_BYTES = 131072.0


@dataclass
class _Prompt:
    name: str
    hit: int
    left: int = TOKENS + QUESTION
    state: str = "waiting"  # asked, loading, read, loaded, running
    wanted: int = 0
    held: int = 0  # tokens of the device's cache
    seen_s: float = 0.0  # when its load is there for the engine to see
    ended_s: float = 0.0


@dataclass
class _Step:
    output_s: float
    tokens: int
    loaded: list[_Prompt] = field(default_factory=list)
    ends: list[_Prompt] = field(default_factory=list)
    disk_read: bool = False  # since the engine has begun


class OverlappingServer:
    """``disk`` and ``gpu`` in tokens a second. The clock goes on between calls of ``serve``."""

    def __init__(
        self,
        planner: LoadPlanner,
        *,
        disk: float,
        gpu: float,
        step_tokens: int = STEP_TOKENS,
        cache_tokens: int = CACHE_TOKENS,
    ) -> None:
        self.planner = planner
        self.disk = disk
        self.gpu = gpu
        self._step_tokens = step_tokens
        self._cache_tokens = cache_tokens
        self.ended_s: list[float] = []  # of each prompt of the last call, in order
        self.now = 0.0
        self.loaded = 0
        self._gpu_free = 0.0
        self._disk_free = 0.0
        self._read_at: float | None = None

    def serve(
        self, count: int, *, hit: int | list[int] = TOKENS, more: Sequence[int] = ()
    ) -> float:
        """Seconds until all of ``count`` prompts, which come at once, are computed.

        ``hit``: how many tokens of each the disk has; ``more``: by how many they are longer.
        """
        hits = hit if isinstance(hit, list) else [hit] * count
        began, waiting = self.now, [_Prompt(f"{self.now}-{n}", hit) for n, hit in enumerate(hits)]
        for prompt, longer in zip(waiting, more, strict=False):
            prompt.left += longer
        came = [*waiting]
        for prompt in waiting:
            self.planner.arrived(prompt.name)
        under_way: deque[_Step] = deque()
        while waiting or under_way:
            if waiting:
                under_way.append(self._launch(waiting))
                waiting = [prompt for prompt in waiting if prompt.left or prompt.state != "running"]
                if waiting and len(under_way) < 2 and under_way[-1].tokens:
                    continue
            self._take_output(under_way.popleft())
        self.ended_s = [prompt.ended_s - began for prompt in came]
        return self.now - began

    def _launch(self, prompts: list[_Prompt]) -> _Step:
        tokens = self._schedule(prompts)
        self.planner.step_began(tokens, self.now)
        for prompt in prompts:
            if prompt.state == "asked":
                self._begin_load(prompt)
        total = sum(tokens.values())
        output_s = max(self._gpu_free, self.now) + max(0.001, total / self.gpu)
        if total:
            self._gpu_free = output_s
        self.now += LAUNCH_S if total else 0.001
        loaded = [p for p in prompts if p.state == "loading" and p.seen_s <= self.now]
        for prompt in loaded:
            prompt.state = "read"
        read = self._read_at is not None and self._read_at <= self.now
        ends = [prompt for prompt in prompts if prompt.name in tokens and not prompt.left]
        return _Step(output_s, total, loaded, ends, read)

    def _schedule(self, prompts: list[_Prompt]) -> dict[str, int]:
        """Who runs comes first; then the others in order, until one finds no room."""
        tokens: dict[str, int] = {}
        for prompt in sorted(prompts, key=lambda each: each.state != "running"):
            left = self._step_tokens - sum(tokens.values())
            if left == 0:
                break
            if prompt.state in ("waiting", "loaded") and not self._admit(prompt, prompts):
                break
            if prompt.state == "running" and prompt.left:
                tokens[prompt.name] = min(left, prompt.left)
                prompt.left -= tokens[prompt.name]
                prompt.held += tokens[prompt.name]
        return tokens

    def _admit(self, prompt: _Prompt, prompts: list[_Prompt]) -> bool:
        """All of a prompt must find room beside what those that have begun still need."""
        free = self._cache_tokens - sum(each.held for each in prompts)
        others = [each for each in prompts if each is not prompt and each.state != "waiting"]
        if prompt.left > free - sum(each.left for each in others):
            return False
        if prompt.state == "loaded":
            prompt.state = "running"
            return True
        rest = prompt.left - prompt.hit
        wanted = self.planner.tokens_to_load(
            prompt.name,
            prompt.hit,
            rest,
            self.now,
            behind=[
                each.left for each in prompts if each.state == "waiting" and each is not prompt
            ][:LOOK_AHEAD],
            room_tokens=free - prompt.left,
        )
        prompt.wanted, prompt.state = wanted, "asked" if wanted else "running"
        prompt.left -= wanted
        prompt.held += wanted
        self.planner.load_began(prompt.name, wanted)
        self.planner.settled(prompt.name, prompt.left)
        return True

    def _begin_load(self, prompt: _Prompt) -> None:
        self.loaded += prompt.wanted
        self._disk_free = max(self._disk_free, self.now) + prompt.wanted / self.disk
        self._read_at = self._read_at or self._disk_free
        prompt.state, prompt.seen_s = "loading", max(self._disk_free, self._gpu_free)

    def _take_output(self, step: _Step) -> None:
        self.now = max(self.now, step.output_s)
        self.planner.step_ended(self.now)
        for prompt in step.loaded:
            prompt.state = "loaded"
            self.planner.load_ended(prompt.name)
        for prompt in step.ends:
            prompt.ended_s = self.now
            self.planner.gone(prompt.name)
        if step.disk_read:
            self.planner.measured_loads(self.disk * TOKEN_BYTES, self.now)


def computes(
    planner: LoadPlanner,
    tokens: int,
    seconds: float,
    began_s: float = 0.0,
    *,
    full: bool = True,
) -> None:
    """The GPU has taken so long for so many tokens: not only once, which may be chance. ``full``:
    its steps take no more.
    """
    for _ in range(3):
        planner.arrived("warm")
        planner.settled("warm", tokens + full)
        planner.step_began({"warm": tokens}, began_s - seconds)
        planner.step_ended(began_s)
        planner.gone("warm")
        began_s += seconds

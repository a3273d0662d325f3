"""How much of the disk each waiting request may have brought up into vLLM's RAM tier.

A request is looked at before anything is moved for it; then it is allowed a part of what the disk
has. It waits for that once, and all that is allowed and not yet taken keeps within a share of the
RAM tier: else long prompts push each other out of it, each before it is taken, for ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

# That the RAM tier lacks, looked at in a step of the engine while somebody waits for room.
_STEP_CHUNKS: Final = 2048


@dataclass(frozen=True)
class Parts:
    """What the GPU lacks of a prompt, in tokens, by where they are."""

    hit: int  # on the disk alone, as far as there is room above it
    above: int  # in the RAM tier, before the end of the hit
    free: int  # in the RAM tier behind it: of use only if all of the hit is loaded
    rest: int


@dataclass
class Look:
    """What a request finds, as vLLM's lookups tell it. ``end_token`` is where a chunk ends."""

    chunk_tokens: int
    on_disk: set[int] = field(default_factory=set)  # by their ends
    missing_end: int | None = None  # of the first chunk that neither RAM tier nor disk has
    chunks: int = 0  # that it was told of

    def told(self, end_token: int, on_disk: bool) -> None:
        """A chunk is not in the RAM tier."""
        self.chunks += 1
        if on_disk:
            self.on_disk.add(end_token)
        elif self.missing_end is None or end_token < self.missing_end:
            self.missing_end = end_token

    def parts(self, computed: int, prompt: int, room_tokens: float) -> Parts:
        """Of a prompt of ``prompt`` tokens, of which the GPU has the first ``computed``."""
        ends = sorted(end for end in self.on_disk if end > computed)
        count = int(min(len(ends), room_tokens / self.chunk_tokens))
        found_end = prompt // self.chunk_tokens * self.chunk_tokens
        if self.missing_end is not None:
            found_end = min(found_end, self.missing_end - self.chunk_tokens)
        last = ends[count - 1] if count else computed
        next_begin = ends[count] - self.chunk_tokens if count < len(ends) else found_end
        behind = max(0, next_begin - last)
        hit = min(count * self.chunk_tokens, last - computed)
        above, free = (last - computed - hit, behind) if count else (behind, 0)
        return Parts(hit, above, free, max(0, prompt - computed - hit - above - free))


@dataclass
class _Allowance:
    end_token: int
    rows: int  # of the RAM tier
    idle_since: int  # the step in which something was last under way for it


@dataclass
class _Request:
    loading: bool = False  # something is on its way up for it
    served: bool = False  # something was, since it was looked at
    in_vain: bool = False  # not all of that came: it never waits again
    cut_token: int | None = None  # where the first of its chunks ends that was not stored


class Allowances:
    """The requests of one scheduler that wait. Not thread-safe: one thread calls it."""

    def __init__(
        self, chunk_tokens: int, keys_per_chunk: int, room_rows: int, *, whole: bool = False
    ) -> None:
        """``room_rows`` of the RAM tier may be allowed at a time. ``whole``: hits are not split,
        but wait for room.
        """
        self.chunk_tokens = chunk_tokens
        self.look: Look | None = None  # while one is under way
        self._keys_per_chunk = keys_per_chunk
        self._room_rows = room_rows
        self._whole = whole
        self._no_room: set[str] = set()  # who was told to wait for it
        self._next: str | None = None  # who gets the room that comes
        self._next_rows = 0  # as many
        self._behind_next: set[str] = set()  # who was asked for since that one was
        self._allowed: dict[str, _Allowance] = {}
        self._allowed_rows = 0
        self._asked_steps = 0  # in which anybody was asked for
        self._step_is_new = True
        self._chunks_left = _STEP_CHUNKS
        self._requests: dict[str, _Request] = {}  # all there are

    @property
    def room_tokens(self) -> float:
        """How many tokens may be allowed now."""
        if self._whole:
            return float("inf")
        return self.rows_left // self._keys_per_chunk * self.chunk_tokens

    @property
    def rows_left(self) -> int:
        """Of the RAM tier, for what may still be allowed."""
        return max(0, self._room_rows - self._allowed_rows)

    def wait_for_room(self, request_id: str, look: Look) -> bool:
        """Whether a hit that is not to be split has no room yet. Those before it make some in the
        end; what comes behind it takes none of that, unless the engine asks for it no more.
        """
        if not self._whole:
            return False
        waits = self._next not in (None, request_id) and self._is_behind_next(request_id)
        if not waits:
            self._behind_next.clear()
            rows = len(look.on_disk) * self._keys_per_chunk
            waits = self._has_no_room_for(rows)
            self._next, self._next_rows = (request_id, rows) if waits else (None, 0)
        if waits:
            self._no_room.add(request_id)
        return waits

    def _is_behind_next(self, request_id: str) -> bool:
        """Unless it is asked for twice without that one between."""
        asked_before = request_id in self._behind_next
        self._behind_next.add(request_id)
        return not asked_before

    def _has_no_room_for(self, rows: int) -> bool:
        """Alone it may take more than that, so that somebody always goes on."""
        return self._allowed_rows > 0 and self._allowed_rows + rows > self._room_rows

    def __len__(self) -> int:
        """How much is remembered: nothing when all requests have ended."""
        by_request = len(self._requests) + len(self._allowed)
        in_line = len(self._no_room) + len(self._behind_next) + (self._next is not None)
        return by_request + in_line + self._allowed_rows

    def __contains__(self, request_id: str) -> bool:
        """Whether it is settled what a request may have."""
        return request_id in self._allowed

    def may_have(self, request_id: str, end_token: int) -> bool:
        """Whether the disk is asked for a chunk at all: what a request still lacks is computed."""
        request = self._known(request_id)
        if request.served or request.in_vain:
            return False
        allowance = self._allowed.get(request_id)
        return allowance is None or end_token <= allowance.end_token

    @contextmanager
    def looking(self, request_id: str) -> Iterator[Look]:
        """Within it nothing is brought up; a request that was preempted is asked for anew."""
        self._known(request_id).served = False
        look = self.look = Look(self.chunk_tokens)
        try:
            yield look
        finally:
            self._chunks_left -= 1 + look.chunks
            self.look = None

    def allow(self, request_id: str, look: Look, tokens: int) -> None:
        """So much of what is on the disk, in whole chunks: one at least, unless it is none."""
        self.settled(request_id)
        ends = sorted(look.on_disk)[: -(-tokens // self.chunk_tokens)]
        rows = len(ends) * self._keys_per_chunk
        allowance = _Allowance(max(ends, default=0), rows, self._asked_steps)
        self._allowed[request_id] = allowance
        self._allowed_rows += allowance.rows

    def cut_token(self, request_id: str) -> int | None:
        """Where the first chunk of a request ends that was not stored: what lies behind it would
        never be found.
        """
        return self._known(request_id).cut_token

    # --- what happens

    def must_wait(self, request_id: str) -> bool:
        """The engine asks for it: whether it must wait, since it has no room yet, or others wait
        for room and enough was looked at in this step.
        """
        if self._step_is_new:
            self._step_is_new = False
            self._asked_steps += 1
            self._give_back()
        if self._next is None or request_id in self._allowed:
            return False
        if request_id not in self._no_room:
            return self._chunks_left <= 0
        if request_id != self._next:
            return self._is_behind_next(request_id)
        self._behind_next.clear()
        return self._has_no_room_for(self._next_rows)

    def _give_back(self) -> None:
        """Who could have been taken in the last step (but its adapter has no room, the device has
        none, or it comes behind others) has no more room: of what was brought up, what others push
        out is computed; if nothing was, it is looked at anew.
        """
        for request_id, allowance in [*self._allowed.items()]:
            request = self._known(request_id)
            if request.loading or allowance.idle_since >= self._asked_steps - 1:
                continue
            if allowance.rows and not request.served:
                del self._allowed[request_id]
            self._allowed_rows -= allowance.rows
            allowance.rows = 0

    def step_ended(self) -> None:
        self._step_is_new = True
        self._chunks_left = _STEP_CHUNKS

    def cut(self, request_id: str, end_token: int) -> None:
        """A request's chunk that ends there is not stored."""
        request = self._known(request_id)
        request.cut_token = min(end_token, request.cut_token or end_token)

    def reset(self) -> None:
        """The engine has forgotten all its caches, and offers all of each prompt anew."""
        for request in self._requests.values():
            request.cut_token = None

    def arrived(self, request_id: str) -> None:
        self.gone(request_id)  # another of that name
        self._requests[request_id] = _Request()

    def load_began(self, request_id: str) -> None:
        self._known(request_id).loading = True

    def load_ended(self, request_id: str, *, whole: bool, still_loading: bool = False) -> None:
        """A load of it has ended, ``whole`` or not; ``still_loading``: others are under way."""
        request = self._known(request_id)
        request.loading, request.served = still_loading, True
        request.in_vain |= not whole
        if request_id in self._allowed:
            self._allowed[request_id].idle_since = self._asked_steps

    def settled(self, request_id: str) -> None:
        """The engine goes on with a request, and takes what was brought up."""
        if self._next == request_id:
            self._next = None
            self._behind_next.clear()
        self._behind_next.discard(request_id)
        self._no_room.discard(request_id)
        allowance = self._allowed.pop(request_id, None)
        if allowance is not None:
            self._allowed_rows -= allowance.rows

    def gone(self, request_id: str) -> None:
        self.settled(request_id)
        self._requests.pop(request_id, None)

    def _known(self, request_id: str) -> _Request:
        """Of one that has ended nothing is remembered."""
        return self._requests.get(request_id) or _Request()

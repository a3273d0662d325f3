"""What vLLM is told of chunks that come to the disk and leave it, for routers that follow it.

What always holds: of a chunk, stored and removed are told in turns, each once, stored first. So
nothing is told of what leaves before it was told, such as blocks of an earlier run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from vllm.v1.kv_offload.base import Locality, Medium, OffloadingEvent, OffloadKey


class ChunkEvents:
    """Nothing is kept unless ``wanted``: vLLM publishes events only where that is switched on."""

    def __init__(self, *, wanted: bool, locality: Locality | None = None) -> None:
        self.wanted = wanted
        self._locality = locality
        self._told: set[OffloadKey] = set()
        self._events: list[OffloadingEvent] = []

    def stored(self, chunks: Iterable[OffloadKey]) -> None:
        if self.wanted:
            self._tell([each for each in chunks if each not in self._told], removed=False)

    def removed(self, chunks: Iterable[OffloadKey]) -> None:
        if self.wanted:
            self._tell([each for each in chunks if each in self._told], removed=True)

    def take(self) -> Iterator[OffloadingEvent]:
        """Since the last call, in order."""
        events, self._events = self._events, []
        return iter(events)

    def _tell(self, chunks: list[OffloadKey], *, removed: bool) -> None:
        chunks = list(dict.fromkeys(chunks))
        if not chunks:
            return
        if removed:
            self._told.difference_update(chunks)
        else:
            self._told.update(chunks)
        self._events.append(
            OffloadingEvent(
                chunks,
                Medium.STORAGE,
                removed,
                locality=self._locality,
                removal_expected=not removed,
            )
        )

"""An exception of ours must not end the engine: from then on everything is a miss.

vLLM calls us on the threads that schedule and compute, and takes an exception there for the end of
the engine. Calls marked with ``failsafe`` answer as an empty tier does instead. After the first
exception, which the log tells with its traceback, nobody knows what state the object is in: it is
``broken`` and not asked again until the next start.

Opening and clearing are not marked: there an error is the right answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm.logger import init_logger

logger = init_logger("vllm.kvdisk")

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Method = Callable[Concatenate[Any, Arguments], Answer]


class Failsafe:
    """What has methods marked with ``failsafe``."""

    broken = False

    def _break_down(self) -> None:
        """End what is under way, so that nobody waits for it. Called once, when ``broken``.

        Should this raise too, the engine ends: nothing else would be safe.
        """


def failsafe(
    instead: Method[Arguments, Answer],
) -> Callable[[Method[Arguments, Answer]], Method[Arguments, Answer]]:
    """Marks a method of a ``Failsafe``; ``instead`` answers when it cannot."""

    def decorate(method: Method[Arguments, Answer]) -> Method[Arguments, Answer]:
        @functools.wraps(method)
        def call(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            if not self.broken:
                try:
                    return method(self, *args, **kwargs)
                except Exception:
                    self.broken = True
                    logger.exception(
                        "kvdisk: this is a bug, please report it. Requests go on, but nothing is "
                        "loaded or stored until the next start."
                    )
                    self._break_down()
            return instead(self, *args, **kwargs)

        return call

    return decorate

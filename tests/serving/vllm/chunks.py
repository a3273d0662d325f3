"""Chunks, a request, and a call that fails: for tests of the adapters without an engine."""

from __future__ import annotations

from typing import Any

from vllm.v1.kv_offload.base import ReqContext, make_offload_key

REQUEST = ReqContext("request")


def key(number: int) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def broken(*_: object, **__: object) -> Any:
    raise KeyError("planted")

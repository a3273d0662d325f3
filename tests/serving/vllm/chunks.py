"""Chunks, a request, a tier, and a call that fails: for tests of the adapters without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.kv_offload.base import ReqContext, make_offload_key

from kvdisk.serving.vllm.secondary_tier import KVDiskTier

REQUEST = ReqContext("request")
TOKENS = 16  # of a chunk


def key(number: int) -> Any:
    return make_offload_key(number.to_bytes(32, "big"), 0)


def broken(*_: object, **__: object) -> Any:
    raise KeyError("planted")


def secondary_tier(
    directory: Path,
    rows: npt.NDArray[np.uint8],
    group_tokens: Sequence[int] = (TOKENS,),
    **options: Any,
) -> KVDiskTier:
    """Below a RAM tier of these rows, with all that vLLM tells a secondary tier."""
    config = SimpleNamespace(
        groups=tuple(
            SimpleNamespace(tokens_per_block=tokens, layer_names=("layer",))
            for tokens in group_tokens
        ),
        kv_cache_layout="LBHNC",
        cache=SimpleNamespace(tokens_per_hash=TOKENS, blocks_per_chunk=1),
        model=SimpleNamespace(name="model", dtype="float32"),
        parallel=SimpleNamespace(
            world_size=1, tp_size=1, pp_size=1, data_parallel_index=0, data_parallel_size=1
        ),
    )
    spec = SimpleNamespace(
        config=config, kv_events_config=SimpleNamespace(enable_kv_cache_events=True)
    )
    return KVDiskTier(
        spec,
        rows.data,
        "KVDiskTier",
        enable_kv_events=True,
        identity="test",
        path=str(directory),
        capacity="4MiB",
        ring="1MiB",
        **options,
    )

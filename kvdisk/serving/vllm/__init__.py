"""kvdisk for vLLM. The classes below are what ``--kv-transfer-config`` names.

Each is loaded when it is first used, since that imports vLLM.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdisk.serving.vllm.connector import KVDiskConnector as KVDiskConnector
    from kvdisk.serving.vllm.secondary_tier import KVDiskTier as KVDiskTier
    from kvdisk.serving.vllm.tiering_connector import (
        KVDiskTieringConnector as KVDiskTieringConnector,
    )

_HOMES = {
    "KVDiskConnector": "connector",
    "KVDiskTier": "secondary_tier",
    "KVDiskTieringConnector": "tiering_connector",
}

__all__ = [*_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

"""kvdisk for vLLM. The class below is what ``--kv-transfer-config`` names.

It is loaded when it is first used, since importing it imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdisk.serving.vllm.connector import KVDiskConnector as KVDiskConnector

__all__ = ["KVDiskConnector"]


def __getattr__(name: str) -> Any:
    if name == "KVDiskConnector":
        from kvdisk.serving.vllm.connector import KVDiskConnector

        return KVDiskConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

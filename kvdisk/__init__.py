"""kvdisk: the disk tier for LLM serving KV caches.

The names below are the public ones. Each is loaded when it is first used, so that importing kvdisk
costs nothing and touches no device.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvdisk.config import TierConfig as TierConfig
    from kvdisk.errors import BusyError as BusyError
    from kvdisk.errors import ConfigError as ConfigError
    from kvdisk.errors import DeviceError as DeviceError
    from kvdisk.errors import KVDiskError as KVDiskError
    from kvdisk.errors import LayoutError as LayoutError
    from kvdisk.identity import Identity as Identity
    from kvdisk.layout import Layout as Layout
    from kvdisk.open_transfers import TierResult as TierResult
    from kvdisk.scheduler import TierScheduler as TierScheduler
    from kvdisk.tier import DiskTier as DiskTier
    from kvdisk.transfer import Direction as Direction
    from kvdisk.transfer import RowStatus as RowStatus
    from kvdisk.worker import TierWorker as TierWorker

__version__ = "0.1.0"

_HOMES = {
    "BusyError": "errors",
    "ConfigError": "errors",
    "DeviceError": "errors",
    "Direction": "transfer",
    "DiskTier": "tier",
    "Identity": "identity",
    "KVDiskError": "errors",
    "Layout": "layout",
    "LayoutError": "errors",
    "RowStatus": "transfer",
    "TierConfig": "config",
    "TierResult": "open_transfers",
    "TierScheduler": "scheduler",
    "TierWorker": "worker",
}

__all__ = ["__version__", *_HOMES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kvdisk' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kvdisk.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})

"""How the commands write what they have found: names from strangers, sizes, times."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path


def printable(text: str | Path) -> str:
    """Without control characters or bytes that are no UTF-8: names come from strangers."""
    shown = os.fspath(text) if isinstance(text, Path) else text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in shown)


def time_text(seconds: float) -> str:
    """Local time, to the second; "unknown" for what no clock says."""
    try:
        return datetime.fromtimestamp(seconds).isoformat(sep=" ", timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "unknown"


def count_text(count: int, noun: str) -> str:
    """``1 block``, ``2 blocks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

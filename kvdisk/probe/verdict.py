"""What a check says: one line for people, the same and more for machines.

"error" means that kvdisk cannot open here, "warning" that it will work with less speed or safety
than the machine could give, "ok" the rest. A remedy is there exactly when the status is not "ok".
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

Status = Literal["ok", "warning", "error"]

BETTER_DIRECTORY: Final = "use a directory on a local NVMe disk (ext4 or xfs)"


@dataclass(frozen=True)
class Check:
    """One line of the doctor. ``values`` are for machines: numbers in bytes, names, flags."""

    name: str
    status: Status
    found: str
    remedy: str | None = None
    values: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert (self.remedy is None) == (self.status == "ok"), self


def errno_name(number: int) -> str:
    """``"EPERM"`` for 1; a number without a name as itself."""
    return errno.errorcode.get(number, f"errno {number}")


def errno_text(number: int) -> str:
    """``"EPERM (Operation not permitted)"``."""
    return f"{errno_name(number)} ({os.strerror(number)})"

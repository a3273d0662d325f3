"""Which directories are no place for a cache, whoever asks: the open that refuses, or the doctor.

Who may rename in a directory may replace what lies in it, and blocks are people's prompts in
another form. All but ``refusal_of`` are pure functions of what stat(2) said.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import NamedTuple


class Refusal(NamedTuple):
    """``what`` is wrong with a path, and what to do about it: the two halves of a sentence."""

    what: str
    remedy: str

    def about(self, path: Path) -> str:
        return f"{path} {self.what}: {self.remedy}."


def link_refusal(status: os.stat_result) -> Refusal | None:
    """Why not to follow what lstat(2) said, if it is a link."""
    if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
        return Refusal(
            f"is a symbolic link that user {status.st_uid} made",
            "name the directory itself, or remove the link",
        )
    return None


def parent_refusal(status: os.stat_result) -> Refusal | None:
    """Why a directory must not have a cache's directory in it. It may be root's or ours."""
    if status.st_uid not in (0, os.geteuid()):
        return foreign_refusal(status)
    if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
        return Refusal(
            "is writable for everyone, who could then replace the cache",
            "chmod it to 0700 (or 1777 if others need it), or use another directory",
        )
    return None


def foreign_refusal(status: os.stat_result) -> Refusal:
    """Why not to use what belongs to somebody else."""
    return Refusal(
        f"belongs to user {status.st_uid}, but this process is user {os.geteuid()}",
        "run as that user, change the owner, or use another directory",
    )


def refusal_of(path: Path) -> Refusal | None:
    """Why a cache in ``path`` would be refused; None also when it cannot be looked at."""
    try:
        return link_refusal(os.lstat(path)) or parent_refusal(os.stat(path))
    except OSError:
        return None

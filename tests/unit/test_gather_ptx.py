"""The kernel's PTX in the tree is what its source says."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PIPELINE = ROOT / "native" / "pipeline"
PTX = (PIPELINE / "gather.ptx").read_text()


def noted(what: str) -> str:
    found = re.search(rf"^// {what}: (\S+)$", PTX, re.MULTILINE)
    assert found is not None
    return found[1]


def test_it_was_made_from_these_sources() -> None:
    sources = (PIPELINE / "gather.hpp").read_bytes() + (PIPELINE / "gather.cu").read_bytes()
    assert noted("sources") == hashlib.sha256(sources).hexdigest(), "run tools/make-ptx"


def test_old_drivers_take_it() -> None:
    assert re.search(r"^\.version 7\.0$", PTX, re.MULTILINE)
    assert re.search(r"^\.target sm_75$", PTX, re.MULTILINE)


def test_the_compiler_says_the_same(tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("no nvcc here: the PTX is compared with its sources' digest only")
    version = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True)
    if f"V{noted('nvcc')}" not in version.stdout:
        pytest.skip(f"another nvcc than {noted('nvcc')}, whose text would differ")
    made = tmp_path / "gather.ptx"
    subprocess.run([ROOT / "tools" / "make-ptx", made], check=True)
    assert made.read_text() == PTX

"""``bench/vllm_scheduler.py`` goes on working: nothing else calls what it reaches into."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here: make test-vllm")

pytestmark = pytest.mark.quick

BENCH = Path(__file__).resolve().parents[3] / "bench"


def test_every_call_is_timed(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    command = [sys.executable, str(BENCH / "vllm_scheduler.py"), "--blocks", "60000"]
    subprocess.run([*command, "--calls", "128", "--output", str(output)], check=True, timeout=120)
    results = json.loads(output.read_text())["results"]
    called = {name: {(row["call"], row["keys"]) for row in rows} for name, rows in results.items()}
    lookups = {("lookup, hit", 1), ("lookup, miss", 1)}
    assert called["KVDiskTier"] == lookups
    assert called["KVDiskManager"] == called["vLLM's RAM tier"] > lookups
    assert len(called["waiting requests"]) == 7
    assert all(row["us_median"] > 0 for rows in results.values() for row in rows)

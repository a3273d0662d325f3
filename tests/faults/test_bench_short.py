"""What `kvdisk bench` says of a disk that answers with a part of what it was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdisk.bench.job import Options, make_job
from kvdisk.bench.raw import RawRunner
from kvdisk.bench.whole import WholeRunner
from tests.faults.fuse_disk import fuse_disk, needs_fuse

pytestmark = [pytest.mark.root, needs_fuse]


def nothing(_: int) -> None:
    pass


@pytest.mark.parametrize("kind", [RawRunner, WholeRunner])
def test_short_answers_are_counted_and_their_rest_is_read(
    kind: type[RawRunner | WholeRunner], tmp_path: Path
) -> None:
    layer = "raw" if kind is RawRunner else "whole"
    with fuse_disk(tmp_path) as disk:
        options = Options(
            path=disk.mount, layer=layer, rw="read", bs="64k", size="2m", iodepth=4, runtime="100ms"
        )
        runner = kind(make_job(options))
        try:
            runner.fill(nothing)
            disk.faults.set(shorts=4)
            runner.run(nothing)
            verdict = runner.verify(nothing)
            assert verdict.checked == 32
            assert verdict.wrong == 0
            assert runner.facts().short_ios["read"] > 0
            assert runner.facts().short_ios["write"] == 0
        finally:
            runner.close()

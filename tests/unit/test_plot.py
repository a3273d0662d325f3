"""Pictures of results: that they say what they show, and that mistakes cost no measurement."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kvdisk.bench import plot as bench_plot
from kvdisk.cli import main

matplotlib = pytest.importorskip("matplotlib")


def result_of(block_bytes: int, depth: int = 8) -> dict[str, Any]:
    """As much of a result of kvdisk bench as a picture needs."""
    figures = {
        "io_bytes": 1 << 30,
        "bw_bytes": 2.5e9,
        "clat_ns": {"percentile": {"99.000000": 7e6}},
    }
    nothing = {"io_bytes": 0}
    return {
        "jobs": [
            {
                "job options": {"bs": block_bytes, "iodepth": depth},
                "read": figures,
                "write": nothing,
            }
        ],
        "kvdisk": {
            "layer": "whole",
            "mode": {"direct": True},
            "place": {"file_system": "ext4", "disk": "nvme0n1 (NVMe, A MODEL WITH A LONG NAME)"},
            "backend": {"name": "uring"},
            "host": {"kernel": "6.1.0-of-a-distribution"},
        },
    }


def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *sizes: int) -> Any:
    """The figure for results at these block sizes, as it was saved."""
    figures = []
    real = bench_plot.save
    monkeypatch.setattr(bench_plot, "save", lambda *what: (figures.append(what[0]), real(*what)))
    bench_plot.draw(
        [result_of(size) for size in sizes], tmp_path / "picture.png", ["x"] * len(sizes)
    )
    return figures[0]


def test_sizes_and_latencies_are_readable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    figure = drawn(monkeypatch, tmp_path, 128 << 10, 61 * 72 << 10, 4 << 20)
    above, below = figure.axes
    assert [text.get_text() for text in below.get_xticklabels()] == ["128 KiB", "4 MiB"]
    shown = [
        below.yaxis.get_major_formatter()(tick)
        for tick in below.get_yticks()
        if below.get_ylim()[0] <= tick <= below.get_ylim()[1]
    ]
    assert set(shown) >= {"5", "10"}, "a single latency has a scale too"
    assert above.get_ylim()[0] == 0
    assert above.get_ylim()[1] > 2500


def test_the_title_and_the_legend_are_within_the_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figure = drawn(monkeypatch, tmp_path, 128 << 10)
    (legend,) = figure.legends
    title = figure._suptitle.get_window_extent()
    assert title.x0 >= 0
    assert title.x1 <= figure.bbox.x1
    assert not title.overlaps(legend.get_window_extent())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_info:
        main([*arguments], prog_name="kvdisk")
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_errors_name_the_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    good, odd = tmp_path / "good.json", tmp_path / "odd.json"
    good.write_text(json.dumps(result_of(4096)))
    picture = str(tmp_path / "x.png")
    for content in ("{}", "[]", "{", '[{"jobs": []}]', '{"replay": {}, "runs": [{}]}'):
        odd.write_text(content)
        assert f"{odd}: " in refused(capsys, "plot", str(odd), "-o", picture)
    odd.write_text('{"replay": {}, "runs": [{}]}')
    assert f"{odd}: " in refused(capsys, "plot", str(good), str(odd), "-o", picture)
    assert not Path(picture).exists()


@pytest.mark.parametrize(
    "command", [["bench", "--runtime", "1h"], ["replay", "synthetic:mixed", "--path"]]
)
def test_nothing_is_measured_that_cannot_be_drawn(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Also where matplotlib is there and broken."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    arguments = [*command, str(tmp_path), "--plot", str(tmp_path / "x.png")]
    line = refused(capsys, *arguments)
    assert "kvdisk[plot]" in line
    assert "halted" in line, "why the import failed is said"
    assert list(tmp_path.iterdir()) == []

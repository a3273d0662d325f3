"""Simulated replays against an independent model, LRU by brute force; and the whole command."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.cli import main
from kvdisk.replay.curve import NEVER, LruCurve, stack_distances
from kvdisk.replay.job import Options, ReplayJob, Setup, make_job
from kvdisk.replay.simulate import PrefixCache, simulate
from kvdisk.replay.trace import Request, Trace

Paths = list[list[int]]


def trace_of(paths: Paths) -> Trace:
    requests = [Request(n * 10.0, max(1, 512 * len(ids)), 1, ids) for n, ids in enumerate(paths)]
    return Trace(requests, block_tokens=512, source="made")


def brute_force_hits(paths: Paths, slots: int) -> list[int]:
    """An LRU list as one would write it on a blackboard: the oldest first, the head youngest."""
    order: list[int] = []
    hits = []
    for path in paths:
        found = 0
        while found < len(path) and path[found] in order:
            found += 1
        hits.append(found)
        order = [one for one in order if one not in path] + path[::-1]
        order = order[max(0, len(order) - slots) :]
    return hits


def simulated_hits(paths: Paths, slots: int, eviction: str = "lru") -> list[int]:
    trace = trace_of(paths)
    cache = PrefixCache(slots, eviction)
    return [
        cache.serve(trace.keys[trace.slice_of(n)]) if path else 0 for n, path in enumerate(paths)
    ]


@st.composite
def prefix_paths(draw: st.DrawFn) -> Paths:
    """Requests over a random tree: each id has one parent, so each path is a prefix of tokens."""
    parents = [draw(st.integers(-1, n - 1)) for n in range(draw(st.integers(1, 40)))]

    def path_to(node: int) -> list[int]:
        path = []
        while node >= 0:
            path.append(node)
            node = parents[node]
        return path[::-1]

    ends = st.integers(0, len(parents) - 1)
    return [path_to(end) for end in draw(st.lists(ends, min_size=1, max_size=60))]


any_paths = st.lists(
    st.lists(st.integers(0, 30), unique=True, max_size=12), min_size=1, max_size=50
)


@given(prefix_paths(), st.integers(1, 45))
@settings(max_examples=60, deadline=None)
def test_the_allocator_s_lru_is_lru(paths: Paths, slots: int) -> None:
    assert simulated_hits(paths, slots) == brute_force_hits(paths, slots)


@given(st.one_of(prefix_paths(), any_paths))
@settings(max_examples=60, deadline=None)
def test_stack_distances_give_every_capacity_at_once(paths: Paths) -> None:
    trace = trace_of(paths)
    if not trace.references:
        return
    curve = LruCurve(trace)
    for slots in range(1, trace.distinct_blocks + 2):
        expected = sum(brute_force_hits(paths, slots))
        assert curve.hit_blocks(slots) == expected, slots
        assert curve.hit_tokens(slots) == 512 * expected


def test_stack_distances_of_a_few_requests() -> None:
    trace = trace_of([[1, 2, 3], [1, 4], [1, 2, 3], [4]])
    # Before the third request the order, youngest first, is 1 4 2 3; before the last 1 2 3 4.
    assert stack_distances(trace).tolist() == [NEVER] * 3 + [1, NEVER] + [1, 3, 4] + [4]


def test_stack_distances_beyond_one_bucket() -> None:
    chance = np.random.Generator(np.random.PCG64(3))
    paths = [(chance.permutation(400)[:30]).tolist() for _ in range(200)]
    curve = LruCurve(trace_of(paths))
    for slots in (30, 100, 250, 399, 400):
        assert curve.hit_blocks(slots) == sum(brute_force_hits(paths, slots))


@pytest.mark.parametrize("eviction", ["lru", "s3fifo"])
def test_a_cache_that_holds_all_misses_only_what_is_new(eviction: str) -> None:
    chance = np.random.Generator(np.random.PCG64(4))
    paths = [
        list(range(n, n + int(chance.integers(1, 9)))) for n in chance.integers(0, 9, 300) * 10
    ]
    seen: set[int] = set()
    for path, hits in zip(paths, simulated_hits(paths, 100, eviction), strict=True):
        assert hits == sum(one in seen for one in path)
        seen.update(path)


def test_a_request_longer_than_the_cache_keeps_its_head() -> None:
    assert simulated_hits([[1, 2, 3, 4, 5], [1, 2, 3, 4, 5]], 3) == [0, 3]


def job_of(trace: str, **options: Any) -> ReplayJob:
    return make_job(Options(trace=trace, simulate=True, bs="1MiB", **options))


def nothing(_: int) -> None:
    pass


def test_a_device_cache_serves_before_the_tier(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    paths = [[1, 2, 3], [4, 5], [1, 2, 3], [1, 2, 3, 6]]
    file.write_text(
        "".join(
            json.dumps(
                {"timestamp": n, "input_length": 512 * len(p), "output_length": 1, "hash_ids": p}
            )
            + "\n"
            for n, p in enumerate(paths)
        )
    )
    job = job_of(str(file), capacity="1GiB", device_cache="3MiB")
    [setup] = job.setups
    outcome = simulate(job, setup, nothing)
    # After 4 5 the device has them and the head of 1 2 3; the tier has the rest of it.
    assert outcome.device_blocks.tolist() == [0, 0, 1, 3]
    assert outcome.hit_blocks.tolist() == [0, 0, 2, 0]
    assert outcome.blocks_written == 6


def test_second_touch_stores_what_comes_again() -> None:
    trace = trace_of([[1, 2], [3], [1, 2], [1, 2]])
    cache = PrefixCache(100, "lru", "second-touch")
    assert [cache.serve(trace.keys[trace.slice_of(n)]) for n in range(4)] == [0, 0, 0, 2]
    assert cache.refused == {"admission": 3}
    assert cache.stored == 2


# --- the command ----------------------------------------------------------------------------------

WORKLOAD = "synthetic:mixed,requests=400,documents=20,document_tokens=4000"


def replay(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", *arguments, "--json", "-"], prog_name="kvdisk")
    captured = capsys.readouterr()
    assert exit_info.value.code == 0, captured.err
    document: dict[str, Any] = json.loads(captured.out)
    return document, captured.err


def test_the_whole_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, picture = tmp_path / "kept.jsonl", tmp_path / "picture.svg"
    arguments = ["--simulate", "--bs", "1MiB", "--capacity", "100MiB,400MiB"]
    arguments += ["--eviction", "lru,s3fifo", "--admission", "all,second-touch"]
    document, told = replay(
        capsys,
        WORKLOAD.replace("400", "100", 1),
        *arguments,
        "--write-trace",
        str(kept),
        "--plot",
        str(picture),
    )
    assert len(document["runs"]) == 8
    assert "<svg" in picture.read_text()
    for text in (
        "capacity",
        "TTFT mean",
        "400.00 MiB",
        "lru, second-touch",
        "twice the disk would",
    ):
        assert text in told
    again, _ = replay(capsys, str(kept), *arguments, "--no-curve")
    for one, other in zip(document["runs"], again["runs"], strict=True):
        for name in ("hit_blocks", "hit_token_share", "bytes_written", "ttft", "evicted"):
            assert one[name] == other[name]


def test_figures_are_consistent(capsys: pytest.CaptureFixture[str]) -> None:
    document, _ = replay(
        capsys, WORKLOAD, "--simulate", "--bs", "1MiB", "--capacity", "100MiB,200MiB,400MiB,800MiB"
    )
    about, runs = document["replay"], document["runs"]
    for run, larger in itertools.pairwise(runs):
        assert 0 < run["hit_share"] < larger["hit_share"] < 1
        assert run["doubled"]["hit_share"] == larger["hit_share"]
        assert run["ttft"]["mean_s"] > larger["ttft"]["mean_s"]
        assert document["without"]["mean_s"] > run["ttft"]["mean_s"]
    for run in runs:
        assert 0 < run["loaded_share"] <= 1
        assert run["bytes_read"] == run["hit_blocks"] * about["block_bytes"]
        stored = run["bytes_written"] // about["block_bytes"]
        assert stored - run["evicted"] <= run["slots"]
        assert run["hit_blocks"] + stored >= about["references"]
    [curve] = document["curves"]
    assert curve["exact"]
    points = curve["points"]
    for run in runs:
        at_most = [p["hit_share"] for p in points if p["capacity_bytes"] <= run["capacity_bytes"]]
        at_least = [p["hit_share"] for p in points if p["capacity_bytes"] >= run["capacity_bytes"]]
        assert max(at_most) - 0.002 <= run["hit_share"] <= min(at_least, default=1) + 0.002


def test_loading_all_of_each_hit_from_a_slow_disk_is_told_apart(
    capsys: pytest.CaptureFixture[str],
) -> None:
    slow = [WORKLOAD, "--simulate", "--load-rate", "100MB", "--no-curve"]
    split, told = replay(capsys, *slow)
    assert "comes later with the tier" not in told
    whole, told = replay(capsys, *slow, "--partial-loads", "off")
    assert "with --partial-loads auto a part" in told
    for one, other in zip(split["runs"], whole["runs"], strict=True):
        assert one["hit_blocks"] == other["hit_blocks"]
        assert one["loaded_share"] < other["loaded_share"] == 1
        assert one["ttft"]["mean_s"] < other["ttft"]["mean_s"]


MISTAKES = {
    "no path": (["--capacity", "1GiB"], "path is missing"),
    "a path that is not there": (["--path", "/nowhere/at/all"], "path=/nowhere/at/all"),
    "a path to simulate": (["--simulate", "--path", "/tmp"], "path is for real runs"),
    "a size that does not parse": (["--simulate", "--capacity", "1GiB,lots"], 'capacity="lots"'),
    "no size": (["--simulate", "--capacity", "1GiB,"], 'capacity=""'),
    "capacity below one block": (["--simulate", "--capacity", "32MiB"], "too small for blocks of"),
    "no such policy": (["--simulate", "--eviction", "lru,fifo"], 'eviction="fifo"'),
    "no such admission": (["--simulate", "--admission", "some"], 'admission="some"'),
    "two sizes of a block": (["--simulate", "--bs", "64k", "--model", "qwen"], "bs and model both"),
    "a block of odd size": (["--simulate", "--bs", "5000"], "not a multiple of 4096"),
    "a block of a terabyte": (["--simulate", "--bs", "1TiB"], "must be between"),
    "no such model": (["--simulate", "--model", "lama-3-8b"], 'Did you mean "llama-3-8b"?'),
    "tokens zero": (["--simulate", "--tokens", "0"], "tokens=0"),
    "speed of text": (["--path", "/", "--speed", "fast"], 'speed="fast"'),
    "speed zero": (["--path", "/", "--speed", "0"], 'speed="0"'),
    "speed of a simulation": (["--simulate", "--speed", "2"], "speed is for real runs"),
    "prefill that stands": (["--simulate", "--prefill-rate", "0"], "prefill-rate=0"),
    "prefill that takes for ever": (["--simulate", "--prefill-rate", "1e-9"], "at least 0.001"),
    "one file for two results": (
        ["--simulate", "--json", "/tmp/x.png", "--plot", "/tmp/x.png"],
        "that is json too",
    ),
    "prefill that is none": (["--simulate", "--prefill-rate", "nan"], "prefill-rate=nan"),
    "loads that stand": (["--simulate", "--load-rate", "0"], "load-rate=0"),
    "a device of less than a block": (
        ["--simulate", "--device-cache", "1MiB"],
        "not even one block",
    ),
    "limit below zero": (["--simulate", "--limit", "-1"], "cannot be negative"),
    "json nowhere": (["--simulate", "--json", "/nowhere/at/all"], "json=/nowhere/at/all"),
    "trace kept nowhere": (["--simulate", "--write-trace", "/nowhere/x"], "write-trace=/nowhere/x"),
    "plot of a strange kind": (["--simulate", "--plot", "picture.bmp"], ".png or .svg"),
}


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", "synthetic:conversation,requests=50", *arguments], prog_name="kvdisk")
    assert exit_info.value.code == 2
    captured = capsys.readouterr()
    [told] = captured.err.splitlines()
    assert told.startswith("kvdisk: error: ")
    assert said in told
    assert captured.out == ""


def test_the_trace_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    replay(capsys, "synthetic:documents,requests=9", "--simulate", "--write-trace", str(trace))
    kept = trace.read_text()
    (tmp_path / "same").symlink_to(trace)
    for option in ("--json", "--write-trace"):
        with pytest.raises(SystemExit) as exit_info:
            main(["replay", str(trace), "--simulate", option, str(tmp_path / "same")])
        assert exit_info.value.code == 2
        assert "that is what is read" in capsys.readouterr().err
    assert trace.read_text() == kept


def test_a_trace_of_few_blocks_needs_no_capacity(capsys: pytest.CaptureFixture[str]) -> None:
    document, _ = replay(capsys, "synthetic:conversation,requests=2", "--simulate")
    assert document["runs"]


def test_a_setup_has_the_slots_of_a_tier() -> None:
    job = job_of("synthetic:documents,requests=20", capacity="64MiB")
    [setup] = job.setups
    assert setup == Setup(64 << 20, 63, "lru", "all")


def test_a_kept_result_is_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "kept.json"
    document, _ = replay(
        capsys, "synthetic:documents,requests=30", "--simulate", "--capacity", "1GiB,2GiB"
    )
    kept.write_text(json.dumps(document))
    odd = tmp_path / "odd.json"
    odd.write_text(json.dumps({"replay": {}, "runs": [{}]}))
    for names, status in (([kept], 0), ([kept, kept], 2), ([odd], 2)):
        picture = tmp_path / f"{len(names)}{status}.png"
        with pytest.raises(SystemExit) as exit_info:
            main(["plot", *map(str, names), "-o", str(picture)], prog_name="kvdisk")
        assert exit_info.value.code == status
        assert picture.exists() == (status == 0)
        assert len(capsys.readouterr().err.splitlines()) == (status == 2)

"""Traces: read, checked, written, generated; and every mistake in one is a line that names it."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdisk.cli import main
from kvdisk.errors import ConfigError
from kvdisk.replay.synthetic import KINDS, Workload, generate, parse_synthetic
from kvdisk.replay.trace import Request, Trace, read_trace, write_trace

GOOD = {"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [7, 9]}


def lines_of(*requests: dict[str, Any] | str) -> str:
    return "".join(
        (each if isinstance(each, str) else json.dumps(each)) + "\n" for each in requests
    )


def columns(trace: Trace) -> list[list[Any]]:
    return [
        [each.arrival_ms, each.input_tokens, each.output_tokens, list(each.ids)]
        for each in trace.requests()
    ]


def test_a_file_in_mooncake_s_format(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    later = {"timestamp": 27482, "input_length": 1300, "output_length": 52, "hash_ids": [7, 9, -3]}
    file.write_text(lines_of(GOOD, "", later | {"type": "text", "turn": 2}))
    trace = read_trace(file)
    assert columns(trace) == [[0.0, 1000, 5, [7, 9]], [27482.0, 1300, 52, [7, 9, -3]]]
    assert (len(trace), trace.references, trace.distinct_blocks) == (2, 5, 3)
    assert trace.reference_tokens.tolist() == [512, 488, 512, 512, 276]
    assert trace.span_s == 27.482
    assert len(read_trace(file, limit=1)) == 1


def test_keys_are_those_of_the_ids(tmp_path: Path) -> None:
    trace = Trace(
        [Request(0, 1024, 1, [5, 2**40]), Request(1, 512, 1, [5])], block_tokens=512, source=""
    )
    assert list(trace.keys.keys) == [n.to_bytes(8, "little") for n in (5, 2**40, 5)]
    assert list(trace.keys[trace.slice_of(1)].keys) == [(5).to_bytes(8, "little")]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 10**9),
            st.lists(st.integers(-(2**63), 2**63 - 1), unique=True, max_size=9),
            st.integers(1, 512),
            st.integers(0, 10**6),
        ),
        min_size=1,
        max_size=20,
    )
)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, rows: Any) -> None:
    rows.sort(key=lambda row: row[0])
    requests = [
        Request(time, max(0, len(ids) - 1) * 512 + last, answer, ids)
        for time, ids, last, answer in rows
    ]
    file = tmp_path_factory.mktemp("trace") / "t.jsonl"
    trace = Trace(requests, block_tokens=512, source="")
    write_trace(trace, file)
    assert columns(read_trace(file)) == columns(trace)


MISTAKES = {
    "not JSON": ("{", "not JSON"),
    "cut off": (json.dumps(GOOD)[:40], "not JSON"),
    "not text": ('"\\ud800', "not JSON"),
    "not an object": ("[1, 2]", "not a JSON object"),
    "a field missing": (
        {k: v for k, v in GOOD.items() if k != "hash_ids"},
        '"hash_ids" is missing',
    ),
    "a time of text": (GOOD | {"timestamp": "soon"}, '"timestamp" is "soon"'),
    "a time that is none": (
        '{"timestamp": NaN, "input_length": 1, "output_length": 1, "hash_ids": []}',
        "NaN",
    ),
    "a time before": (GOOD | {"timestamp": -1}, '"timestamp" is -1'),
    "a length of zero": (GOOD | {"input_length": 0}, '"input_length" is 0'),
    "a length that is no number": (GOOD | {"output_length": True}, '"output_length" is true'),
    "a length of halves": (GOOD | {"input_length": 1.5}, '"input_length" is 1.5'),
    "ids of text": (GOOD | {"hash_ids": ["a"]}, '"hash_ids" is ["a"]'),
    "an id beyond 64 bits": (GOOD | {"hash_ids": [2**63]}, '"hash_ids" is'),
    "an id twice": (GOOD | {"hash_ids": [1, 1]}, "names a block twice"),
    "more ids than tokens": (GOOD | {"hash_ids": [1, 2, 3]}, "1000 tokens are 2 blocks of 512"),
}


@pytest.mark.parametrize(("line", "said"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named_with_its_line(
    line: Any, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(lines_of(GOOD, GOOD, line, GOOD))
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", str(file), "--simulate"], prog_name="kvdisk")
    assert exit_info.value.code == 2
    [told] = capsys.readouterr().err.splitlines()
    assert f"{file}, line 3: " in told
    assert said in told
    assert list(tmp_path.iterdir()) == [file]


def test_a_time_that_goes_back_is_named(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(lines_of(GOOD | {"timestamp": 5}, GOOD | {"timestamp": 4}))
    with pytest.raises(ConfigError, match="line 2: timestamp 4 is before the line above's 5"):
        read_trace(file)


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00" * 100)
    with pytest.raises(ConfigError, match="no requests in it"):
        read_trace(tmp_path / "empty")
    with pytest.raises(ConfigError, match="line 1: not JSON"):
        read_trace(tmp_path / "binary")
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="Is a directory"):
        read_trace(tmp_path)


# --- generated ones -------------------------------------------------------------------------------


def made(kind: str, seed: int = 1, **numbers: Any) -> Trace:
    return generate(kind, Workload(**numbers), block_tokens=512, seed=seed, limit=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_makes_the_same_trace_and_another_another(kind: str) -> None:
    first = columns(made(kind, requests=300))
    assert first == columns(made(kind, requests=300))
    assert first != columns(made(kind, requests=300, seed=2))
    assert columns(made(kind, requests=100)) == first[:100]


@pytest.mark.parametrize("kind", KINDS)
def test_generated_ids_are_prefixes(kind: str) -> None:
    trace = made(kind, requests=800)
    assert len(trace) == 800
    parents: dict[int, int | None] = {}
    seen = 0
    for request in trace.requests():
        assert len(request.ids) == -(-request.input_tokens // 512)
        for before, one in zip([None, *request.ids], request.ids, strict=False):
            assert parents.setdefault(one, before) == before  # an id has one history
            assert one <= seen  # numbered by first appearance
            seen = max(seen, one + 1)
    assert (np.diff(trace.arrivals_ns) >= 0).all()
    # What makes it worth caching: much is asked for again.
    assert trace.references > 1.5 * trace.distinct_blocks


def test_a_conversation_s_next_turn_begins_with_the_last_one() -> None:
    trace = made(
        "conversation", requests=400, prompts=1, prompt_tokens=1, rate=0.1, turn_tokens=3000
    )
    paths = [request.ids for request in trace.requests()]
    grown = [
        (one, other)
        for number, one in enumerate(paths)
        for other in paths[number + 1 :]
        if len(one) > 1 and one[0] == other[0]
    ]
    assert grown
    for one, other in grown:
        # The last block of the earlier turn may have been filled up since.
        assert list(other[: len(one) - 1]) == list(one[:-1])


def test_zipf_makes_some_documents_popular() -> None:
    def shares(zipf: float) -> list[int]:
        trace = made("documents", requests=2000, documents=50, zipf=zipf, document_tokens=5000)
        firsts = Counter(request.ids[0] for request in trace.requests() if len(request.ids) > 1)
        return sorted(firsts.values(), reverse=True)

    assert shares(1.2)[0] > 3 * shares(0.0)[0]


def test_the_rate_is_kept() -> None:
    for kind in KINDS:
        trace = made(kind, requests=4000, rate=4.0, think_ns=10**9)
        assert 4000 / trace.span_s == pytest.approx(4.0, rel=0.15), kind


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("synthetic:chat", "the kinds are conversation, documents, mixed"),
        ("synthetic:mixed,request=5", "did you mean requests?"),
        ("synthetic:mixed,zzz=5", 'nothing is called "zzz"; there are requests'),
        ("synthetic:mixed,requests", "requests needs a value"),
        ("synthetic:mixed,rate=1,rate=2", "rate is given twice"),
        ("synthetic:mixed,requests=0", "requests must be between 1 and"),
        ("synthetic:mixed,requests=many", "requests=many is not a whole number"),
        ("synthetic:mixed,rate=nan", "rate must be between"),
        ("synthetic:mixed,share=2", "share must be between 0 and 1"),
        ("synthetic:mixed,think=60", "has no unit"),
    ],
)
def test_mistakes_in_a_workload_are_one_line(
    text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", text, "--simulate"], prog_name="kvdisk")
    assert exit_info.value.code == 2
    [told] = capsys.readouterr().err.splitlines()
    assert said in told


def test_numbers_of_a_workload() -> None:
    kind, workload = parse_synthetic("synthetic:mixed,requests=70,rate=0.5,think=2min,share=0.25")
    assert kind == "mixed"
    assert workload == Workload(requests=70, rate=0.5, think_ns=120 * 10**9, share=0.25)

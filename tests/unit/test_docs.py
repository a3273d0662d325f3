"""The documents say what is true: their examples run, their links lead somewhere, docs/cli.md has
every command and option and none besides, the format's offsets are the sources', and tests that are
named exist."""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
import struct
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvdisk import metrics, rank_file, rank_header, slot_records
from kvdisk.cli import main
from kvdisk.config import TierConfig
from kvdisk.policy import make_eviction_policy
from kvdisk.slots import SlotAllocator
from kvdisk.transfer import KEY_BYTES_MAX

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
CLI = (ROOT / "docs" / "cli.md").read_text()
GROUP = click.Context(main, info_name="kvdisk")
COMMANDS = main.list_commands(GROUP)


def python_examples() -> list[object]:
    examples = []
    for document in DOCUMENTS:
        name = document.relative_to(ROOT)
        blocks = re.findall(
            r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE
        )
        examples += [pytest.param(each, id=f"{name}-{n}") for n, each in enumerate(blocks, 1)]
    return examples


@pytest.mark.parametrize("example", python_examples())
def test_python_examples_run(example: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", example],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_relative_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, heading = target.partition("#")
        linked = (document.parent / path) if path else document
        assert linked.exists(), f"{document.name}: {target}"
        if heading:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading in slugs, f"{document.name}: {target}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_make_targets_that_are_named_exist(document: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    # In code only: prose may "make room".
    text = document.read_text()
    code = re.findall(r"`([^`\n]+)`", text) + re.findall(r"^```.*?^```", text, re.DOTALL | re.M)
    for line in "\n".join(code).splitlines():
        for target in re.findall(r"(?:^|&& )make ([a-z][a-z-]*)", line.strip()):
            assert target in targets, f"{document.name}: make {target}"


def section_of(command: str) -> str:
    """What docs/cli.md says under the command's heading."""
    found = re.search(rf"^## kvdisk {command}\n(.*?)(?=^## |\Z)", CLI, re.DOTALL | re.MULTILINE)
    assert found is not None, f"docs/cli.md has no section '## kvdisk {command}'"
    return found.group(1)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_is_documented(name: str) -> None:
    command = main.get_command(GROUP, name)
    assert command is not None
    options = {
        option
        for parameter in command.params
        if isinstance(parameter, click.Option)
        for option in (*parameter.opts, *parameter.secondary_opts)
    }
    # The first column of the section's table; prose and examples may name others.
    rows = re.findall(r"^\| (`-.*?) \|", section_of(name), flags=re.MULTILINE)
    documented = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", "\n".join(rows)))
    assert documented == options


def test_no_other_command_is_documented() -> None:
    assert re.findall(r"^## kvdisk (\w+)$", CLI, flags=re.MULTILINE) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_explains_itself(name: str) -> None:
    command = main.get_command(GROUP, name)
    assert command is not None
    assert command.help
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            choices = isinstance(parameter.type, click.Choice)
            assert parameter.help or choices, f"{name}: {parameter.name} has no help"


def commands_in(document: Path) -> list[list[str]]:
    """The words of each command of ours in a document's examples."""
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```", document.read_text(), re.DOTALL | re.M)
    found = []
    for line in "\n".join(blocks).splitlines():
        code = line.split(" #")[0].removeprefix("$ ")
        for match in re.finditer(r"(?:^|; (?:do )?)(kvdisk|python bench/\S+) ([^;]*)", code):
            found.append([*match[1].split(), *match[2].split()])
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_examples_exist_with_these_options(document: Path) -> None:
    for words in commands_in(document):
        options = [word for word in words if word.startswith("--")]
        if words[0] == "python":
            source = (ROOT / words[1]).read_text()
            assert all(f'"{option}"' in source for option in options), words
            continue
        command = main.get_command(GROUP, words[1])
        assert command is not None, words
        known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)}
        assert set(options) <= known, words


# --- docs/file-format.md against the sources ------------------------------------------------------

Field = tuple[int, int, str]  # offset, bytes, name


def fields_in(heading: str) -> list[Field]:
    """The rows of the table below a heading of docs/file-format.md."""
    text = (ROOT / "docs" / "file-format.md").read_text()
    found = re.search(rf"^### {heading}\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, heading
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", found.group(1), re.MULTILINE)
    assert rows, heading
    return [(int(offset), int(size), name) for offset, size, name in rows]


def laid_out(sizes: list[tuple[str, int]]) -> list[Field]:
    fields, offset = [], 0
    for name, size in sizes:
        fields.append((offset, size, name))
        offset += size
    return fields


def members_of(struct_text: str) -> list[tuple[str, int]]:
    """Names and sizes of the members of a packed C++ struct, in order."""
    sizes = {"std::uint8_t": 1, "std::uint16_t": 2, "std::uint32_t": 4, "std::uint64_t": 8}
    sizes["std::array<std::byte, key_bytes_max>"] = KEY_BYTES_MAX
    members = []
    for kind, names in re.findall(r"^\s*(std::[\w:]+(?:<.*?>)?) ([\w, ]+)", struct_text, re.M):
        members += [(name.strip(), sizes[kind]) for name in names.split(",")]
    return members


def test_the_header_is_documented_as_it_is_packed() -> None:
    names = [f.name for f in dataclasses.fields(rank_header.RankHeader)]
    documented = fields_in("Header")
    codes = re.findall(r"\d*[a-zA-Z]", rank_header._FIELDS.format.removeprefix("<"))
    sizes = [struct.calcsize("<" + code) for code in codes]
    digest = rank_header._CHECKSUM_BYTES
    rest = rank_header.HEADER_BYTES - sum(sizes) - digest
    order = ["magic", "version", "zero", *names, "checksum", "zero"]
    assert documented == laid_out(list(zip(order, [*sizes, digest, rest], strict=True)))


def test_the_header_that_is_documented_is_the_one_that_is_written() -> None:
    header = rank_header.RankHeader(2**40, 8192, 77, 3, 8, bytes(range(32)), 5)
    page = header.pack()
    values = {name: page[offset : offset + size] for offset, size, name in fields_in("Header")[:-1]}
    assert values["magic"] == b"KVDISKIX"
    for name in ("epoch", "slot_bytes", "slot_count", "rank", "world_size", "clears"):
        assert int.from_bytes(values[name], "little") == getattr(header, name), name
    assert values["fingerprint"] == header.fingerprint
    assert values["checksum"] == hashlib.blake2b(page[:88], digest_size=8).digest()


def test_the_record_is_documented_as_both_languages_have_it() -> None:
    documented = fields_in("Slot record")
    in_python = [
        (slot_records.RECORD.fields[name][1], slot_records.RECORD.fields[name][0].itemsize, name)
        for name in slot_records.RECORD.names
    ]
    source = (ROOT / "native" / "pipeline" / "slot_record.hpp").read_text()
    text = source[source.index("struct SlotRecord {") : source.index("static_assert(sizeof(Slot")]
    assert documented == in_python == laid_out(members_of(text))
    magic = re.search(r"slot_record_magic = (0x[0-9A-F]+);", source)
    assert magic is not None
    assert int(magic[1], 16).to_bytes(4, "little") == b"KVSR"


def test_the_payload_s_seed_is_documented_as_it_is_made() -> None:
    source = (ROOT / "native" / "pipeline" / "slot_record.cpp").read_text()
    text = source[source.index("    struct {") : source.index("} const identity")]
    assert fields_in("What the payload's checksum covers") == laid_out(members_of(text))


def test_the_data_file_s_mark_is_documented() -> None:
    text = (ROOT / "docs" / "file-format.md").read_text()
    mark, value = rank_file._DATA_MARK, rank_file._DATA_MARK_VALUE.decode()
    assert f"the extended attribute `{mark}` with the value `{value}`" in text


# --- Tests that documents name --------------------------------------------------------------------

NAMED_TEST = re.compile(r"`((?:tests|native/tests)/[\w/]+\.(?:py|cpp))::([^`\n]+)`")


def named_tests() -> list[tuple[str, str, str]]:
    return [
        (document.relative_to(ROOT).as_posix(), *named)
        for document in DOCUMENTS
        for named in NAMED_TEST.findall(document.read_text())
    ]


@pytest.mark.parametrize(("document", "path", "name"), sorted(set(named_tests())))
def test_tests_that_are_named_exist(document: str, path: str, name: str) -> None:
    source = (ROOT / path).read_text()
    if path.endswith(".py"):
        assert re.search(rf"^ *def {re.escape(name)}\(", source, re.MULTILINE), document
    else:
        assert re.search(rf'TEST_CASE(?:_\w+)?\(\s*"{re.escape(name)}"', source), document


def test_every_scenario_and_every_failure_has_a_row() -> None:
    scenarios = (ROOT / "docs" / "scenarios.md").read_text()
    assert re.findall(r"^\| (A\d+) \|", scenarios, re.M) == [f"A{n}" for n in range(1, 37)]
    for name in ("scenarios.md", "failures.md"):
        for row in re.findall(r"^\|.*\|$", (ROOT / "docs" / name).read_text(), re.M):
            assert "::" in row or "none yet" in row or "make " in row or not row_is_claim(row), row


@pytest.mark.parametrize("name", ["scenarios.md", "failures.md"])
def test_no_row_names_a_test_twice(name: str) -> None:
    for row in re.findall(r"^\|.*\|$", (ROOT / "docs" / name).read_text(), re.M):
        named = NAMED_TEST.findall(row)
        assert len(named) == len(set(named)), row


def row_is_claim(row: str) -> bool:
    """Whether a row of a table says something, rather than heading or ruling it."""
    return not re.match(r"^\|( ?-+ ?\|)+$|^\| (event|scenario|what) ", row)


# --- Every option of the tier ---------------------------------------------------------------------


def test_every_option_is_in_the_tuning_guide_with_its_default() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text()
    section = text[text.index("## Every option") :]
    documented = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section, re.MULTILINE))
    options = TierConfig.from_mapping({"path": "/x", "capacity": "1GiB"}).effective()
    defaults = {name: f"`{json.dumps(value).strip(chr(34))}`" for name, value in options.items()}
    for required in ("path", "capacity"):
        defaults[required] = "none, required"
    assert documented == defaults


# --- Every metric ---------------------------------------------------------------------------------


def exported_metrics() -> set[str]:
    """Names under which the collector gives its families, without Prometheus' own ``_total``."""
    counters = metrics.TierCounters(block_bytes=1)
    engine = {name: 0 for name, _ in metrics._ENGINE_GAUGES}
    latencies = {source: {"bins": [], "count": 0, "sum": 0} for source, _, _ in metrics._LATENCIES}
    counts = SlotAllocator(1, make_eviction_policy("lru", 1)).counts()
    stats = metrics.TierStats(counters, counts, 0, {0: {**engine, **latencies}})
    collector = metrics.prometheus_collector(lambda: stats, lambda: "ok")
    return {family.name for family in collector.collect()}


def vllm_metrics() -> set[str]:
    """From the source: what defines them needs vLLM."""
    tree = ast.parse((ROOT / "kvdisk" / "serving" / "vllm" / "metrics.py").read_text())
    names = {
        node.target.id: ast.literal_eval(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and node.value is not None
    }
    whole = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and str(node.value).startswith("vllm:kvdisk_")
    ]
    counters = {f"vllm:kvdisk_{name}" for name in names["_COUNTERS"]}
    gauges = {f"vllm:kvdisk_slots_{name}" for name in names["_GAUGES"]}
    parts = {"vllm:kvdisk_", "vllm:kvdisk_slots_"}
    return counters | gauges | {str(name) for name in whole} - parts


def test_every_metric_is_documented_and_no_other_is_named() -> None:
    exported = exported_metrics() | vllm_metrics()
    text = (ROOT / "docs" / "tuning.md").read_text()
    start = text.index("## Every metric")
    section = text[start : text.index("## Every option", start)]
    pattern = re.compile(r"`((?:vllm:)?kvdisk_[a-z_]+)")
    assert set(pattern.findall(section)) == exported
    for document in DOCUMENTS:
        assert set(pattern.findall(document.read_text())) <= exported, document

"""The structure that docs/design.md draws, read from the sources: who may import whom.

A new module has to be given a place below before it passes; that is the point.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.resources
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "kvdisk"
NATIVE = ROOT / "native"

# Modules and packages right below kvdisk, by what they are about.
GROUPS = {
    "base": {"errors", "units", "memory", "config", "layout", "layout_overlap", "safe_directory"},
    "probe": {"probe"},
    "files": {"direct_mode", "private_files", "reserve", "rank_header", "rank_pages", "rank_file"},
    "slots": {"key_index", "free_slots", "slot_queue", "slot_table", "policy", "slots"},
    "transfer": {"transfer"},
    "tier": {
        "identity",
        "placement",
        "messages",
        "agreement",
        "clears",
        "open_transfers",
        "room",
        "disk_path",
        "disk_time",
        "path_health",
        "quiet_log",
        "background",
        "self_test",
        "metrics",
        "rate_meter",
        "prefill_meter",
        "load_plan",
        "scheduler",
        "worker",
        "tier",
        "testing",
    },
    "upkeep": {"slot_records", "looking", "ours", "survey", "scrub", "cleanup"},
    "bench": {"bench"},
    "replay": {"replay"},
    "serving": {"serving"},
    "cli": {"cli", "__main__"},
}

# Which groups each may import besides itself: down only.
BELOW: Mapping[str, Set[str]] = {
    "base": set(),
    "probe": {"base"},
    "files": {"base", "probe"},
    "slots": {"base"},
    "transfer": {"base", "files"},
    "tier": {"base", "probe", "files", "slots", "transfer"},
    "upkeep": {"base", "files", "tier"},
    "bench": {"base", "probe", "files", "slots", "transfer", "tier"},
    "replay": {"base", "slots", "transfer", "tier", "bench"},
    "serving": {"base", "slots", "transfer", "tier"},
    "cli": {"base", "probe", "files", "slots", "transfer", "tier", "bench", "replay", "upkeep"},
}

# The engine has one face. The raw benchmark measures the backend below the engine, so it has to
# reach past it; and who looks at files from outside needs the proof of records, not an engine.
NATIVE_IMPORTERS = {"kvdisk.transfer", "kvdisk.bench.raw", "kvdisk.slot_records"}

CODE_LINES_MAX = 500
TEST_LINES_MAX = 800


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported_modules(name: str) -> Iterator[str]:
    """The modules of kvdisk that a module imports, inside functions too, types included."""
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "kvdisk")
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively; spell the module out"
            if node.module is not None and node.module.split(".")[0] == "kvdisk":
                for alias in node.names:
                    full = f"{node.module}.{alias.name}"
                    is_module = full in MODULES or full == "kvdisk._native"
                    yield full if is_module else node.module


def group_of(name: str) -> str | None:
    """The group of a module, or None for kvdisk itself, which has a place of its own."""
    if name == "kvdisk":
        return None
    top = name.split(".")[1]
    for group, members in GROUPS.items():
        if top in members:
            return group
    pytest.fail(f"kvdisk.{top} has no place yet: add it to GROUPS in {Path(__file__).name}")


def cycle_in(graph: Mapping[str, Set[str]]) -> list[str]:
    """One circle of a directed graph, or nothing."""
    done: set[str] = set()

    def visit(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for successor in sorted(graph.get(node, ())):
                if found := visit(successor, [*path, node]):
                    return found
            done.add(node)
        return []

    for node in graph:
        if found := visit(node, []):
            return found
    return []


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name: str) -> None:
    group = group_of(name)
    for imported in imported_modules(name):
        if imported in ("kvdisk", "kvdisk._native") or group is None:
            continue
        assert group_of(imported) in {group, *BELOW[group]}, f"{name} imports {imported}"


@pytest.mark.parametrize("name", MODULES)
def test_only_the_engine_s_face_imports_the_native_module(name: str) -> None:
    if "kvdisk._native" in imported_modules(name):
        assert name in NATIVE_IMPORTERS


def test_no_circle_of_imports() -> None:
    # kvdisk itself offers names and is imported by whoever is imported: it is left out, except
    # that what it takes is below it (test_imports_point_down has no say there).
    graph = {
        name: {imported for imported in imported_modules(name) if imported != "kvdisk"}
        for name in MODULES
        if name != "kvdisk"
    }
    assert not cycle_in(graph)


def test_a_circle_would_be_found() -> None:
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


# --- The native sources ---------------------------------------------------------------------------

NATIVE_SOURCES = sorted(
    path.relative_to(NATIVE).as_posix()
    for pattern in ("*.cpp", "io/*.[ch]pp", "pipeline/*.[ch]pp")
    for path in NATIVE.glob(pattern)
)


def includes(source: str, delimiter: str) -> set[str]:
    pattern = r"^#include " + {'"': r'"([^"]+)"', "<": r"<([^>]+)>"}[delimiter]
    return set(re.findall(pattern, (NATIVE / source).read_text(), flags=re.MULTILINE))


@pytest.mark.parametrize("source", NATIVE_SOURCES)
def test_native_includes_point_down(source: str) -> None:
    # Besides io/ and pipeline/ there are only the files of the binding, at the top.
    below = {"io"} if source.startswith("io/") else {"io", "pipeline"}
    for included in includes(source, '"'):
        folder = included.split("/")[0]
        assert folder in below or (source.startswith("bind") and included.startswith("bind"))


def test_no_circle_of_includes() -> None:
    assert not cycle_in({source: includes(source, '"') for source in NATIVE_SOURCES})


@pytest.mark.parametrize("source", NATIVE_SOURCES)
def test_only_io_knows_liburing_and_only_the_binding_knows_python(source: str) -> None:
    for included in includes(source, "<"):
        if "uring" in included:
            assert source.startswith("io/")
        if included.startswith(("nanobind", "Python")):
            assert source.startswith("bind")


@pytest.mark.parametrize(
    "source", [s for s in NATIVE_SOURCES if re.match(r"pipeline/(pipeline|ring|slot_record)", s)]
)
def test_the_pipeline_owns_no_thread_no_clock_and_no_file(source: str) -> None:
    owned = {"thread", "mutex", "condition_variable", "chrono", "fcntl.h", "unistd.h", "fstream"}
    assert not includes(source, "<") & owned


# --- Size and shipping ----------------------------------------------------------------------------


def test_files_stay_small() -> None:
    suffixes = {".py", ".cpp", ".hpp", ".cu"}
    for folder in ("kvdisk", "native", "bench", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in suffixes:
                name = path.relative_to(ROOT)
                limit = TEST_LINES_MAX if "tests" in name.parts else CODE_LINES_MAX
                count = len(path.read_bytes().splitlines())
                assert count <= limit, f"{name} has {count} lines of at most {limit}: split it"


def test_the_command_is_installed() -> None:
    command = Path(sys.executable).with_name("kvdisk")
    shown = subprocess.run([command, "--version"], check=True, capture_output=True, text=True)
    assert shown.stdout == f"kvdisk {importlib.metadata.version('kvdisk')}\n"


def test_type_checkers_are_told_of_the_types() -> None:
    assert importlib.resources.files("kvdisk").joinpath("py.typed").is_file()
    stub = importlib.resources.files("kvdisk").joinpath("_native.pyi")
    assert stub.is_file()


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        ("kvdisk.cli", {"numpy", "torch", "rich", "kvdisk._native"}),
        ("kvdisk.transfer, kvdisk.slots, kvdisk.rank_file", {"torch"}),
    ],
)
def test_importing_does_not_bring_what_is_not_needed(modules: str, absent: set[str]) -> None:
    program = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True
    ).stdout.split()
    assert not absent & set(loaded)

"""The documents say what is true: their examples run, their links lead somewhere, and docs/cli.md
has every command and option, and none besides."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from kvdisk.cli import main

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

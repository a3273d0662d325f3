"""The command line, and `kvdisk doctor` on good, bad and odd places.

Most tests run the real command in a child. Verdicts that need a machine nobody has here are in
test_doctor_verdicts.py.
"""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

import kvdisk
from kvdisk.cli import _COMMANDS, main
from kvdisk.errors import KVDiskError
from kvdisk.probe import checks as checks_module
from kvdisk.probe.verdict import Check

REPOSITORY = Path(__file__).resolve().parents[2]
SECCOMP = [sys.executable, str(REPOSITORY / "tests/faults/seccomp.py")]
KVDISK = [sys.executable, "-m", "kvdisk"]
PROGRAM = "from kvdisk.cli import main; main(prog_name='kvdisk')"
NOBODY = 65534
RING = 256 * 1024**2

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def run(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "NO_COLOR": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, **options
    )


def doctor(directory: Path, *before: str) -> dict[str, dict[str, Any]]:
    """The checks by name, of a real run."""
    child = run(*before, *KVDISK, "doctor", "--json", str(directory))
    assert child.returncode in (0, 1), child.stderr
    assert child.stderr == ""
    return {check["name"]: check for check in json.loads(child.stdout)["checks"]}


@pytest.fixture
def native_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_module, "probe_native", lambda: None)


class TestCommandLine:
    def test_version(self) -> None:
        child = run(*KVDISK, "--version")
        assert (child.returncode, child.stdout) == (0, f"kvdisk {kvdisk.__version__}\n")

    def test_help_imports_no_command(self) -> None:
        code = "import sys; from kvdisk.cli import main; main(['--help'], standalone_mode=False); "
        code += "print([m for m in sys.modules if m.startswith('kvdisk.cli.')])"
        child = run(sys.executable, "-c", code)
        assert "doctor" in child.stdout
        assert child.stdout.splitlines()[-1] == "[]"

    def test_every_command_is_a_file_with_that_function(self) -> None:
        context = click.Context(main)
        for name in main.list_commands(context):
            command = main.get_command(context, name)
            assert command is not None
            assert command.help
        assert set(main.list_commands(context)) <= set(_COMMANDS)

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["nope"], "No such command 'nope'. See kvdisk --help."),
            (["--nope"], "No such option '--nope'. See kvdisk --help."),
            (["doctor", "--nope"], "No such option '--nope'. See kvdisk doctor --help."),
            (["bench", ".", "--iodepth", "many"], "'many' is not a valid integer."),
            (["inspect"], "Missing argument 'PATH'. See kvdisk inspect --help."),
            *(
                ([command, ""], "the name is empty.")
                for command in ("bench", "doctor", "gc", "inspect", "verify", "plot")
            ),
        ],
    )
    def test_bad_usage_is_a_line_and_2(self, arguments: list[str], said: str) -> None:
        child = run(sys.executable, "-c", PROGRAM, *arguments)
        assert (child.returncode, child.stdout) == (2, "")
        (line,) = child.stderr.splitlines()
        assert line.startswith("kvdisk: error: ")
        assert said in line

    @pytest.mark.parametrize(
        ("error", "status", "stderr"),
        [
            (KVDiskError("no room.\n  Do this."), 2, "kvdisk: error: no room. Do this.\n"),
            (click.ClickException("odd"), 2, "kvdisk: error: odd\n"),
            (KeyboardInterrupt(), 130, "\nkvdisk: interrupted\n"),
        ],
    )
    def test_failures_become_a_line_and_a_status(
        self, error: BaseException, status: int, stderr: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(_: Path) -> list[Check]:
            raise error

        monkeypatch.setattr("kvdisk.cli.doctor.run_checks", fail)
        result = CliRunner().invoke(main, ["doctor"])
        assert (result.exit_code, result.stderr) == (status, stderr)

    def test_a_bug_is_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("kvdisk.cli.doctor.run_checks", lambda _: 1 / 0)
        assert isinstance(CliRunner().invoke(main, ["doctor"]).exception, ZeroDivisionError)

    def test_names_that_the_terminal_cannot_show(self, tmp_path: Path) -> None:
        place = tmp_path / "\u00e9\udcff\x1b[31m"
        place.mkdir()
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONIOENCODING": "ascii"}
        child = subprocess.run(
            [*KVDISK, "doctor", str(place)], capture_output=True, env=environment, check=False
        )
        assert child.returncode in (0, 1)
        assert b"\x1b" not in child.stdout
        assert child.stderr == b""


class TestDoctor:
    def test_needs_neither_torch_nor_numpy_nor_the_native_module(self, tmp_path: Path) -> None:
        code = (
            "import sys\n"
            "for name in ('torch', 'numpy', 'kvdisk._native'): sys.modules[name] = None\n"
            "from kvdisk.cli import main\n"
            "main(['doctor', '--json', sys.argv[1]])\n"
        )
        child = run(sys.executable, "-c", code, str(tmp_path))
        assert child.returncode == 1
        checks = {check["name"]: check for check in json.loads(child.stdout)["checks"]}
        assert checks["native"]["status"] == "error"
        assert checks["directory"]["status"] == "ok"

    @pytest.mark.usefixtures("native_loads")
    def test_one_line_per_check_and_nothing_left(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(main, ["doctor", str(tmp_path)])
        assert result.exit_code == 0, result.output
        *lines, summary = result.output.splitlines()
        assert all(re.match(r"(ok|warning|error) +[a-z_]+ +\S", line) for line in lines)
        assert all(("To do:" in line) != line.startswith("ok") for line in lines)
        assert re.match(r"\d+ ok, \d+ warning, 0 error: kvdisk ", summary)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.usefixtures("native_loads")
    def test_json(self, tmp_path: Path) -> None:
        result = CliRunner().invoke(main, ["doctor", "--json", str(tmp_path)])
        document = json.loads(result.output)
        assert document["path"] == str(tmp_path)
        assert document["status"] in ("ok", "warning")
        assert [check["name"] for check in document["checks"]] == [
            *("native", "io_uring", "memlock", "memory", "directory", "file_system"),
            *("direct_io", "preallocate", "space", "disk", "scheduler", "numa", "cuda", "fio"),
        ]
        for check in document["checks"]:
            assert set(check) == {"name", "status", "found", "remedy", "values"}

    def test_the_current_directory_is_the_default(self, tmp_path: Path) -> None:
        child = run(*KVDISK, "doctor", cwd=tmp_path)
        assert child.stdout.splitlines()[-1].endswith(f" in {tmp_path}")
        assert list(tmp_path.iterdir()) == []

    def test_colours_on_a_terminal(self, tmp_path: Path) -> None:
        ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "PYTHONPATH": str(REPOSITORY)}
        environment.pop("NO_COLOR", None)
        subprocess.run(
            [*KVDISK, "doctor", str(tmp_path)], stdout=theirs, env=environment, check=False
        )
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 65536):
                output += chunk
        except OSError:  # EIO: the other end is closed and all was read
            pass
        os.close(ours)
        assert b"\x1b[32mok" in output
        assert b"file_system" in output

    def test_every_check_has_a_section_in_the_documentation(self, tmp_path: Path) -> None:
        text = (REPOSITORY / "docs/troubleshooting.md").read_text()
        for check in checks_module.run_checks(tmp_path):
            assert f"\n### `{check.name}`\n" in text, check.name

    @pytest.mark.parametrize("kind", ["missing", "file", "file/below", "nul\0"])
    def test_no_such_directory_is_2(self, kind: str, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        result = CliRunner().invoke(main, ["doctor", str(tmp_path / kind)])
        assert result.exit_code == 2
        assert re.fullmatch(r"kvdisk: error: .*directory\..*\n", result.stderr), result.stderr
        assert result.stdout == ""

    def test_proc_takes_no_files(self) -> None:
        checks = doctor(Path("/proc"))
        assert checks["directory"]["status"] == "error"
        assert checks["directory"]["values"]["create_errno"] in (errno.ENOENT, errno.EACCES)
        assert "direct_io" not in checks


class TestRefused:
    @pytest.mark.parametrize("call", ["io_uring_setup", "io_uring_enter", "io_uring_register"])
    @pytest.mark.parametrize("error", ["EPERM", "ENOSYS"])
    def test_io_uring_under_seccomp(self, call: str, error: str, tmp_path: Path) -> None:
        before = [*SECCOMP, "--syscall", call, "--errno", error, "--"]
        check = doctor(tmp_path, *before)["io_uring"]
        assert check["status"] == "warning"
        assert check["found"].startswith(f"{call} refused ({error}): a seccomp filter")
        assert "seccomp profile" in check["remedy"]
        assert not check["values"]["usable"]

    def test_io_uring_under_a_filter_that_kills(self, tmp_path: Path) -> None:
        check = doctor(tmp_path, *SECCOMP, "--syscall", "425", "--errno", "KILL", "--")["io_uring"]
        assert check["status"] == "error"
        assert "backend=threads" in check["remedy"]

    def test_o_direct_refused_at_open(self, tmp_path: Path) -> None:
        before = ["--syscall", "openat", "--when", "2&O_DIRECT", "--errno", "EINVAL", "--"]
        check = doctor(tmp_path, *SECCOMP, *before)["direct_io"]
        assert check["status"] == "warning"
        assert "open refused (EINVAL)" in check["found"]
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("error", "status"), [("EINVAL", "warning"), ("EIO", "error")])
    def test_o_direct_refused_at_the_first_write(
        self, error: str, status: str, tmp_path: Path
    ) -> None:
        before = [*SECCOMP, "--syscall", "pwritev", "--errno", error]
        before += ["--syscall", "pwritev2", "--errno", error, "--"]
        check = doctor(tmp_path, *before)["direct_io"]
        assert check["status"] == status
        assert error in check["found"]


# Drops privileges after the imports, since the interpreter may lie where only root can read.
AS_NOBODY = """
import os, resource, sys
import kvdisk.cli.doctor
from kvdisk.cli import main
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, limit))
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
main(["doctor", "--json", sys.argv[1]])
"""


@pytest.mark.root
@needs_root
class TestAsRoot:
    def as_nobody(self, directory: Path, memlock: int = 0) -> dict[str, dict[str, Any]]:
        child = run(sys.executable, "-c", AS_NOBODY, str(directory), str(memlock))
        assert child.returncode in (0, 1), child.stderr
        return {check["name"]: check for check in json.loads(child.stdout)["checks"]}

    def mounted(self, script: str, tmp_path: Path) -> dict[str, dict[str, Any]]:
        """The checks of ``$1/m`` after ``script``, in a mount namespace of its own."""
        (tmp_path / "m").mkdir()
        return doctor(
            tmp_path / "m",
            *("unshare", "--mount", "sh", "-ec", f'{script}\nshift; exec "$@"'),
            *("sh", str(tmp_path)),
        )

    @pytest.mark.parametrize("limit", [0, 64 * 1024, 8 * 1024**2])
    def test_memlock_too_low(self, limit: int) -> None:
        check = self.as_nobody(Path("/tmp"), limit)["memlock"]
        assert check["status"] == "warning"
        assert check["values"]["soft_bytes"] == limit
        assert check["values"]["needed_bytes"] > RING
        assert "memlock" in check["remedy"]

    @pytest.mark.parametrize("mode", [0o555, 0o000])
    def test_directory_without_rights(self, mode: int) -> None:
        # Not pytest's own directory: others may not even enter that one.
        place = Path("/tmp") / f"kvdisk-test-{os.getpid()}-{mode:o}"
        place.mkdir(mode=0o700)
        try:
            place.chmod(mode)
            check = self.as_nobody(place)["directory"]
        finally:
            place.rmdir()
        assert check["status"] == "error"
        assert "EACCES" in check["found"]
        assert str(NOBODY) in check["remedy"]

    def test_read_only_mount(self, tmp_path: Path) -> None:
        script = 'mount -t tmpfs none "$1/m"; mount -o remount,ro "$1/m"'
        checks = self.mounted(script, tmp_path)
        assert checks["directory"]["status"] == "error"
        assert "EROFS" in checks["directory"]["found"]
        assert "writable" in checks["directory"]["remedy"]

    def test_tmpfs_is_memory(self, tmp_path: Path) -> None:
        checks = self.mounted('mount -t tmpfs -o size=16M none "$1/m"', tmp_path)
        assert checks["file_system"]["status"] == "warning"
        assert "memory, not a disk" in checks["file_system"]["found"]
        assert checks["direct_io"]["status"] != "ok"
        assert checks["space"]["status"] == "warning"
        assert checks["disk"]["values"]["devices"] == []

    def test_full_tmpfs(self, tmp_path: Path) -> None:
        script = 'mount -t tmpfs -o size=1M none "$1/m"; head -c 1M /dev/zero >"$1/m/fill"'
        checks = self.mounted(script, tmp_path)
        assert checks["space"]["status"] == "error"
        assert checks["preallocate"]["status"] == "error"
        assert "ENOSPC" in checks["preallocate"]["found"]

    def test_ramfs_refuses_o_direct(self, tmp_path: Path) -> None:
        checks = self.mounted('mount -t ramfs none "$1/m"', tmp_path)
        assert "open refused (EINVAL)" in checks["direct_io"]["found"]
        assert "memory, not a disk" in checks["file_system"]["found"]

    @pytest.mark.skipif(shutil.which("mkfs.btrfs") is None, reason="needs mkfs.btrfs")
    def test_btrfs_copies_on_write_unless_told_not_to(self, tmp_path: Path) -> None:
        if "\tbtrfs\n" not in Path("/proc/filesystems").read_text():
            pytest.skip("no btrfs in this kernel")
        image = tmp_path / "image"
        with image.open("wb") as file:
            file.truncate(256 * 1024**2)
        subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
        checks = self.mounted('mount -o loop "$1/image" "$1/m"', tmp_path)
        assert checks["file_system"]["values"]["type"] == "btrfs"
        assert "chattr +C" in checks["file_system"]["remedy"]
        assert checks["disk"]["values"]["device"].startswith("loop")
        (tmp_path / "m").rmdir()
        script = 'mount -o loop "$1/image" "$1/m"; chattr +C "$1/m"'
        checks = self.mounted(script, tmp_path)
        assert checks["file_system"]["status"] == "ok"
        assert checks["direct_io"]["status"] == "ok"

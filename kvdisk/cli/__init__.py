"""The command line: ``kvdisk COMMAND``, one file per command, each loaded only when it is called.

Lazy, because ``kvdisk doctor`` must work on a machine where torch, numpy or the native module are
missing or broken: finding that out is its job. Even ``kvdisk --help`` imports no command.

What always holds: exit status 0 for success, 1 when a command ran and its verdict is bad, 2 when
it could not run (bad usage, or a KVDiskError: one line on stderr, never a traceback), 130 after
Ctrl-C. A command returns its status as an int, or None for 0.
"""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import click

from kvdisk import __version__
from kvdisk.errors import KVDiskError

EXIT_BAD_VERDICT: Final = 1
EXIT_CANNOT_RUN: Final = 2
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT, as shells count

# Command (and function in the module of that name) -> what the list of commands says of it.
_COMMANDS: Final = {
    "bench": "Measure stores and loads on a real disk.",
    "doctor": "Check whether this machine and a directory suit kvdisk.",
    "gc": "Remove namespaces that nothing uses any more.",
    "inspect": "Show what the rank files hold.",
    "plot": "Draw the results of kvdisk bench or replay.",
    "replay": "Run a recorded or generated trace against a tier.",
    "verify": "Check every stored block against its checksum.",
}


class _LazyGroup(click.Group):
    """Knows its commands by name alone, and turns every expected failure into an exit status."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"kvdisk.cli.{cmd_name}")
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command), command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name]) for name in self.list_commands(ctx)])

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        if not standalone_mode:
            return super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        _never_fail_to_encode()
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except KVDiskError as error:
            _fail(str(error))
        except click.exceptions.NoArgsIsHelpError as error:
            error.show()
            sys.exit(EXIT_CANNOT_RUN)
        except click.UsageError as error:
            command = error.ctx.command_path if error.ctx else "kvdisk"
            _fail(f"{error.format_message()} See {command} --help.")
        except click.ClickException as error:
            _fail(error.format_message())
        except (click.Abort, KeyboardInterrupt):
            click.echo("kvdisk: interrupted", err=True)
            sys.exit(EXIT_INTERRUPTED)
        sys.exit(status if isinstance(status, int) else 0)


def _never_fail_to_encode() -> None:
    """A file name that the terminal's encoding lacks is printed with escapes, not refused."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _fail(message: str) -> NoReturn:
    click.echo(f"kvdisk: error: {' '.join(message.split())}", err=True)
    sys.exit(EXIT_CANNOT_RUN)


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvdisk", message="%(prog)s %(version)s")
def main() -> None:
    """The disk tier for the KV caches of LLM servers."""

"""Run a command whose chosen system calls are refused: what containers do to io_uring.

    python tests/faults/seccomp.py --syscall io_uring_setup --errno EPERM -- kvdisk doctor
    python tests/faults/seccomp.py --syscall 427 --when 1=0 --errno ENOMEM -- COMMAND
    python tests/faults/seccomp.py --syscall openat --when '2&O_DIRECT' --errno EINVAL -- COMMAND

``--syscall``, with its ``--errno`` and any ``--when`` after it, may be given several times.
``--when N=VALUE`` and ``--when N&MASK`` limit the refusal to calls whose argument N (0 to 5) has
that value, or has any of those bits (the low 32 bits count). ``--errno KILL`` kills the caller
with SIGSYS instead of answering.

What always holds: the filter binds this process and what it becomes, nothing else; it is made by
hand (no libseccomp), needs no privilege, and refuses to run where system call numbers are unknown.
Standard library only. Formats: linux/seccomp.h, linux/filter.h, linux/audit.h.
"""

from __future__ import annotations

import argparse
import ctypes
import errno
import os
import platform
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
SYSCALLS = {
    "x86_64": {"openat": 257, "preadv": 295, "pwritev": 296, "preadv2": 327, "pwritev2": 328}
    | {"fallocate": 285, "statx": 332},
    "aarch64": {"openat": 56, "preadv": 69, "pwritev": 70, "preadv2": 286, "pwritev2": 287}
    | {"fallocate": 47, "statx": 291},
}
SYSCALLS_EVERYWHERE = {"io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427}

PR_SET_NO_NEW_PRIVS = 38
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2
RET_ALLOW = 0x7FFF0000
RET_ERRNO = 0x00050000
RET_KILL_PROCESS = 0x80000000
LOAD_WORD = 0x20  # BPF_LD | BPF_W | BPF_ABS
JUMP_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
JUMP_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
RETURN = 0x06  # BPF_RET | BPF_K
OFFSET_NUMBER, OFFSET_ARCH, OFFSET_ARGUMENTS = 0, 4, 16  # struct seccomp_data


@dataclass
class Rule:
    """Refuse system call ``number`` with ``action``, when every condition holds."""

    number: int
    action: int = RET_ERRNO | errno.EPERM
    conditions: list[tuple[int, str, int]] = field(default_factory=list)  # argument, = or &, value


def install(rules: Sequence[Rule]) -> None:
    """Bind this process, for ever. Raises OSError when the kernel refuses the filter."""
    program = b"".join(_compile(rules))
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, header, 0, 0),
    ):
        longs = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
        if libc.prctl(*longs) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "prctl")


def syscall_number(name: str) -> int:
    """A number, or the number of a name this file knows, on this machine."""
    if name.isdecimal():
        return int(name)
    known = SYSCALLS_EVERYWHERE | SYSCALLS[platform.machine()]
    return known[name]


def _compile(rules: Sequence[Rule]) -> list[bytes]:
    # A call made by another architecture's convention has other numbers: let it pass.
    code = [
        _step(LOAD_WORD, OFFSET_ARCH),
        _step(JUMP_EQUAL, AUDIT_ARCH[platform.machine()], yes=1),
        _step(RETURN, RET_ALLOW),
    ]
    for rule in rules:
        body = []
        for argument, operator, value in rule.conditions:
            body += [
                (LOAD_WORD, OFFSET_ARGUMENTS + 8 * argument),
                (JUMP_EQUAL if operator == "=" else JUMP_ANY_BIT, value),
            ]
        body.append((RETURN, rule.action))
        code += [_step(LOAD_WORD, OFFSET_NUMBER), _step(JUMP_EQUAL, rule.number, no=len(body))]
        for index, (operation, value) in enumerate(body):
            rest = len(body) - index - 1
            jump = operation in (JUMP_EQUAL, JUMP_ANY_BIT)
            code.append(_step(operation, value, no=rest if jump else 0))
    code.append(_step(RETURN, RET_ALLOW))
    return code


def _step(operation: int, value: int, *, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", operation, yes, no, value)


class _Syscall(argparse.Action):
    def __call__(self, parser, namespace, value, option_string=None):  # type: ignore[no-untyped-def]
        rules = namespace.rules
        if option_string == "--syscall":
            rules.append(Rule(syscall_number(value)))
            return
        if not rules:
            parser.error(f"{option_string} must follow a --syscall")
        if option_string == "--errno":
            kill = value == "KILL"
            rules[-1].action = RET_KILL_PROCESS if kill else RET_ERRNO | getattr(errno, value)
        else:
            rules[-1].conditions.append(_condition(value))


def _condition(text: str) -> tuple[int, str, int]:
    operator = "=" if "=" in text else "&"
    argument, _, value = text.partition(operator)
    number = getattr(os, value) if value.startswith("O_") else int(value, 0)
    return int(argument), operator, number


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.set_defaults(rules=[])
    for option in ("--syscall", "--errno", "--when"):
        parser.add_argument(option, action=_Syscall)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args()
    if platform.machine() not in AUDIT_ARCH:
        sys.exit(f"seccomp.py: no system call numbers for {platform.machine()}")
    install(options.rules)
    os.execvp(options.command[0], options.command)


if __name__ == "__main__":
    main()

"""Is io_uring permitted here, and if not, why?

Containers, sysctl settings and security modules refuse io_uring with an errno that names none of
them, and each of its three system calls can be refused alone. So each is called for real, on a
tiny ring that is closed at once, and the errno is explained from what the process can see.

What always holds: no request is submitted and no buffer registered. Only the standard library is
imported, since this file is also run by itself, in a child: a filter may answer a refused call by
killing the caller (SIGSYS), and that must become a finding too.

Numbers are from include/uapi/linux/io_uring.h; the system call numbers are the same on every
architecture that Linux gave io_uring on one day (all but alpha).
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import signal
import struct
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

SYSCALL_SETUP: Final = 425
SYSCALL_ENTER: Final = 426
SYSCALL_REGISTER: Final = 427

_PARAMS_BYTES: Final = 120  # struct io_uring_params
_FEATURES_OFFSET: Final = 20
_SETUP_R_DISABLED: Final = 1 << 6  # Linux 5.10
_SETUP_SINGLE_ISSUER: Final = 1 << 12  # Linux 6.0
_SETUP_DEFER_TASKRUN: Final = 1 << 13  # Linux 6.1
_REGISTER_PROBE: Final = 8  # Linux 5.6
_REGISTER_ENABLE_RINGS: Final = 12  # Linux 5.10
_PROBE_OPERATIONS: Final = 256
_OPERATION_SUPPORTED: Final = 1
_OPERATIONS: Final = {
    "READ_FIXED": 4,
    "WRITE_FIXED": 5,
    "POLL_ADD": 6,
    "READ": 22,
    "WRITE": 23,
}
_FEATURES_NEEDED: Final = ("NODROP", "EXT_ARG")  # Linux 5.11
_ENTRIES: Final = 4
_CAP_SYS_ADMIN: Final = 21
_CHILD_SECONDS: Final = 30.0

FEATURES: Final = (
    "SINGLE_MMAP",
    "NODROP",
    "SUBMIT_STABLE",
    "RW_CUR_POS",
    "CUR_PERSONALITY",
    "FAST_POLL",
    "POLL_32BITS",
    "SQPOLL_NONFIXED",
    "EXT_ARG",
    "NATIVE_WORKERS",
    "RSRC_TAGS",
    "CQE_SKIP",
    "LINKED_FILE",
    "REG_REG_RING",
)


@dataclass(frozen=True)
class UringAnswers:
    """What the kernel answered: an errno per system call (0: allowed, None: not reached)."""

    setup_errno: int
    enter_errno: int | None = None
    register_errno: int | None = None
    features: int = 0
    single_issuer: bool = False
    defer_taskrun: bool = False
    missing_operations: tuple[str, ...] = ()
    killed_by_signal: int = 0

    @property
    def usable(self) -> bool:
        """True when the io_uring backend can run."""
        allowed = (self.setup_errno, self.enter_errno, self.register_errno) == (0, 0, 0)
        return allowed and not (self.killed_by_signal or self.missing)

    @property
    def missing(self) -> tuple[str, ...]:
        """What the backend needs and this kernel has not, by name."""
        names = self.feature_names
        features = tuple(name for name in _FEATURES_NEEDED if name not in names)
        return (*features, *self.missing_operations)

    @property
    def refusal_errno(self) -> int:
        """The errno of the first call that was refused, or 0."""
        return self.setup_errno or self.enter_errno or self.register_errno or 0

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the IORING_FEAT_ bits, as far as this file knows them."""
        return tuple(name for bit, name in enumerate(FEATURES) if self.features >> bit & 1)


@dataclass(frozen=True)
class Surroundings:
    """What explains a refusal: read from /proc, never guessed."""

    kernel: str
    sysctl_disabled: int | None  # kernel.io_uring_disabled, None before Linux 6.6
    seccomp_filtered: bool
    sys_admin: bool
    container: str | None
    memlock_bytes: int | None  # soft limit, None: unlimited


def probe_uring() -> UringAnswers:
    """Ask in a child process, so that a filter which kills the caller kills only that."""
    command = [sys.executable, "-I", "-S", __file__]
    if not sys.executable or not Path(__file__).is_file():
        return probe_uring_here()
    try:
        child = subprocess.run(
            command, capture_output=True, timeout=_CHILD_SECONDS, check=False, close_fds=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return probe_uring_here()
    if child.returncode == -signal.SIGSYS:
        return UringAnswers(setup_errno=errno.EPERM, killed_by_signal=signal.SIGSYS)
    try:
        fields = json.loads(child.stdout)
    except ValueError:
        return probe_uring_here()
    fields["missing_operations"] = tuple(fields["missing_operations"])
    return UringAnswers(**fields)


def probe_uring_here() -> UringAnswers:
    """Ask in this process, in the way of the backend: a disabled ring, then enabled."""
    ring, features, setup_errno = _setup(_SETUP_R_DISABLED)
    if ring < 0:
        return UringAnswers(setup_errno=setup_errno)
    try:
        register_errno, missing = _probe_operations(ring)
        if register_errno == 0:
            register_errno = _call(SYSCALL_REGISTER, ring, _REGISTER_ENABLE_RINGS, None, 0)
        enter_errno = _call(SYSCALL_ENTER, ring, 0, 0, 0, None, 0)
        if register_errno and enter_errno == errno.EBADFD:
            enter_errno = 0  # allowed: it is the ring that was not enabled
    finally:
        os.close(ring)
    return UringAnswers(
        setup_errno=0,
        enter_errno=enter_errno,
        register_errno=register_errno,
        features=features,
        single_issuer=_setup_allows(_SETUP_SINGLE_ISSUER),
        defer_taskrun=_setup_allows(_SETUP_SINGLE_ISSUER | _SETUP_DEFER_TASKRUN),
        missing_operations=missing,
    )


def read_surroundings(root: Path = Path("/")) -> Surroundings:
    """Everything that can explain a refusal. ``root`` is where ``proc`` is found."""
    status = _read(root / "proc/self/status")
    disabled = _read(root / "proc/sys/kernel/io_uring_disabled").strip()
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return Surroundings(
        kernel=os.uname().release,
        sysctl_disabled=int(disabled) if disabled.isdecimal() else None,
        seccomp_filtered=status_field(status, "Seccomp") == "2",
        sys_admin=has_capability(status, _CAP_SYS_ADMIN) and initial_user_namespace(root),
        container=_container(root),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
    )


def explain_refusal(error: int, around: Surroundings) -> tuple[str, str]:
    """Likely cause of an io_uring errno, and what to do, each one clause without a full stop."""
    inside = f" of this {around.container} container" if around.container else ""
    seccomp_remedy = (
        "allow io_uring_setup, io_uring_enter and io_uring_register in the seccomp profile"
        f"{inside or ' of this process'}"
    )
    if error in (errno.EPERM, errno.EACCES):
        if around.sysctl_disabled == 2:
            return (
                "the sysctl kernel.io_uring_disabled is 2: off for every process",
                "set it to 0 on the host: sysctl -w kernel.io_uring_disabled=0",
            )
        if around.sysctl_disabled == 1 and not around.sys_admin:
            return (
                "the sysctl kernel.io_uring_disabled is 1: off for unprivileged processes",
                "put the user into the group that sysctl kernel.io_uring_group names, or set "
                "kernel.io_uring_disabled to 0 on the host",
            )
        if around.seccomp_filtered:
            return f"a seccomp filter{inside} refuses it", seccomp_remedy
        return (
            "a security module (SELinux, AppArmor) or an outer sandbox refuses it",
            "look for a denial in the audit log and allow io_uring for this process",
        )
    if error == errno.ENOSYS:
        if kernel_version(around.kernel) < (5, 1):
            return f"Linux {around.kernel} has no io_uring (it came with 5.1)", "use a newer kernel"
        if around.seccomp_filtered:
            return (
                f"a seccomp filter{inside} answers as if the call did not exist",
                seccomp_remedy,
            )
        return (
            "the kernel was built without CONFIG_IO_URING, or a sandbox (gVisor) stands in for it",
            "use a kernel with CONFIG_IO_URING, or run outside the sandbox",
        )
    if error == errno.ENOMEM:
        limit = "unlimited" if around.memlock_bytes is None else f"{around.memlock_bytes} bytes"
        return (
            f"no memory for the ring; the locked-memory limit is {limit}",
            "raise it (ulimit -l, docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity)",
        )
    if error == errno.EINVAL:
        return "this io_uring is older than kvdisk needs", "use Linux 5.11 or newer"
    if error in (errno.EMFILE, errno.ENFILE):
        return "too many files are open", "raise the limit on open files (ulimit -n)"
    return "the kernel gave no usual reason", "search the kernel log for io_uring"


def kernel_version(release: str) -> tuple[int, int]:
    """(major, minor) of ``os.uname().release``; (0, 0) when it does not begin with them."""
    parts = release.split(".")
    minor = _leading_digits(parts[1]) if len(parts) > 1 else ""
    return (int(parts[0]), int(minor)) if parts[0].isdecimal() and minor else (0, 0)


def status_field(status: str, name: str) -> str | None:
    """A field of /proc/self/status."""
    for line in status.splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2].strip()
    return None


def has_capability(status: str, number: int) -> bool:
    """Whether the effective set in /proc/self/status has a capability (capabilities(7))."""
    effective = status_field(status, "CapEff") or "0"
    return bool(int(effective, 16) >> number & 1)


def initial_user_namespace(root: Path = Path("/")) -> bool:
    """False in a user namespace, whose capabilities do not count for the host's limits."""
    return _read(root / "proc/self/uid_map").split() in ([], ["0", "0", str(2**32 - 1)])


def _leading_digits(text: str) -> str:
    return text[: len(text) - len(text.lstrip("0123456789"))]


def _container(root: Path) -> str | None:
    """Which container software runs this process, by the marks it leaves, or None."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "Kubernetes"
    if (root / ".dockerenv").exists():
        return "Docker"
    if (root / "run/.containerenv").exists():
        return "Podman"
    return os.environ.get("container") or None  # noqa: SIM112 (systemd's name for it)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _call(number: int, *arguments: int | ctypes.Array[ctypes.c_char] | None) -> int:
    """A raw system call's errno, 0 when it succeeded."""
    longs = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    ctypes.set_errno(0)
    return ctypes.get_errno() if _libc().syscall(ctypes.c_long(number), *longs) < 0 else 0


def _setup(flags: int) -> tuple[int, int, int]:
    """(ring descriptor or -1, feature bits, errno)."""
    parameters = ctypes.create_string_buffer(_PARAMS_BYTES)
    struct.pack_into("=I", parameters, 8, flags)
    ctypes.set_errno(0)
    libc = _libc()
    libc.syscall.restype = ctypes.c_long
    ring = libc.syscall(
        ctypes.c_long(SYSCALL_SETUP), ctypes.c_long(_ENTRIES), ctypes.byref(parameters)
    )
    if ring < 0:
        return -1, 0, ctypes.get_errno()
    (features,) = struct.unpack_from("=I", parameters, _FEATURES_OFFSET)
    return ring, features, 0


def _setup_allows(flags: int) -> bool:
    ring, _, _ = _setup(flags)
    if ring < 0:
        return False
    os.close(ring)
    return True


def _probe_operations(ring: int) -> tuple[int, tuple[str, ...]]:
    """(errno of IORING_REGISTER_PROBE, operations of ours that the kernel lacks)."""
    answer = ctypes.create_string_buffer(16 + 8 * _PROBE_OPERATIONS)
    error = _call(SYSCALL_REGISTER, ring, _REGISTER_PROBE, answer, _PROBE_OPERATIONS)
    if error:
        return error, ()
    supported = {
        operation
        for operation, _, flags, _ in struct.iter_unpack("=BBHI", answer.raw[16:])
        if flags & _OPERATION_SUPPORTED
    }
    return 0, tuple(name for name, number in _OPERATIONS.items() if number not in supported)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(probe_uring_here())))

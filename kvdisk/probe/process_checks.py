"""Verdicts on what the process and its machine allow, apart from the directory and its disk.

What always holds: these are pure functions of findings, so each verdict can be tested without the
machine that deserves it. ``docs/troubleshooting.md`` has a section for every name.
"""

from __future__ import annotations

from typing import Final

from kvdisk.memory import MemoryHeadroom
from kvdisk.probe.host import Cuda, LockedMemory
from kvdisk.probe.uring import Surroundings, UringAnswers, explain_refusal
from kvdisk.probe.verdict import Check, Status, errno_name
from kvdisk.units import display_size

# Locked memory beside the buffers: the rings themselves, which some kernels count too. At the
# largest depth (4096) these are 256 KiB of 64-byte entries and 128 KiB of completions.
URING_OVERHEAD_BYTES: Final = 1024**2


def check_native(problem: str | None) -> Check:
    """``problem``: why the import failed, None when it did not."""
    if problem is None:
        return Check("native", "ok", "the native module loads")
    return Check(
        "native",
        "error",
        f"the native module does not load: {problem}",
        "install kvdisk again for this Python and machine (pip install --force-reinstall kvdisk)",
        {"problem": problem},
    )


def check_uring(answers: UringAnswers, around: Surroundings) -> Check:
    values = {
        "setup_errno": answers.setup_errno,
        "enter_errno": answers.enter_errno,
        "register_errno": answers.register_errno,
        "killed_by_signal": answers.killed_by_signal,
        "features": answers.features,
        "feature_names": list(answers.feature_names),
        "single_issuer": answers.single_issuer,
        "defer_taskrun": answers.defer_taskrun,
        "missing": list(answers.missing),
        "usable": answers.usable,
        "kernel": around.kernel,
        "sysctl_disabled": around.sysctl_disabled,
        "seccomp_filtered": around.seccomp_filtered,
        "container": around.container,
    }
    return Check("io_uring", *_judge_uring(answers, around), values)


def _judge_uring(answers: UringAnswers, around: Surroundings) -> tuple[Status, str, str | None]:
    """(status, what was found, what to do)."""
    if answers.killed_by_signal:
        return (
            "error",
            "a seccomp filter kills every process that tries io_uring (SIGSYS)",
            "set backend=threads, or let the filter answer EPERM or allow io_uring "
            "(systemd: SystemCallErrorNumber=EPERM)",
        )
    if answers.refusal_errno:
        refusals = (
            ("io_uring_setup", answers.setup_errno),
            ("io_uring_enter", answers.enter_errno),
            ("io_uring_register", answers.register_errno),
        )
        call = next(call for call, refused in refusals if refused)
        cause, remedy = explain_refusal(answers.refusal_errno, around)
        found = f"{call} refused ({errno_name(answers.refusal_errno)}): {cause}"
        return "warning", f"{found}; kvdisk falls back to threads", remedy
    if answers.missing:
        found = f"Linux {around.kernel} lacks {', '.join(answers.missing)}"
        return "warning", f"{found}; kvdisk falls back to threads", "use Linux 5.11 or newer"
    if answers.defer_taskrun:
        extra = "SINGLE_ISSUER and DEFER_TASKRUN"
    elif answers.single_issuer:
        extra = "SINGLE_ISSUER; DEFER_TASKRUN needs Linux 6.1"
    else:
        extra = "without SINGLE_ISSUER and DEFER_TASKRUN, which need Linux 6.1"
    return "ok", f"permitted, Linux {around.kernel}, {extra}", None


def check_locked_memory(limits: LockedMemory, ring_bytes: int) -> Check:
    needed = ring_bytes + URING_OVERHEAD_BYTES
    values = {
        "needed_bytes": needed,
        "soft_bytes": limits.soft_bytes,
        "hard_bytes": limits.hard_bytes,
        "exempt": limits.exempt,
    }
    if limits.exempt:
        return Check("memlock", "ok", "no limit counts (CAP_IPC_LOCK)", None, values)
    if limits.limit_bytes is None:
        return Check("memlock", "ok", "unlimited", None, values)
    found = (
        f"limit {display_size(limits.limit_bytes)}, the default ring needs {display_size(needed)}"
        " a process"
    )
    if limits.limit_bytes >= needed:
        return Check("memlock", "ok", found, None, values)
    raisable = limits.hard_bytes is None or limits.hard_bytes >= needed
    remedy = (
        f"raise the soft limit: ulimit -l {-(-needed // 1024)}"
        if raisable
        else "raise the limit: docker --ulimit memlock=-1, systemd LimitMEMLOCK=infinity, "
        "or memlock in /etc/security/limits.conf; or set a smaller ring"
    )
    return Check("memlock", "warning", f"{found}; buffers cannot be registered", remedy, values)


def check_memory(headroom: MemoryHeadroom | None, ring_bytes: int) -> Check:
    values = {"needed_bytes": ring_bytes}
    if headroom is None:
        return Check("memory", "ok", "the system does not say how much is free", None, values)
    values["available_bytes"] = headroom.available_bytes
    found = (
        f"{display_size(headroom.available_bytes)} left ({headroom.source}), "
        f"the default ring pins {display_size(ring_bytes)}"
    )
    remedy = "give the process more memory, or set a smaller ring"
    if headroom.available_bytes < ring_bytes:
        return Check("memory", "error", found, remedy, values)
    if headroom.available_bytes < 2 * ring_bytes:
        return Check("memory", "warning", f"{found}: more than half of it", remedy, values)
    return Check("memory", "ok", found, None, values)


def check_cuda(cuda: Cuda) -> Check:
    values = {"version": cuda.version, "kernel_driver": cuda.kernel_driver}
    if cuda.version is not None:
        found = f"driver for CUDA {cuda.version // 1000}.{cuda.version % 1000 // 10}"
        return Check("cuda", "ok", found, None, values)
    if cuda.problem is not None:
        found = f"the CUDA driver does not load: {cuda.problem}"
        remedy = "install the driver's own libcuda.so.1 where the loader finds it first"
        return Check("cuda", "warning", found, remedy, values)
    if cuda.kernel_driver:
        found = "the NVIDIA kernel driver runs, but libcuda.so.1 is not here"
        remedy = "start the container with GPUs (docker run --gpus all), or install the library"
        return Check("cuda", "warning", found, remedy, values)
    return Check("cuda", "ok", "no CUDA driver: CPU only", None, values)


def check_fio(path: str | None) -> Check:
    found = path or "not installed: kvdisk bench cannot compare with fio"
    return Check("fio", "ok", found, None, {"path": path})

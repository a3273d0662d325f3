// The probe, the choice and its explanation. The probe makes a true round trip, because a security
// filter may allow setting up a ring and refuse to enter it.
#include "io/choose.hpp"

#include <liburing.h>
#include <sys/resource.h>

#include <cerrno>
#include <fstream>
#include <stdexcept>
#include <system_error>

#include "io/uring_ring.hpp"

namespace kvdisk::io {
namespace {

constexpr const char* seccomp_remedy =
    "allow io_uring_setup, io_uring_enter and io_uring_register in the container's seccomp profile "
    "(Docker: --security-opt seccomp=PROFILE)";

// kernel.io_uring_disabled: 0 allowed, 1 privileged or in io_uring_group only, 2 off; -1
// before 6.6.
int sysctl_disabled() {
    int value = -1;
    std::ifstream("/proc/sys/kernel/io_uring_disabled") >> value;
    return value;
}

bool seccomp_filtered() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        if (word == "Seccomp:") {
            int mode = 0;
            return (status >> mode) && mode == 2;
        }
    }
    return false;
}

std::string explain_not_permitted() {
    switch (sysctl_disabled()) {
        case 2:
            return "the sysctl kernel.io_uring_disabled is 2, off for every process; set it to 0 "
                   "on "
                   "the host";
        case 1:
            return "the sysctl kernel.io_uring_disabled is 1, off for unprivileged processes; set "
                   "it "
                   "to 0 on the host or join the group that kernel.io_uring_group names";
        default:
            break;
    }
    if (seccomp_filtered()) {
        return std::string("a seccomp filter refuses it, as containers' default profiles do; ") +
               seccomp_remedy;
    }
    return "a security module (SELinux, AppArmor) or an outer sandbox refuses it; look for a "
           "denial "
           "in the audit log";
}

std::string explain_missing() {
    if (seccomp_filtered()) {
        return std::string("a seccomp filter answers as if the call did not exist; ") +
               seccomp_remedy;
    }
    return "the kernel is older than Linux 5.11, was built without CONFIG_IO_URING, or a sandbox "
           "(gVisor) stands in for it; use a newer kernel, or run outside the sandbox";
}

std::string explain_no_memory() {
    rlimit limit{};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    const std::string present = limit.rlim_cur == RLIM_INFINITY
                                    ? "unlimited"
                                    : std::to_string(limit.rlim_cur >> 10) + " KiB";
    return "the ring counts against locked memory, RLIMIT_MEMLOCK is " + present +
           "; raise it (ulimit -l, LimitMEMLOCK= in systemd, --ulimit memlock=-1 in Docker)";
}

std::string refusal(const std::system_error& error) {
    return "io_uring not to be had (" + std::string(error.what()) +
           "): " + explain_uring_error(error.code().value());
}

}  // namespace

std::string explain_uring_error(int error) {
    switch (error) {
        case EPERM:
        case EACCES:
            return explain_not_permitted();
        case ENOSYS:
            return explain_missing();
        case ENOMEM:
            return explain_no_memory();
        case EMFILE:
        case ENFILE:
            return "too many files are open; raise the limit (ulimit -n)";
        default:
            return "no usual reason; look into the kernel log";
    }
}

void probe_uring() {
    UringRing ring(2, {});
    ring.enable();
    io_uring_sqe* const entry = io_uring_get_sqe(ring.get());
    io_uring_prep_nop(entry);
    __kernel_timespec patience{.tv_sec = 0, .tv_nsec = 100'000'000};
    io_uring_cqe* completion = nullptr;
    // What passes (a signal, a shortage) is no refusal.
    int result = -EAGAIN;
    for (int attempt = 0; attempt < 64 && completion == nullptr; ++attempt) {
        result = io_uring_submit_and_wait_timeout(ring.get(), &completion, 1, &patience, nullptr);
        const bool passes = result >= 0 || result == -EINTR || result == -EAGAIN ||
                            result == -EBUSY || result == -ETIME;
        if (!passes) break;
    }
    if (completion == nullptr) {
        throw std::system_error(result < 0 ? -result : ETIME, std::system_category(),
                                "io_uring_enter");
    }
    io_uring_cqe_seen(ring.get(), completion);
}

ChosenBackend choose_backend(const BackendOptions& options, std::string_view wanted) {
    if (wanted == "threads") return {make_threads(options), {}};
    if (wanted != "auto" && wanted != "uring") {
        throw std::invalid_argument("backend is \"auto\", \"uring\" or \"threads\", not \"" +
                                    std::string(wanted) + "\"");
    }
    try {
        probe_uring();
        return {make_uring(options), {}};
    } catch (const std::system_error& error) {
        const std::string reason = refusal(error);
        if (wanted == "uring") throw std::system_error(error.code(), reason);
        return {make_threads(options), reason + "; using threads"};
    }
}

}  // namespace kvdisk::io

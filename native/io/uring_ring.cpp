// How the ring is opened: newest set-up first, older ones after EINVAL, and every refusal turned
// into a sentence that names the cause and the remedy.
#include "io/uring_ring.hpp"

#include <sys/resource.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

// Values of the kernel's interface that headers of older distributions lack.
#ifndef IORING_SETUP_TASKRUN_FLAG
#define IORING_SETUP_TASKRUN_FLAG (1U << 9)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif
#ifndef IORING_SETUP_NO_SQARRAY
#define IORING_SETUP_NO_SQARRAY (1U << 16)
#endif

namespace kvdisk::io {
namespace {

unsigned setup_flags(TaskRun task_run) noexcept {
    switch (task_run) {
        case TaskRun::deferred:
            return IORING_SETUP_R_DISABLED | IORING_SETUP_SINGLE_ISSUER |
                   IORING_SETUP_DEFER_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
        case TaskRun::cooperative:
            return IORING_SETUP_R_DISABLED | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG;
        case TaskRun::immediate:
            return IORING_SETUP_R_DISABLED;
    }
    return 0;
}

bool refused_outright(int error) noexcept {
    return error == EPERM || error == EACCES || error == ENOSYS;
}

std::string readable_bytes(std::uint64_t bytes) {
    if (bytes >= (1U << 20)) return std::to_string(bytes >> 20) + " MiB";
    return std::to_string(bytes >> 10) + " KiB";
}

std::string memlock_limit() {
    rlimit limit{};
    ::getrlimit(RLIMIT_MEMLOCK, &limit);
    if (limit.rlim_cur == RLIM_INFINITY) return "unlimited";
    return readable_bytes(limit.rlim_cur);
}

std::uint64_t bytes_of(std::span<const std::span<std::byte>> areas) noexcept {
    std::uint64_t bytes = 0;
    for (const std::span<std::byte> area : areas) bytes += area.size();
    return bytes;
}

std::string areas_note(const std::string& what, int error, std::uint64_t bytes) {
    const std::string note = what + " could not be registered with io_uring (" +
                             std::strerror(error) + "), so each I/O pins its own pages: ";
    if (error == ENOMEM) {
        return note + "they need " + readable_bytes(bytes) +
               " of locked memory, RLIMIT_MEMLOCK is " + memlock_limit() +
               " for all processes of this user together; raise it (ulimit -l, " +
               "LimitMEMLOCK= in systemd, --ulimit memlock=-1 in Docker) or grant CAP_IPC_LOCK";
    }
    if (error == EFAULT || error == EOPNOTSUPP) {
        return note + readable_bytes(bytes) + " include memory that the kernel does not pin " +
               "(a mapped file or a device's memory); RLIMIT_MEMLOCK is " + memlock_limit();
    }
    return note + "needed are " + readable_bytes(bytes) + " of locked memory, RLIMIT_MEMLOCK is " +
           memlock_limit();
}

}  // namespace

int enter_kernel(unsigned ring, unsigned to_submit, unsigned completions_min, unsigned flags,
                 void* argument, std::size_t argument_bytes) {
    return io_uring_enter2(ring, to_submit, completions_min, flags,
                           static_cast<sigset_t*>(argument), argument_bytes);
}

UringRing::UringRing(std::uint32_t requests, const UringTuning& tuning) {
    open(requests, tuning);
    try {
        verify_permitted();
    } catch (...) {
        io_uring_queue_exit(&ring_);
        throw;
    }
}

void UringRing::open(std::uint32_t requests, const UringTuning& tuning) {
    const std::uint32_t entries =
        tuning.submission_entries != 0 ? tuning.submission_entries : requests;
    int result = -EINVAL;
    for (int level = static_cast<int>(tuning.task_run);
         result == -EINVAL && level <= static_cast<int>(TaskRun::immediate); ++level) {
        io_uring_params params{};
        params.flags = setup_flags(static_cast<TaskRun>(level));
        if (tuning.completion_entries != 0) {
            params.flags |= IORING_SETUP_CQSIZE;
            params.cq_entries = tuning.completion_entries;
        }
        result = io_uring_queue_init_params(entries, &ring_, &params);
    }
    if (result < 0) throw std::system_error(-result, std::system_category(), "io_uring_setup");

    // The submission queue is used in order, so its index array stays the identity.
    if ((ring_.flags & IORING_SETUP_NO_SQARRAY) == 0) {
        for (unsigned i = 0; i < ring_.sq.ring_entries; ++i) ring_.sq.array[i] = i;
    }
}

// A security filter may allow some of the three system calls and refuse others. Entering a disabled
// ring answers EBADFD when entering is allowed; the probe is a registration that has no effect.
void UringRing::verify_permitted() {
    constexpr unsigned features_needed = IORING_FEAT_NODROP | IORING_FEAT_EXT_ARG;
    if ((ring_.features & features_needed) != features_needed) {
        throw std::system_error(ENOSYS, std::system_category(),
                                "io_uring_setup: the kernel is older than Linux 5.11");
    }
    const int entered = enter_kernel(static_cast<unsigned>(ring_.ring_fd), 0, 0, 0, nullptr, 0);
    if (entered < 0 && refused_outright(-entered)) {
        throw std::system_error(-entered, std::system_category(), "io_uring_enter");
    }
    io_uring_probe probe{};
    const int registered = io_uring_register_probe(&ring_, &probe, 0);
    if (registered < 0 && refused_outright(-registered)) {
        throw std::system_error(-registered, std::system_category(), "io_uring_register");
    }
}

UringRing::~UringRing() {
    if (leaked_) return;
    // Explicit, because closing the ring unpins the areas only some time later. Kernels before 5.13
    // would wait here for the wake poll, which never ends.
    if ((ring_.features & IORING_FEAT_RSRC_TAGS) != 0) {
        if (areas_registered_) io_uring_unregister_buffers(&ring_);
        if (files_registered_) io_uring_unregister_files(&ring_);
    }
    io_uring_queue_exit(&ring_);
}

bool UringRing::register_files(std::span<const int> descriptors) {
    if (descriptors.empty()) return false;
    const int result = io_uring_register_files(&ring_, descriptors.data(),
                                               static_cast<unsigned>(descriptors.size()));
    if (result < 0) {
        note_ = "the files could not be registered with io_uring (" +
                std::string(std::strerror(-result)) + "); I/O goes on a little slower";
    }
    files_registered_ = result >= 0;
    return files_registered_;
}

std::size_t UringRing::register_areas(std::span<const std::span<std::byte>> areas,
                                      std::size_t dispensable) {
    if (areas.empty()) return 0;
    int result = try_areas(areas);
    if (result >= 0) return areas.size();
    const std::size_t needed = areas.size() - dispensable;
    if (dispensable > 0 && needed > 0) {
        note_ = areas_note("the blocks' own memory", -result, bytes_of(areas));
        result = try_areas(areas.first(needed));
        if (result >= 0) return needed;
    }
    note_ = areas_note("the buffers", -result, bytes_of(areas.first(needed)));
    return 0;
}

// All in one call: the kernel takes all of them or, after an error, none.
int UringRing::try_areas(std::span<const std::span<std::byte>> areas) {
    std::vector<iovec> vectors;
    for (const std::span<std::byte> area : areas) vectors.push_back({area.data(), area.size()});
    const int result =
        io_uring_register_buffers(&ring_, vectors.data(), static_cast<unsigned>(vectors.size()));
    areas_registered_ = result >= 0;
    return result;
}

void UringRing::enable() {
    // Not io_uring_enable_rings: the shared library of liburing 2.3 forgot to export it.
    const int result = io_uring_register(static_cast<unsigned>(ring_.ring_fd),
                                         IORING_REGISTER_ENABLE_RINGS, nullptr, 0);
    if (result < 0) {
        throw std::system_error(-result, std::system_category(), "io_uring_register(ENABLE_RINGS)");
    }
}

}  // namespace kvdisk::io

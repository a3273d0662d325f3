// Knobs of the io_uring backend that no user needs: they let the tests take the paths that a
// healthy, recent kernel never takes (older kernels' rings, a full queue, refused system calls).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "io/backend.hpp"

namespace kvdisk::io {

// Who runs the kernel's completion work: this thread and only when it asks (Linux 6.1), this thread
// at its next system call (5.19), or whenever an interrupt comes.
enum class TaskRun : std::uint8_t { deferred, cooperative, immediate };

// io_uring_enter(2) as a function: bytes and errors as the system call gives them, errors as
// -errno.
using EnterFunction = int (*)(unsigned ring, unsigned to_submit, unsigned completions_min,
                              unsigned flags, void* argument, std::size_t argument_bytes);

struct UringTuning {
    TaskRun task_run = TaskRun::deferred;  // the best to try; older ways follow
    std::uint32_t submission_entries = 0;  // 0: one for each request in flight
    std::uint32_t completion_entries = 0;  // 0: the kernel's choice, twice the submission entries
    EnterFunction enter = nullptr;         // nullptr: the system call
};

std::unique_ptr<Backend> make_uring_tuned(const BackendOptions& options, const UringTuning& tuning);

}  // namespace kvdisk::io

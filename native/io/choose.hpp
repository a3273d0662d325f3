// Which backend a machine permits. io_uring is often refused (containers, hardened hosts), and its
// errno names no cause; this is where that becomes a working backend and a sentence that a person
// can act on.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "io/backend.hpp"

namespace kvdisk::io {

struct ChosenBackend {
    std::unique_ptr<Backend> backend;
    std::string reason;  // why it is not io_uring and what to do; empty: as wanted
};

// `wanted` is "auto" (io_uring where it works, else threads), "uring" or "threads". Throws
// std::invalid_argument for another word, and std::system_error with the reason when io_uring was
// asked for by name and is not to be had.
ChosenBackend choose_backend(const BackendOptions& options, std::string_view wanted);

// Whether the kernel lets this thread set up, register with and enter a ring, and a no-op comes
// back. Throws std::system_error naming the system call that was refused.
void probe_uring();

// The likely cause of an errno of io_uring and the remedy, from what this process can see of
// itself.
std::string explain_uring_error(int error);

}  // namespace kvdisk::io

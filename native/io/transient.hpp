// Which errnos pass: those that are worth another try a little later.
#pragma once

#include <cerrno>

namespace kvdisk::io {

// A signal, a full queue, no memory just now, or a completion queue to be emptied first.
inline bool transient(int error) noexcept {
    return error == EINTR || error == EAGAIN || error == EBUSY || error == ENOMEM;
}

}  // namespace kvdisk::io

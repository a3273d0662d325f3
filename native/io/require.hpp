// Assertions that stay on in release builds: whoever breaks one would otherwise make the kernel
// write to memory it no longer owns, or serve wrong bytes. It is a bug, so the process ends, with
// one line that says which.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <source_location>

namespace kvdisk::io {

inline void require(bool holds, const char* what,
                    std::source_location where = std::source_location::current()) noexcept {
    if (holds) [[likely]] {
        return;
    }
    std::fprintf(stderr, "kvdisk: does not hold: %s (%s:%u)\n", what, where.file_name(),
                 static_cast<unsigned>(where.line()));
    std::abort();
}

}  // namespace kvdisk::io

// Assertions that stay on in release builds: a broken invariant ends the process with one line that
// says which, because going on could serve wrong bytes.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace kvdisk {

[[noreturn]] inline void check_failed(const char* what, const char* file, int line) noexcept {
    std::fprintf(stderr, "kvdisk: invariant broken: %s (%s:%d)\n", what, file, line);
    std::abort();
}

}  // namespace kvdisk

#define KVDISK_CHECK(condition)                                     \
    do {                                                            \
        if (!(condition)) [[unlikely]]                              \
            ::kvdisk::check_failed(#condition, __FILE__, __LINE__); \
    } while (false)

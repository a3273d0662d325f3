// Memory for I/O buffers, touched at once and in large pages where the system has them.
//
// An O_DIRECT request is cut at the disk's limit on segments, and every page that does not follow
// its neighbour in physical memory is one: 2 MiB in pages of 4 KiB are 512 segments, three requests
// on a disk that takes 254. In large pages they are one or two. Measured on virtio-blk, reads of
// 2 MiB: 2.0 GB/s instead of 0.5, with a tenth of the CPU time.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

namespace kvdisk::io {

// Takes real memory for a private anonymous mapping that nobody has touched. Returns 0 or an errno.
inline int populate(void* mapped, std::size_t bytes) noexcept {
    ::madvise(mapped, bytes, MADV_HUGEPAGE);  // a wish: refused where THP is off
#ifdef MADV_POPULATE_WRITE
    if (::madvise(mapped, bytes, MADV_POPULATE_WRITE) == 0) return 0;
    if (errno != EINVAL) return errno;  // EINVAL: before Linux 5.14
#endif
    std::memset(mapped, 0, bytes);
    return 0;
}

}  // namespace kvdisk::io

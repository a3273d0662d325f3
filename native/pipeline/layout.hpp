// How a block's bytes are gathered from device memory: a list of regions, pure arithmetic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvdisk {

// One strided range of device memory that holds `segment_bytes` of every block: block `b` lies at
// `base + b * block_stride_bytes`.
struct Region {
    std::byte* base = nullptr;
    std::uint64_t block_stride_bytes = 0;
    std::uint64_t segment_bytes = 0;
};

// A block's bytes are its segments, region after region.
struct Layout {
    std::vector<Region> regions;
    std::uint64_t block_count = 0;
    std::uint64_t block_bytes = 0;  // the sum of segment_bytes
};

}  // namespace kvdisk

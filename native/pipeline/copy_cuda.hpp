// How to make the copier for blocks in device memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "pipeline/copier.hpp"

namespace kvdisk {

struct CudaCopierOptions {
    int device = 0;                // as cuda::resolve_device gives it
    std::span<std::byte> buffers;  // the memory that all buffers lie in; outlives the copier
    std::uint32_t depth = 1;       // most copies started and not yet reaped
    // Segments below this go through the gather kernel, others through the copy engines; unset: the
    // measured crossover (docs/adr/0006).
    std::optional<std::uint64_t> kernel_below_bytes;
    unsigned kernel_ctas_max = 4;
    bool batched = true;  // false: as with a driver that has no batched copies
};

// Throws std::system_error when the device cannot be had.
std::unique_ptr<Copier> make_cuda_copier(const Layout& layout, const CudaCopierOptions& options);

}  // namespace kvdisk

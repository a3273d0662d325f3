// The gather kernel on one device: its code, and where the small segments of a layout lie. Used by
// the `cuda` copier, on its thread and in its context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pipeline/copier.hpp"
#include "pipeline/cuda_driver.hpp"
#include "pipeline/gather.hpp"
#include "pipeline/layout.hpp"

namespace kvdisk {

// A region, and where its segments go in a buffer.
struct Segment {
    Region region;
    std::uint64_t buffer_offset = 0;
};

// The blocks of one launch.
class GatherBatch {
  public:
    void clear() noexcept { count_ = 0; }
    void add(std::uint64_t block_id, cuda::DeviceAddress buffer) noexcept {
        rows_.block[count_] = block_id;
        rows_.buffer[count_] = buffer;
        ++count_;
    }
    unsigned count() const noexcept { return count_; }
    const GatherRows& rows() const noexcept { return rows_; }

  private:
    GatherRows rows_{};
    unsigned count_ = 0;
};

class GatherKernel {
  public:
    // Throws std::system_error when the driver does not take the kernel. Without segments nothing
    // is loaded.
    void load(const std::vector<Segment>& segments);
    void unload() noexcept;

    // Moves the segments of every block of the batch, in the stream's order, with so many CTAs at
    // most: each takes a processor from compute until the launch has ended.
    cuda::Result launch(CopyDirection direction, const GatherBatch& batch, unsigned ctas_max,
                        cuda::Stream stream) const;

  private:
    cuda::Module module_ = nullptr;
    cuda::Function gather_ = nullptr;
    cuda::Function scatter_ = nullptr;
    cuda::DeviceAddress pieces_ = 0;
    unsigned piece_count_ = 0;
};

}  // namespace kvdisk

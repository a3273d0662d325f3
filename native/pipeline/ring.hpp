// The bounce ring: equal, page-aligned buffers in one mapping, sized at open. A buffer is free,
// used or quarantined (its row has ended, but the kernel or the device may still touch it); the
// three always add up to the whole. The ring owns the memory and the counts; who uses a buffer is
// the pipeline's business.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "pipeline/memory.hpp"

namespace kvdisk {

struct RingCounts {
    std::uint32_t free = 0;
    std::uint32_t used = 0;
    std::uint32_t quarantined = 0;
};

class Ring {
  public:
    // `buffer_bytes` is a multiple of the page; at most 65,535 buffers.
    Ring(std::uint32_t buffer_count, std::uint64_t buffer_bytes);

    std::uint32_t buffer_count() const noexcept {
        return static_cast<std::uint32_t>(states_.size());
    }
    std::uint64_t buffer_bytes() const noexcept { return buffer_bytes_; }
    std::byte* data(std::uint32_t buffer) const noexcept {
        return memory_.data() + buffer * buffer_bytes_;
    }

    // All of it, which a device can map as one.
    std::span<std::byte> memory() const noexcept { return memory_.span(); }

    // The memory in pieces of at most 1 GiB (what one registered buffer may have), no buffer across
    // two.
    std::vector<std::span<std::byte>> areas() const;
    std::uint16_t area_of(std::uint32_t buffer) const noexcept {
        return static_cast<std::uint16_t>(buffer / buffers_per_area_);
    }

    // The most recently freed buffer first: its pages are likeliest to be in the cache.
    std::optional<std::uint32_t> acquire() noexcept;
    void release(std::uint32_t buffer) noexcept;     // used or quarantined -> free
    void quarantine(std::uint32_t buffer) noexcept;  // used -> quarantined

    RingCounts counts() const noexcept { return counts_; }

    // Counts every buffer afresh; true when the running counts agree.
    bool recount() const noexcept;

    void leak() noexcept { memory_.leak(); }

  private:
    enum class State : std::uint8_t { free, used, quarantined };

    std::uint64_t buffer_bytes_;
    std::uint32_t buffers_per_area_;
    AlignedMemory memory_;
    std::vector<State> states_;
    std::vector<std::uint32_t> free_;
    RingCounts counts_;
};

}  // namespace kvdisk

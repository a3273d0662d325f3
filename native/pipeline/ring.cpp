#include "pipeline/ring.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "io/backend.hpp"
#include "io/large_pages.hpp"
#include "pipeline/check.hpp"

namespace kvdisk {

AlignedMemory::AlignedMemory(std::size_t bytes) : bytes_(bytes) {
    void* const mapped = io::map_large(bytes);
    if (mapped == nullptr) {
        throw std::system_error(errno, std::generic_category(), "cannot map memory for buffers");
    }
    data_ = static_cast<std::byte*>(mapped);
    // A child of fork(2) must neither copy these pages nor see the device write into them.
    ::madvise(mapped, bytes, MADV_DONTFORK);
}

AlignedMemory::~AlignedMemory() {
    if (data_ != nullptr) ::munmap(data_, bytes_);
}

Ring::Ring(std::uint32_t buffer_count, std::uint64_t buffer_bytes)
    : buffer_bytes_(buffer_bytes),
      buffers_per_area_(static_cast<std::uint32_t>(
          std::max<std::uint64_t>(1, io::area_bytes_max / buffer_bytes))),
      memory_(buffer_count * buffer_bytes),
      states_(buffer_count, State::free) {
    if (buffer_count == 0 || buffer_count > 0xFFFF || buffer_bytes % 4096 != 0 ||
        buffer_bytes > io::area_bytes_max) {
        throw std::invalid_argument(
            "a ring has 1..65535 buffers of whole pages, 1 GiB at most each");
    }
    free_.reserve(buffer_count);
    for (std::uint32_t buffer = buffer_count; buffer-- > 0;) free_.push_back(buffer);
    counts_.free = buffer_count;
}

std::vector<std::span<std::byte>> Ring::areas() const {
    std::vector<std::span<std::byte>> areas;
    for (std::uint32_t first = 0; first < buffer_count(); first += buffers_per_area_) {
        const std::uint32_t count = std::min(buffers_per_area_, buffer_count() - first);
        areas.emplace_back(data(first), count * buffer_bytes_);
    }
    return areas;
}

std::optional<std::uint32_t> Ring::acquire() noexcept {
    if (free_.empty()) return std::nullopt;
    const std::uint32_t buffer = free_.back();
    free_.pop_back();
    states_[buffer] = State::used;
    --counts_.free;
    ++counts_.used;
    return buffer;
}

void Ring::release(std::uint32_t buffer) noexcept {
    KVDISK_CHECK(states_[buffer] != State::free);
    --(states_[buffer] == State::used ? counts_.used : counts_.quarantined);
    states_[buffer] = State::free;
    ++counts_.free;
    free_.push_back(buffer);
}

void Ring::quarantine(std::uint32_t buffer) noexcept {
    KVDISK_CHECK(states_[buffer] == State::used);
    states_[buffer] = State::quarantined;
    --counts_.used;
    ++counts_.quarantined;
}

bool Ring::recount() const noexcept {
    const auto count = [this](State state) {
        return static_cast<std::uint32_t>(std::ranges::count(states_, state));
    };
    return count(State::free) == counts_.free && count(State::used) == counts_.used &&
           count(State::quarantined) == counts_.quarantined && free_.size() == counts_.free;
}

}  // namespace kvdisk

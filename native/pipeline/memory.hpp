// Page-aligned anonymous memory of exact size, mapped once and touched at once, so that what was
// asked for is what is used and a shortage shows at open.
#pragma once

#include <cstddef>
#include <span>
#include <utility>

namespace kvdisk {

class AlignedMemory {
  public:
    AlignedMemory() = default;
    // Throws std::system_error(ENOMEM) when the memory is not to be had.
    explicit AlignedMemory(std::size_t bytes);
    AlignedMemory(AlignedMemory&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    AlignedMemory& operator=(AlignedMemory&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~AlignedMemory();

    std::byte* data() const noexcept { return data_; }
    std::span<std::byte> span() const noexcept { return {data_, bytes_}; }

    // Never unmaps: the kernel may still write here.
    void leak() noexcept { data_ = nullptr; }

  private:
    std::byte* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace kvdisk

// A first-in first-out queue that never allocates after construction, so that the steady state of a
// backend touches no allocator. Its capacity is a promise of the caller: overfilling is a bug.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "io/require.hpp"

namespace kvdisk::io {

template <typename Item>
class FixedQueue {
  public:
    explicit FixedQueue(std::size_t capacity) : items_(capacity) {}

    bool empty() const noexcept { return size_ == 0; }
    std::size_t size() const noexcept { return size_; }

    void push(const Item& item) noexcept {
        require(size_ < items_.size(), "a fixed queue is not overfilled");
        std::size_t at = first_ + size_;
        if (at >= items_.size()) at -= items_.size();
        items_[at] = item;
        ++size_;
    }

    Item pop() noexcept {
        require(size_ > 0, "an empty queue is not popped");
        const Item item = items_[first_];
        if (++first_ == items_.size()) first_ = 0;
        --size_;
        return item;
    }

    void clear() noexcept { first_ = size_ = 0; }

  private:
    std::vector<Item> items_;
    std::size_t first_ = 0;
    std::size_t size_ = 0;
};

}  // namespace kvdisk::io

// The copier for blocks in host memory: memcpy, a bounded number of bytes each time it is looked
// after, so that the engine thread stays attentive to the disk.
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "pipeline/check.hpp"
#include "pipeline/copier.hpp"

namespace kvdisk {

namespace {

// One reap copies at most this much: about 25 us at 10 GB/s.
constexpr std::uint64_t step_bytes = 256 * 1024;

class HostCopier final : public Copier {
  public:
    HostCopier(const Layout& layout, std::uint32_t depth) : layout_(layout), queue_(depth) {}

    const char* name() const noexcept override { return "host"; }
    void attach(std::function<void()>) override {}

    Readiness poll_event(std::uint64_t event) override {
        pollfd descriptor{.fd = static_cast<int>(event), .events = POLLIN};
        const int count = ::poll(&descriptor, 1, 0);
        if (count == 0 || (count < 0 && errno == EINTR)) return Readiness::pending;
        return count > 0 && (descriptor.revents & POLLIN) != 0 ? Readiness::ready
                                                               : Readiness::failed;
    }

    std::uint32_t depth() const noexcept override {
        return static_cast<std::uint32_t>(queue_.size());
    }

    void start(const Copy& copy) override {
        KVDISK_CHECK(queued_ < queue_.size() && copy.block_id < layout_.block_count);
        at(queued_++) = copy;
    }

    std::size_t reap(std::span<CopyCompletion> completions) override {
        std::uint64_t budget_bytes = step_bytes;
        std::size_t count = 0;
        while (queued_ > 0 && count < completions.size() && budget_bytes > 0) {
            const Copy& copy = queue_[first_];
            budget_bytes -= advance(copy, budget_bytes);
            if (region_ == layout_.regions.size()) {
                completions[count++] = {.id = copy.id, .error = 0};
                pop();
            }
        }
        return count;
    }

    bool busy() const noexcept override { return queued_ > 0; }

    bool cancel(std::uint64_t id) override {
        for (std::size_t i = 0; i < queued_; ++i) {
            if (at(i).id != id) continue;
            if (i == 0) {
                pop();
            } else {  // its place is free at once: the pipeline may start as many copies again
                for (std::size_t next = i + 1; next < queued_; ++next) at(next - 1) = at(next);
                --queued_;
            }
            return true;
        }
        return false;
    }

  private:
    Copy& at(std::size_t position) noexcept { return queue_[(first_ + position) % queue_.size()]; }

    // Copies on within the budget; returns the bytes copied.
    std::uint64_t advance(const Copy& copy, std::uint64_t budget_bytes) noexcept {
        std::uint64_t copied_bytes = 0;
        while (region_ < layout_.regions.size() && copied_bytes < budget_bytes) {
            const Region& region = layout_.regions[region_];
            const std::uint64_t piece_bytes =
                std::min(region.segment_bytes - region_bytes_, budget_bytes - copied_bytes);
            std::byte* const block =
                region.base + copy.block_id * region.block_stride_bytes + region_bytes_;
            std::byte* const buffer = copy.buffer + buffer_bytes_;
            if (copy.direction == CopyDirection::gather) {
                std::memcpy(buffer, block, piece_bytes);
            } else {
                std::memcpy(block, buffer, piece_bytes);
            }
            copied_bytes += piece_bytes;
            buffer_bytes_ += piece_bytes;
            region_bytes_ += piece_bytes;
            if (region_bytes_ == region.segment_bytes) {
                region_bytes_ = 0;
                ++region_;
            }
        }
        return copied_bytes;
    }

    void pop() noexcept {
        first_ = (first_ + 1) % queue_.size();
        --queued_;
        region_ = 0;
        region_bytes_ = 0;
        buffer_bytes_ = 0;
    }

    Layout layout_;
    std::vector<Copy> queue_;  // a circle; the first one is being copied
    std::size_t first_ = 0;
    std::size_t queued_ = 0;
    std::size_t region_ = 0;  // how far the first one is
    std::uint64_t region_bytes_ = 0;
    std::uint64_t buffer_bytes_ = 0;
};

}  // namespace

std::unique_ptr<Copier> make_host_copier(const Layout& layout, std::uint32_t depth) {
    return std::make_unique<HostCopier>(layout, depth);
}

}  // namespace kvdisk

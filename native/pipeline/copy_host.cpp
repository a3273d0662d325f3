// The copier for blocks in host memory: copies and hashes in one pass, a bounded number of bytes
// each time it is looked after, so that the engine thread stays attentive to the disk.
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "pipeline/check.hpp"
#include "pipeline/checksum.hpp"
#include "pipeline/copier.hpp"

namespace kvdisk {

namespace {

// One reap copies at most this much: about 20 us at 6 GB/s, little beside an I/O of its size.
constexpr std::uint64_t step_bytes = 128 * 1024;

// The copies of one direction, in order; the first one may be half done.
class Lane {
  public:
    explicit Lane(std::uint32_t depth) : queue_(depth) {}

    bool empty() const noexcept { return queued_ == 0; }
    std::size_t size() const noexcept { return queued_; }

    void push(const Copy& copy) noexcept { at(queued_++) = copy; }

    bool cancel(std::uint64_t id) noexcept {
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

    // Copies on within the budget, which it lowers. True: a copy has ended, and `done` says how.
    bool advance(const Layout& layout, std::uint64_t& budget_bytes, CopyCompletion& done) noexcept {
        const Copy& copy = queue_[first_];
        if (buffer_bytes_ == 0) checksum_.reset(copy.seed);
        while (region_ < layout.regions.size() && budget_bytes > 0) {
            const Region& region = layout.regions[region_];
            const std::uint64_t piece_bytes =
                std::min(region.segment_bytes - region_bytes_, budget_bytes);
            std::byte* const block =
                region.base + copy.block_id * region.block_stride_bytes + region_bytes_;
            std::byte* const buffer = copy.buffer + buffer_bytes_;
            const bool gather = copy.direction == CopyDirection::gather;
            checksum_.update_copying({gather ? block : buffer, piece_bytes},
                                     gather ? buffer : block);
            budget_bytes -= piece_bytes;
            buffer_bytes_ += piece_bytes;
            region_bytes_ += piece_bytes;
            if (region_bytes_ == region.segment_bytes) {
                region_bytes_ = 0;
                ++region_;
            }
        }
        if (region_ < layout.regions.size()) return false;
        done = {.id = copy.id, .error = 0, .checksum = checksum_.digest()};
        pop();
        return true;
    }

  private:
    Copy& at(std::size_t position) noexcept { return queue_[(first_ + position) % queue_.size()]; }

    void pop() noexcept {
        first_ = (first_ + 1) % queue_.size();
        --queued_;
        region_ = 0;
        region_bytes_ = 0;
        buffer_bytes_ = 0;
    }

    std::vector<Copy> queue_;  // a circle; the first one is being copied
    std::size_t first_ = 0;
    std::size_t queued_ = 0;
    std::size_t region_ = 0;  // how far the first one is
    std::uint64_t region_bytes_ = 0;
    std::uint64_t buffer_bytes_ = 0;
    Checksum checksum_;
};

class HostCopier final : public Copier {
  public:
    HostCopier(const Layout& layout, std::uint32_t depth)
        : layout_(layout), depth_(depth), scatters_(depth), gathers_(depth) {}

    const char* name() const noexcept override { return "host"; }
    void attach() override {}

    Readiness poll_event(std::uint64_t event) override {
        pollfd descriptor{.fd = static_cast<int>(event), .events = POLLIN};
        const int count = ::poll(&descriptor, 1, 0);
        if (count == 0 || (count < 0 && errno == EINTR)) return Readiness::pending;
        return count > 0 && (descriptor.revents & POLLIN) != 0 ? Readiness::ready
                                                               : Readiness::failed;
    }

    bool hashes() const noexcept override { return true; }
    std::uint32_t depth() const noexcept override { return depth_; }

    void start(const Copy& copy) override {
        KVDISK_CHECK(scatters_.size() + gathers_.size() < depth_ &&
                     copy.block_id < layout_.block_count);
        (copy.direction == CopyDirection::scatter ? scatters_ : gathers_).push(copy);
    }

    // Loads first: a request waits for a scatter, while gathers only run ahead of the disk.
    std::size_t reap(std::span<CopyCompletion> completions) override {
        std::uint64_t budget_bytes = step_bytes;
        std::size_t count = 0;
        while (busy() && count < completions.size() && budget_bytes > 0) {
            Lane& lane = scatters_.empty() ? gathers_ : scatters_;
            if (lane.advance(layout_, budget_bytes, completions[count])) ++count;
        }
        return count;
    }

    bool busy() const noexcept override { return !scatters_.empty() || !gathers_.empty(); }

    bool cancel(std::uint64_t id) override { return scatters_.cancel(id) || gathers_.cancel(id); }

  private:
    const Layout layout_;
    const std::uint32_t depth_;
    Lane scatters_;
    Lane gathers_;
};

}  // namespace

std::unique_ptr<Copier> make_host_copier(const Layout& layout, std::uint32_t depth) {
    return std::make_unique<HostCopier>(layout, depth);
}

}  // namespace kvdisk

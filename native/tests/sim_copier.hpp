// The simulated copier: the Copier of copier.hpp in the simulated disk's time, as unpleasant as the
// contract allows. It moves a block's bytes at random moments between start and completion, half
// now and half later; it is slow, fails, and refuses to be cancelled.
//
// What always holds: memory is touched only inside `reap`, never after a completion was handed out
// and never after `cancel` returned true.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "io/sim_random.hpp"
#include "pipeline/check.hpp"
#include "pipeline/checksum.hpp"
#include "pipeline/copier.hpp"

namespace kvdisk::test {

struct SimCopierFaults {
    double error = 0;       // that a copy fails, having moved some of its bytes or none
    double slow = 0;        // that it takes up to `slow_ns_max`
    double keep_going = 0;  // that it cannot be cancelled
    double unknown = 0;     // per copy: a completion of an id that is not in flight
    std::int64_t base_ns = 3'000;
    std::int64_t jitter_ns = 20'000;
    std::int64_t slow_ns_max = 5'000'000;

    static SimCopierFaults all() {
        return {.error = 0.002, .slow = 0.02, .keep_going = 0.3, .unknown = 0.002};
    }
};

class SimCopier final : public Copier {
  public:
    static constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

    SimCopier(const Layout& layout, std::uint32_t depth, std::uint64_t seed,
              std::function<std::int64_t()> now_ns, bool hashes = false,
              const SimCopierFaults& faults = {})
        : layout_(layout),
          depth_(depth),
          hashes_(hashes),
          random_(seed),
          now_ns_(std::move(now_ns)),
          faults_(faults) {
        active_.reserve(depth);
    }

    // An event that happens at a time (`never`: not at all), or turns out to have failed then.
    // `happened` runs when the copier first sees that it is ready: the producer's last write.
    std::uint64_t make_event(std::int64_t at_ns, bool fails, std::function<void()> happened) {
        const auto unused = std::ranges::find(events_, std::uint64_t{0}, &Event::id);
        Event& event = unused == events_.end() ? events_.emplace_back() : *unused;
        event = {++event_last_, at_ns, fails, std::move(happened)};
        return event.id;
    }
    // The event will not be asked for any more (and never becomes ready).
    void forget_event(std::uint64_t id) {
        if (const auto event = std::ranges::find(events_, id, &Event::id); event != events_.end()) {
            *event = {};
        }
    }

    const char* name() const noexcept override { return "sim"; }
    void attach() override {}
    bool hashes() const noexcept override { return hashes_; }
    std::uint32_t depth() const noexcept override { return depth_; }
    std::uint32_t active() const noexcept { return static_cast<std::uint32_t>(active_.size()); }

    Readiness poll_event(std::uint64_t id) override {
        const auto event = std::ranges::find(events_, id, &Event::id);
        KVDISK_CHECK(event != events_.end());
        if (event->at_ns > now_ns_()) return Readiness::pending;
        if (event->fails) return Readiness::failed;
        if (event->happened) std::exchange(event->happened, nullptr)();
        return Readiness::ready;
    }

    void start(const Copy& copy) override {
        KVDISK_CHECK(active_.size() < depth_ && copy.block_id < layout_.block_count);
        const auto event = std::ranges::find(events_, copy.event, &Event::id);
        const bool waits = copy.event != 0 && event != events_.end();
        const std::int64_t now = waits ? std::max(now_ns_(), event->at_ns) : now_ns_();
        Active started;
        started.copy = copy;
        started.checksum.reset(copy.seed);
        started.done_ns =
            now + random_.between(faults_.base_ns, faults_.base_ns + faults_.jitter_ns);
        if (random_.chance(faults_.slow)) {
            started.done_ns = now + random_.between(0, faults_.slow_ns_max);
        }
        started.first_ns = random_.between(now, started.done_ns);
        started.second_ns = (random_.next() & 1) != 0
                                ? started.first_ns
                                : random_.between(started.first_ns, started.done_ns);
        started.error = random_.chance(faults_.error) ? EIO : 0;
        active_.push_back(started);
    }

    std::size_t reap(std::span<CopyCompletion> completions) override {
        const std::int64_t now = now_ns_();
        std::size_t count = 0;
        for (std::size_t i = 0; i < active_.size();) {
            Active& active = active_[i];
            const std::uint64_t half = layout_.block_bytes / 2;
            const bool fails = active.error != 0;
            if (!active.first_moved && active.first_ns <= now) {
                active.first_moved = true;
                if (!fails || (random_.next() & 1) != 0) move(active, 0, half);
            }
            if (!active.second_moved && active.second_ns <= now) {
                active.second_moved = true;
                if (!fails) move(active, half, layout_.block_bytes);
            }
            if (active.done_ns > now || count == completions.size()) {
                ++i;
                continue;
            }
            completions[count++] = {.id = active.copy.id,
                                    .error = active.error,
                                    .checksum = hashes_ ? active.checksum.digest() : 0};
            id_before_ = active.copy.id;
            active = active_.back();
            active_.pop_back();
        }
        if (count > 0 && count < completions.size() && random_.chance(faults_.unknown)) {
            completions[count++] = {.id = id_before_};  // a second time
        }
        return count;
    }

    bool busy() const noexcept override { return next_event_ns() <= now_ns_(); }

    bool cancel(std::uint64_t id) override {
        const auto active =
            std::ranges::find(active_, id, [](const Active& a) { return a.copy.id; });
        KVDISK_CHECK(active != active_.end());
        if (random_.chance(faults_.keep_going)) return false;
        *active = active_.back();
        active_.pop_back();
        return true;
    }

    // When `reap` has something to do next.
    std::int64_t next_event_ns() const noexcept {
        std::int64_t next = never;
        for (const Active& active : active_) next = std::min(next, active.done_ns);
        return next;
    }

  private:
    struct Active {
        Copy copy;
        Checksum checksum;
        std::int64_t first_ns = 0;   // when the first half moves
        std::int64_t second_ns = 0;  // when the rest does
        std::int64_t done_ns = 0;
        int error = 0;
        bool first_moved = false;
        bool second_moved = false;
    };

    struct Event {
        std::uint64_t id = 0;  // 0: unused
        std::int64_t at_ns = 0;
        bool fails = false;
        std::function<void()> happened;
    };

    // Moves the bytes first..last of the block.
    void move(Active& active, std::uint64_t first, std::uint64_t last) const {
        const Copy& copy = active.copy;
        std::uint64_t at = 0;  // of the region's segment in the block
        for (const Region& region : layout_.regions) {
            const std::uint64_t from = std::max(first, at);
            const std::uint64_t to = std::min(last, at + region.segment_bytes);
            if (from < to) {
                std::byte* const device =
                    region.base + copy.block_id * region.block_stride_bytes + (from - at);
                std::byte* const buffer = copy.buffer + from;
                const bool gather = copy.direction == CopyDirection::gather;
                std::memcpy(gather ? buffer : device, gather ? device : buffer, to - from);
            }
            at += region.segment_bytes;
        }
        if (hashes_) active.checksum.update({copy.buffer + first, last - first});
    }

    Layout layout_;
    std::uint32_t depth_;
    bool hashes_;
    io::SimRandom random_;
    std::function<std::int64_t()> now_ns_;
    SimCopierFaults faults_;
    std::vector<Active> active_;
    std::vector<Event> events_;
    std::uint64_t event_last_ = 0;
    std::uint64_t id_before_ = 0;
};

}  // namespace kvdisk::test

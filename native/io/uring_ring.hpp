// The kernel's ring and what is registered with it: opened, explained and torn down here, used by
// uring.cpp. Opening happens on the thread that opens the tier, so that every refusal shows there;
// the ring stays disabled until the thread that will use it enables it and so becomes its only
// issuer.
#pragma once

#include <liburing.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "io/uring.hpp"

namespace kvdisk::io {

int enter_kernel(unsigned ring, unsigned to_submit, unsigned completions_min, unsigned flags,
                 void* argument, std::size_t argument_bytes);

class UringRing {
  public:
    // Throws std::system_error when the kernel refuses the ring, entering it or registering with
    // it.
    UringRing(std::uint32_t requests, const UringTuning& tuning);
    ~UringRing();

    UringRing(const UringRing&) = delete;
    UringRing& operator=(const UringRing&) = delete;

    // True when all are registered; otherwise none is and `note` says why.
    bool register_files(std::span<const int> descriptors);

    // How many of the first areas are registered: all, all but the dispensable last ones, or none;
    // `note` says why not all.
    std::size_t register_areas(std::span<const std::span<std::byte>> areas,
                               std::size_t dispensable);

    // Binds the ring to the calling thread. Throws std::system_error.
    void enable();

    // The destructor then leaves the ring to the kernel.
    void leak() noexcept { leaked_ = true; }

    io_uring* get() noexcept { return &ring_; }
    const std::string& note() const noexcept { return note_; }

    unsigned flags() const noexcept { return IO_URING_READ_ONCE(*ring_.sq.kflags); }

    // Entries that the kernel was shown (or is about to be) and has not taken.
    unsigned unsubmitted() const noexcept {
        return ring_.sq.sqe_tail - io_uring_smp_load_acquire(ring_.sq.khead);
    }

    // Shows the kernel every entry prepared so far; it looks at them only inside enter.
    void publish() noexcept {
        ring_.sq.sqe_head = ring_.sq.sqe_tail;
        io_uring_smp_store_release(ring_.sq.ktail, ring_.sq.sqe_tail);
    }

    // The entry that is `position` places behind the oldest unsubmitted one.
    const io_uring_sqe& unsubmitted_entry(unsigned position) const noexcept {
        const unsigned head = io_uring_smp_load_acquire(ring_.sq.khead);
        return ring_.sq.sqes[(head + position) & ring_.sq.ring_mask];
    }

    // Takes back every unsubmitted entry: none of them can reach the kernel any more. Sound because
    // only this thread enters the ring and there is no kernel polling thread.
    void rewind() noexcept {
        ring_.sq.sqe_tail = io_uring_smp_load_acquire(ring_.sq.khead);
        publish();
    }

  private:
    int try_areas(std::span<const std::span<std::byte>> areas);
    void open(std::uint32_t requests, const UringTuning& tuning);
    void verify_permitted();

    io_uring ring_{};
    std::string note_;
    bool leaked_ = false;
    bool areas_registered_ = false;
    bool files_registered_ = false;
};

}  // namespace kvdisk::io

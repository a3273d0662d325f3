// What moves a block's bytes between device memory and a bounce buffer. `host` is memcpy in bounded
// steps, `cuda` the driver's copies.
//
// What always holds, for every copier:
//   * Each started copy yields exactly one completion, unless `cancel` returned true for it.
//   * A gather reads the block and writes the buffer; a scatter reads the buffer and writes the
//   block;
//     neither touches a byte beyond the layout's segments or the first `block_bytes` of the buffer.
//   * A copier that hashes gives each completion without an error the checksum of the bytes that it
//     moved. One that does not leaves that to the pipeline, which hashes the buffer.
//   * All calls come from the pipeline's thread. A copier is destroyed when no copy is in flight.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>

#include "pipeline/layout.hpp"

namespace kvdisk {

enum class CopyDirection : std::uint8_t { gather, scatter };

struct Copy {
    std::uint64_t id = 0;
    std::uint64_t block_id = 0;
    std::byte* buffer = nullptr;
    CopyDirection direction = CopyDirection::gather;
    std::uint64_t seed = 0;   // of the checksum
    std::uint64_t event = 0;  // a scatter's: writes the block only after it, where it is a CUevent
};

struct CopyCompletion {
    std::uint64_t id = 0;
    int error = 0;               // 0, or an errno
    std::uint64_t checksum = 0;  // of the block's bytes, from a copier that hashes
};

enum class Readiness : std::uint8_t { ready, pending, failed };

class Copier {
  public:
    virtual ~Copier() = default;

    virtual const char* name() const noexcept = 0;

    // How it copies, in a few words, once attached.
    virtual std::string note() const { return {}; }

    // Binds the copier to the calling thread (a device is made current there).
    virtual void attach() = 0;

    // Whether the caller's event has happened: the source may be read. 0 is "no event". For `host`
    // an event is a file descriptor that becomes readable (an eventfd), for `cuda` a CUevent.
    virtual Readiness poll_event(std::uint64_t event) = 0;

    // Whether copies yield checksums: so it is where the bytes pass through a core's caches anyway.
    virtual bool hashes() const noexcept { return false; }

    // Most copies that may be started and not yet reaped.
    virtual std::uint32_t depth() const noexcept = 0;

    virtual void start(const Copy& copy) = 0;

    // Does a bounded amount of work (host) or looks which copies are done (cuda), then returns the
    // finished ones.
    virtual std::size_t reap(std::span<CopyCompletion> completions) = 0;

    // True when `reap` itself has work to do, so that the caller must not sleep.
    virtual bool busy() const noexcept = 0;

    // When to call `reap` again at the latest, on the monotonic clock.
    static constexpr std::int64_t never_look = std::numeric_limits<std::int64_t>::max();
    virtual std::int64_t look_at_ns() const noexcept { return never_look; }

    // Stops a copy. True: nothing of it touches the block or the buffer any more and no completion
    // comes. False: it cannot be stopped; its completion will come.
    virtual bool cancel(std::uint64_t id) = 0;
};

std::unique_ptr<Copier> make_host_copier(const Layout& layout, std::uint32_t depth);

}  // namespace kvdisk

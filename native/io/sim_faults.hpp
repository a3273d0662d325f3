// What can go wrong at the simulated disk, how often, and by how much. Every fault is drawn from
// the disk's seed; a chance of 0 (the default) means never, and asks nothing of the generator.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvdisk::io {

// One thing that can happen to a request. At most one is drawn for a request, `duplicate` and
// `unknown` apart, which leave the request itself unharmed.
enum class SimFault : std::uint8_t {
    none,
    short_io,         // fewer bytes moved than asked for; what follows them in a buffer is rubbish
    eio,              // -EIO; a failed write may have reached the disk in part, or whole
    enospc,           // -ENOSPC, writes only; likewise
    eagain,           // -EAGAIN, nothing moved
    eintr,            // -EINTR, nothing moved
    enomem,           // -ENOMEM, nothing moved
    hang,             // no completion before `thaw`; then a late one
    late,             // a completion long after its time (`late_ns_min` .. `late_ns_max`)
    torn_write,       // some of the sectors written, success reported
    lost_write,       // nothing written, success reported
    misdirect_write,  // written whole at another sector, success reported
    misdirect_read,   // read from another sector, success reported
    flip_on_read,     // one bit of the delivered bytes is wrong
    flip_at_rest,     // one bit of the range on the disk turns over, and stays so
    duplicate,        // a second completion of the same id, later
    unknown,          // a completion of an id that is not in flight
    count,
};
inline constexpr std::size_t sim_fault_count = static_cast<std::size_t>(SimFault::count);

const char* sim_fault_name(SimFault fault) noexcept;

// Chances per request, 0 .. 1.
struct SimFaults {
    double short_io = 0;
    double short_again = 0;      // that the rest of a short transfer comes back short once more
    double short_unaligned = 0;  // that a short count is no multiple of a sector
    double eio = 0;
    double enospc = 0;
    double eagain = 0;
    double eintr = 0;
    double enomem = 0;
    double hang = 0;
    double late = 0;
    double torn_write = 0;
    double lost_write = 0;
    double misdirect_write = 0;
    double misdirect_read = 0;
    double flip_on_read = 0;
    double flip_at_rest = 0;
    double duplicate = 0;
    double unknown = 0;
    double reorder = 0;         // per reap: completions handed over in random order
    double early_wait_end = 0;  // per wait: it returns before anything has happened
    std::int64_t late_ns_min = 1'000'000'000;
    std::int64_t late_ns_max = 30'000'000'000;
    std::uint64_t files = ~std::uint64_t{0};  // bit i: file i is afflicted

    // Everything at once, each often enough to be met many times in ten thousand requests.
    // `scale` multiplies every chance.
    static SimFaults all(double scale = 1.0);
};

// How long a healthy request takes: its turn at the shared bandwidth, then a latency of its own.
struct SimService {
    std::int64_t base_ns = 80'000;                   // shortest latency
    std::int64_t jitter_ns = 40'000;                 // evenly spread on top
    std::uint64_t bytes_per_second = 3'000'000'000;  // shared by all requests
    double tail_chance = 0.01;              // that the latency doubles, again and again ...
    std::int64_t tail_ns_max = 20'000'000;  // ... each time with chance 1/2, up to this
    std::int64_t call_ns = 100;             // time that each reap and submit takes

    bool operator==(const SimService&) const = default;
};

// What a power cut does to what was not synced (no backend request syncs).
struct SimCrash {
    double lost = 0.25;           // that a completed write is undone
    double torn = 0.25;           // that one not undone survives in part, sector by sector
    double torn_in_flight = 0.5;  // that one in flight reaches the disk in part
};

}  // namespace kvdisk::io

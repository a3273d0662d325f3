// The simulated disk: a Backend over files in memory, under virtual time, with every fault that a
// disk is known to have, drawn from one seed. It is the main testing tool: millions of requests a
// minute, and any run replays from its seed (same calls, same seed: same `trace_hash`).
//
// What always holds, beyond the Backend contract:
//   * Nothing happens unless virtual time passes: in `wait`, `advance`, and a little in each
//     `reap` and `submit`.
//   * A read puts bytes into its buffer only when its time has come, however late; a write takes
//     bytes from its buffer at a random moment between submit and completion. So a buffer that is
//     reused early is visibly damaged, or puts wrong bytes on the disk.
//   * A request that was pushed but not submitted waits for ever.
//   * The bytes of the files survive `crash`; what is in flight does not.
//   * Memory is allocated at construction, when a file first grows, and never else.
//
// The order of bad luck for a request: a planned fault (`plan`, `fail_nth`), then a freeze, then a
// short resumption, then one draw over `SimFaults`.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <span>
#include <vector>

#include "io/backend.hpp"
#include "io/sim_faults.hpp"
#include "io/sim_file.hpp"
#include "io/sim_random.hpp"

namespace kvdisk::io {

struct SimDiskOptions {
    std::uint64_t seed = 1;
    std::vector<std::uint64_t> file_bytes;    // sizes of the files, fixed
    std::uint32_t depth = 32;                 // most requests in flight, 1..4096
    std::uint64_t alignment_bytes = 1;        // of address, offset and length; else -EINVAL
    std::uint64_t journal_bytes = 4 << 20;    // per file: unsynced writes that a crash can undo
    std::int64_t start_ns = 1'000'000'000;    // virtual time at the beginning
    std::vector<std::span<std::byte>> areas;  // a request naming one must lie inside it
    SimService service;
    SimFaults faults;
};

class SimDisk final : public Backend {
  public:
    static constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

    explicit SimDisk(const SimDiskOptions& options);

    // --- the Backend
    const char* name() const noexcept override { return "sim"; }
    void attach() override;
    std::uint32_t depth() const noexcept override { return depth_; }
    std::uint32_t in_flight() const noexcept override { return in_flight_; }
    void push(const Request& request) override;
    void submit() override;
    std::size_t reap(std::span<Completion> completions) override;
    void wait(std::int64_t until_ns) override;
    void wake() noexcept override { woken_.store(true, std::memory_order_release); }
    BackendStats stats() const override;
    // What is in flight goes on to touch its buffers as time passes; none of it is reaped.
    void abandon() noexcept override { abandoned_ = true; }

    // --- time
    std::int64_t now_ns() const noexcept { return now_ns_; }
    void advance(std::int64_t ns) { advance_to(now_ns_ + ns); }
    void advance_to(std::int64_t time_ns);
    // When the next thing happens at this disk; `never` when nothing will.
    std::int64_t next_event_ns() const noexcept {
        return events_.empty() ? never : events_[0].at_ns;
    }
    // Something else that lives in the same time (a copier): `wait` stops at its next event too.
    void set_neighbour(std::function<std::int64_t()> next_event_ns) {
        neighbour_next_ns_ = std::move(next_event_ns);
    }
    // Other memory than before; nothing is in flight.
    void set_areas(std::vector<std::span<std::byte>> areas);
    // Waits without a limit that nothing could have ended.
    std::uint64_t endless_waits() const noexcept { return endless_waits_; }

    // --- bytes
    SimFile& file(std::size_t index) noexcept { return files_[index]; }
    const SimFile& file(std::size_t index) const noexcept { return files_[index]; }

    // Power cut: drops all that is in flight, then treats unsynced writes as `crash` says. The
    // disk can be attached again, like a new backend over the same files.
    void crash(const SimCrash& crash = {});
    // The same without harm: writes that have been completed stay, those in flight are dropped.
    void restart() { crash({.lost = 0, .torn = 0, .torn_in_flight = 0}); }

    // --- faults
    void set_faults(const SimFaults& faults);
    void set_service(const SimService& service) { service_ = service; }
    // The `n`th request (1: the next one) of this kind on this file meets `fault`; with
    // `persistent`, so does every later one.
    void plan(Op op, std::uint16_t file, std::uint64_t n, SimFault fault, bool persistent = false);
    // The same with a chosen result: -errno, or a count of bytes that are truly moved.
    void fail_nth(Op op, std::uint16_t file, std::uint64_t n, std::int64_t result,
                  bool persistent = false);
    void clear_plans() noexcept { plans_.clear(); }
    // From now on nothing completes, in flight or new, until `thaw`.
    void freeze() noexcept;
    // Ends a freeze; every hung request completes soon, in random order.
    void thaw();
    // No faults and no plans any more, and a thaw.
    void heal();
    std::uint32_t hung() const noexcept;

    // How often each fault has struck.
    std::uint64_t struck(SimFault fault) const noexcept {
        return struck_[static_cast<std::size_t>(fault)];
    }
    // Of every event so far, with its time.
    std::uint64_t trace_hash() const noexcept { return trace_hash_; }

  private:
    enum class State : std::uint8_t { free, pushed, running, hung };
    enum class Kind : std::uint8_t { take, complete, stray };

    struct Flight {
        Request request;
        State state = State::free;
        SimFault fault = SimFault::none;
        bool taken = false;             // a write that has taken its bytes
        std::int64_t result = 0;        // what the completion will say
        std::uint64_t moved_bytes = 0;  // what is truly moved
        std::uint64_t use = 0;          // tells this use of the place from others
    };

    // Something that happens at a time: to a flight, or a stray completion.
    struct Event {
        std::int64_t at_ns = 0;
        std::uint64_t order = 0;  // breaks ties
        std::uint64_t use = 0;    // of the flight; stray: the id
        std::uint32_t flight = 0;
        Kind kind = Kind::take;
    };

    struct Done {
        Completion completion;
        bool stray = false;      // was never asked for
        bool duplicate = false;  // comes a second time, after this one was reaped
    };

    struct Plan {
        Op op;
        std::uint16_t file;
        bool persistent;
        SimFault fault;
        std::int64_t result;
        std::uint64_t remaining;
    };

    struct Threshold {
        double below = 0;
        SimFault fault = SimFault::none;
    };

    // Where the rest of a transfer that came back short would begin.
    struct Resumption {
        std::uint64_t offset = 0;
        std::uint64_t end = 0;
        std::uint32_t file_and_op = 0;
    };

    void decide(Flight& flight);
    SimFault draw(Flight& flight);
    bool decide_planned(Flight& flight);
    void meet(Flight& flight, SimFault fault);
    void come_short(Flight& flight, std::uint64_t moved_bytes);
    std::uint64_t short_count(std::uint64_t length);
    Resumption resumption_at(const Request& request, std::uint64_t offset) const noexcept;
    Resumption& resumption_place(const Request& request) noexcept;

    void start(std::uint32_t index);
    std::int64_t service_ns(std::uint64_t bytes);
    void schedule(std::int64_t at_ns, Kind kind, std::uint32_t flight, std::uint64_t use);
    void schedule_flight(std::uint32_t index, std::int64_t done_ns);
    void happen(const Event& event);
    void complete(std::uint32_t index);
    void release(std::uint32_t index) noexcept;
    void deliver(Flight& flight);
    void take(Flight& flight);
    void write_torn(SimFile& file, std::uint64_t offset, std::span<const std::byte> bytes);
    std::uint64_t elsewhere(const SimFile& file, const Request& request, std::uint64_t length);
    std::uint64_t random_offset(const Request& request, std::uint64_t length) {
        return request.offset + random_.below(length);
    }
    void schedule_stray(std::uint64_t id);
    std::uint64_t unknown_id();
    bool id_in_flight(std::uint64_t id) const noexcept;
    void strike(SimFault fault) noexcept { ++struck_[static_cast<std::size_t>(fault)]; }
    void trace(std::uint64_t word) noexcept {
        trace_hash_ = (trace_hash_ ^ word) * 0x100000001B3ULL;
        trace_hash_ ^= trace_hash_ >> 32;
    }
    void build_thresholds();

    std::uint32_t depth_;
    std::uint64_t alignment_bytes_;
    std::vector<std::span<std::byte>> areas_;
    std::vector<SimFile> files_;
    SimService service_;
    SimFaults faults_;
    std::vector<Threshold> thresholds_[2];  // per operation, cumulative
    SimRandom random_;

    std::vector<Flight> flights_;
    std::vector<std::uint32_t> free_flights_;
    std::vector<std::uint64_t> ids_;  // of the flights in use; 0: free
    std::vector<std::uint32_t> pushed_;
    std::vector<Event> events_;  // a heap, the earliest first
    std::vector<Done> done_;     // to be reaped
    std::array<Resumption, 256> resumptions_{};
    std::array<std::uint64_t, 64> past_ids_{};
    std::vector<Plan> plans_;
    std::function<std::int64_t()> neighbour_next_ns_;

    std::atomic<bool> woken_{false};
    bool attached_ = false;
    bool abandoned_ = false;
    bool frozen_ = false;
    std::uint32_t in_flight_ = 0;
    std::uint32_t strays_ = 0;
    std::int64_t now_ns_;
    std::int64_t channel_free_ns_ = 0;
    std::uint64_t order_last_ = 0;
    std::uint64_t use_last_ = 0;
    std::uint64_t past_next_ = 0;
    std::uint64_t endless_waits_ = 0;
    std::uint64_t trace_hash_ = 0xCBF29CE484222325ULL;
    std::array<std::uint64_t, sim_fault_count> struck_{};
    BackendStats stats_;
};

}  // namespace kvdisk::io

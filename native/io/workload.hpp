// fio's job loop over a Backend: the raw layer of `kvdisk bench`. It exists to show what our
// backend costs beside fio, so its timed part does what fio's does and no more: take what is done,
// refill the queue, one system call to submit and wait.
//
// What always holds:
//   * Every sector on the disk is unique: its random bytes lie under a stamp of seed, offset and
//     generation. A device or file system that compresses or shares blocks gains nothing.
//   * At most one write is in flight for a block, and which generation a block must hold is known,
//     so `verify` can compare every byte.
//   * A short answer is resumed, but not for ever: a disk whose answers stay short is an error.
//   * A run counts all bytes that it moved and all the time until the last of them had moved,
//     fsync included where it was asked for, as fio counts.
//   * One thread fills, runs and verifies; any thread may stop it and ask how far it is.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/backend.hpp"
#include "io/fixed_queue.hpp"
#include "io/histogram.hpp"

namespace kvdisk::io {

struct RawJobOptions {
    int file = -1;                       // borrowed; the backend works on a duplicate
    std::uint64_t offset = 0;            // where this job's part of the file begins, bytes
    std::uint64_t size_bytes = 0;        // of its part; a multiple of block_bytes
    std::uint32_t block_bytes = 131072;  // multiple of 512
    std::uint32_t depth = 1;             // 1..4096, at most the number of blocks
    std::uint32_t read_percent = 100;    // 0: writes only
    bool random = false;
    bool sync_after_writes = false;  // buffered files: fdatasync counts as part of a run
    std::uint64_t seed = 1;
    std::string backend = "uring";  // or threads, or auto
    // For tests: what to use instead of a backend by its name.
    std::function<std::unique_ptr<Backend>(const BackendOptions&)> make_backend;
};

// Of one run, and of one direction each where there are two: reads, writes.
struct RawResult {
    std::array<std::uint64_t, 2> bytes{}, ios{};
    std::array<std::uint64_t, 2> short_ios{};  // answers that moved a part, and were resumed
    std::uint64_t elapsed_ns = 0;
    std::uint64_t thread_cpu_ns = 0;      // user and system time of the thread that ran
    std::uint64_t in_flight_ns = 0;       // integral of requests in flight over time
    std::uint64_t wrong_reads = 0;        // a block's first stamp was not one of this job's
    int error = 0;                        // errno of the first failed request, which ends the run
    std::uint64_t error_offset = 0;       // bytes from the start of the file
    std::uint32_t abandoned = 0;          // requests that did not end after a stop
    std::array<Histogram, 2> latency_ns;  // push to reap
};

struct RawVerdict {
    std::uint64_t blocks_checked = 0;
    std::uint64_t blocks_wrong = 0;
    std::uint64_t first_wrong_offset = 0;  // bytes from the start of the file
    int error = 0;
};

class RawJob {
  public:
    // Throws std::invalid_argument, or std::system_error when the backend or memory is not to be
    // had.
    explicit RawJob(const RawJobOptions& options);
    ~RawJob();
    RawJob(const RawJob&) = delete;
    RawJob& operator=(const RawJob&) = delete;

    // Writes every block once, in order.
    RawResult fill();

    // The timed part.
    RawResult run(std::int64_t duration_ns);

    // Reads back every block whose content is known and compares all of it.
    RawVerdict verify();

    // Somebody else has written to the file: nothing is known of its content any more.
    void forget() noexcept;

    // Ends a current fill, run or verify soon, and any later one at once. From any thread.
    void stop() noexcept;

    // Bytes moved since the current fill, run or verify began. From any thread.
    std::uint64_t progress_bytes() const noexcept { return progress_bytes_; }

    // Memory registered for I/O, bytes.
    std::uint64_t buffer_bytes() const noexcept { return memory_bytes_; }

    BackendStats stats() const { return backend_->stats(); }
    const char* backend_name() const noexcept { return backend_->name(); }
    // Why `auto` is not io_uring; empty: it is, or another was wanted.
    const std::string& backend_reason() const noexcept { return backend_reason_; }

  private:
    enum class Phase : std::uint8_t { fill, run, verify };

    // One request in flight.
    struct Slot {
        Op op = Op::read;
        std::uint32_t buffer = 0;  // which one of the write buffers
        std::uint64_t block = 0;
        std::byte* data = nullptr;
        std::uint32_t done_bytes = 0;
        std::uint8_t resumes = 0;
        std::int64_t started_ns = 0;
    };

    RawResult pump(Phase phase, std::int64_t duration_ns);
    bool begin(Phase phase, std::int64_t now);
    void advance() noexcept;
    void push(std::uint32_t index);
    void handle(Phase phase, const Completion& completion, std::int64_t now, RawResult& result);
    std::uint64_t random_below(std::uint64_t bound) noexcept;

    std::uint64_t buffers_per_area() const noexcept;
    std::uint64_t offset_of(std::uint64_t block) const noexcept;
    std::byte* buffer(std::uint64_t index) const noexcept;
    std::byte* write_buffer(std::uint64_t index) const noexcept;
    void stamp(const Slot& slot) const noexcept;
    bool first_stamp_is_ours(const Slot& slot) const noexcept;
    void judge(const Slot& slot) noexcept;

    const RawJobOptions options_;
    const std::uint64_t block_count_;
    const std::uint32_t write_buffer_count_;
    std::uint64_t memory_bytes_ = 0;
    std::byte* memory_ = nullptr;  // read buffers, one for each slot; then write buffers
    std::unique_ptr<Backend> backend_;
    std::string backend_reason_;
    std::vector<Slot> slots_;
    FixedQueue<std::uint32_t> free_slots_;
    FixedQueue<std::uint32_t> free_buffers_;
    std::vector<std::uint32_t> generations_;  // what each block holds; 0: unknown
    std::vector<bool> writing_;               // a write is in flight
    std::uint64_t position_ = 0;              // the next block, when in order
    std::uint64_t blocks_left_ = 0;           // of the phase
    std::uint32_t generation_ = 0;
    std::uint64_t requests_ = 0;
    std::uint64_t random_state_;
    bool attached_ = false;
    bool abandoned_ = false;
    RawVerdict* verdict_ = nullptr;  // while verifying
    std::atomic<bool> stopped_ = false;
    std::atomic<std::uint64_t> progress_bytes_ = 0;
};

}  // namespace kvdisk::io

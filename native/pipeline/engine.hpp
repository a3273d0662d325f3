// The native engine as Python sees it: pipelines on threads of their own, one for each shard of the
// slots, behind bounded queues. Submitting pushes to a queue and wakes a thread; it makes no I/O
// system call and never waits for the disk. Only `wait` and `close` block, both with a limit.
//
// What always holds:
//   * Every accepted transfer ends exactly once, with one result per row, in the order of its rows.
//   * That is soon after its deadline, also when a thread hangs in the kernel, as long as somebody
//     polls or waits.
//   * `source_free` of a store comes no later than its end, and a slot's release from quarantine
//     after the results of every transfer that may have put it there.
//   * What the kernel may still use after `close` is kept for ever, never freed.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "pipeline/layout.hpp"
#include "pipeline/pipeline.hpp"

namespace kvdisk {

struct EngineOptions {
    Layout layout;
    std::string device = "cpu";  // where the blocks lie: cpu, cuda (the caller's current), cuda:N
    std::uint64_t slot_bytes = 0;
    std::uint64_t slot_count = 0;
    int data_fd = -1;                 // borrowed at open: the engine works on duplicates
    int record_fd = -1;               // -1: records live in memory only
    std::uint64_t record_offset = 0;  // of the first record page in the record file
    std::uint64_t epoch = 1;
    std::string backend = "auto";  // auto, uring, threads
    bool force_async = false;
    bool force_async_reads = false;
    std::uint32_t shards = 1;
    std::uint32_t iodepth = 32;  // per shard and direction
    std::uint32_t buffers = 64;  // per shard
    std::uint32_t rows_per_buffer = 1;
    std::uint32_t load_reserve = 8;
    std::uint32_t store_depth_beside_loads = 2;
    std::uint64_t alignment = 4096;
    std::uint64_t store_queue_bytes = std::uint64_t{1} << 30;
    bool direct_stores = false;
    bool direct_loads = false;
    // For tests: what to use instead of a backend by its name.
    std::function<std::unique_ptr<io::Backend>(const io::BackendOptions&)> make_backend;
};

struct FinishedTransfer {
    std::uint64_t id = 0;
    Direction direction = Direction::store;
    std::vector<RowResult> results;
};

struct Events {
    std::vector<std::uint64_t> source_free;  // stores whose blocks may be reused
    std::vector<FinishedTransfer> finished;
    std::vector<std::uint64_t> released_slots;  // out of quarantine
};

struct EngineStats {
    PipelineStats pipeline;    // over all shards
    io::BackendStats backend;  // over all shards
    RingCounts ring;
    std::uint64_t buffer_bytes = 0;
    std::uint64_t pinned_bytes = 0;
    std::uint64_t transfers_open = 0;
    std::uint64_t stores_refused = 0;     // transfers turned away at submit, whole or in part
    std::uint64_t store_queue_bytes = 0;  // waiting for a buffer
    std::string backend_name, backend_reason, copier_name, copier_note;
    bool fresh = true;  // false: a shard did not answer in time; its last figures are shown

    void merge(const EngineStats& shard);  // adds one shard's
};

class Shard;
struct Outbox;
struct Part;

// The records that proved themselves at open, in slot order, column by column: a million of them
// are on their way to somebody who wants columns, and each further copy costs a tenth of a second.
struct RestoredRecords {
    std::vector<std::uint64_t> slots, sequences, valid_bytes;
    std::vector<std::uint8_t> keys, key_lengths;  // keys: key_bytes_max each, zero-padded
    std::uint64_t lost_pages = 0;                 // that could not be read, or were not tried

    std::size_t size() const noexcept { return slots.size(); }
    bool empty() const noexcept { return slots.empty(); }
};

class Engine {
  public:
    // Throws std::invalid_argument (the caller's mistake) or std::system_error (what cannot be
    // had).
    explicit Engine(const EngineOptions& options);
    ~Engine();  // close(5 s)
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Returns the transfer's id, or 0: refused, the store queue is full. Of a store that fits in
    // part, the rows behind those that fit end as refused. `timeout_ns` < 0: no deadline;
    // `start_within_ns` < 0: a store waits for a buffer until its deadline.
    std::uint64_t submit(Direction direction, std::vector<Row> rows, std::int64_t timeout_ns,
                         std::int64_t start_within_ns, std::uint64_t event);

    // Ends what has not begun of a store, as refused.
    void cancel_waiting(std::uint64_t transfer_id);

    Events poll();

    // Until `poll` has something to give (true), or the time is over or the engine closed (false).
    // `timeout_ns` < 0: no limit.
    bool wait(std::int64_t timeout_ns);

    // Readable while `poll` has something to give.
    int event_fd() const noexcept;

    EngineStats stats();
    void reset_stats();

    // Of each shard. Never waits.
    std::vector<Progress> progress(Direction direction) const;

    // The records that proved themselves at open, in slot order. Given once.
    RestoredRecords take_restored() { return std::move(restored_); }
    std::uint64_t lost_record_pages() const noexcept { return restored_.lost_pages; }

    // All transfers end by then, those still to come as well. The threads stay, and tell of slots
    // that leave quarantine. Never waits. `timeout_ns` < 0 changes nothing.
    void end_within(std::int64_t timeout_ns);

    // Ends everything: drains until the limit, then times out what is left. Returns how many I/Os
    // had to be abandoned in the kernel. Idempotent.
    std::uint64_t close(std::int64_t timeout_ns);

    bool closed() const noexcept { return closed_; }

  private:
    std::uint32_t shard_of(std::uint64_t slot) const noexcept;
    void require_own_process() const;
    void stand_in();
    void end_remaining_jobs();
    void check_rows(const std::vector<Row>& rows) const;
    std::uint64_t store_rows_fitting() const noexcept;

    EngineOptions options_;  // with its device resolved
    RestoredRecords restored_;
    std::shared_ptr<Outbox> outbox_;
    std::vector<std::shared_ptr<Shard>> shards_;
    std::vector<std::unique_ptr<Part>> parts_;  // of the transfer that is being submitted
    std::atomic<bool> closed_ = false;
    std::uint64_t id_last_ = 0;
    std::uint64_t stores_refused_ = 0;
    std::uint64_t abandoned_ = 0;
    std::mutex submit_mutex_;
    std::mutex close_mutex_;
    int process_id_ = 0;
};

}  // namespace kvdisk

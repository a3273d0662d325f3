// The state machine that moves blocks: single-threaded, stepped, replayable. It owns no clock, no
// thread and no file; Backend, Copier and Clock are passed in. The engine thread steps it with
// io_uring and memcpy; the tests step it with the simulator under virtual time.
//
//   store:  wait -> gather -> hash -> write -> record -> ok       (source free after gather)
//   load:   wait -> read -> verify -> scatter -> ok
//
// A copier that hashes makes one stage of gather and hash, and one of verify and scatter: a row
// that proves wrong has then written to its block, whose content is undefined unless the row is ok.
//
// What always holds:
//   * `result == requested` is the only success of an I/O. Shorter is resumed, bounded, then
//   failed.
//   * A buffer or slot with I/O in flight is never reused: when its row has to end, both are
//   quarantined
//     until the completion arrives.
//   * A slot's record is visible only after its payload was written whole, and is cleared before
//     anything overwrites the slot.
//   * A row ends once; after that nothing of it writes to its device block.
//   * Nothing is allocated in the steady state: all sizes are fixed at construction, but for the
//     results of a transfer, which grow with the largest one that its owner reuses.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/backend.hpp"
#include "io/histogram.hpp"
#include "pipeline/checksum.hpp"
#include "pipeline/clock.hpp"
#include "pipeline/copier.hpp"
#include "pipeline/ring.hpp"
#include "pipeline/slot_record.hpp"
#include "pipeline/transfer.hpp"

namespace kvdisk {

struct PipelineOptions {
    std::uint64_t block_bytes = 0;                 // payload of a slot
    std::uint64_t slot_bytes = 0;                  // multiple of `alignment`, >= block_bytes
    std::uint32_t rows_per_buffer = 1;             // neighbouring slots merged into one I/O, 1..32
    std::uint32_t iodepth = 32;                    // payload I/Os in flight
    std::uint32_t record_writes = 8;               // record pages in flight; 0: no record file
    std::uint32_t load_reserve = 1;                // buffers that stores never take
    std::uint32_t store_depth_beside_loads = 2;    // full buffers of stores in flight beside loads
    std::int64_t loads_linger_ns = 1'000'000'000;  // how long after the last load that holds
    // While loads get on, stores get one byte for so many that were loaded: requests wait for
    // loads, nobody for a store. Loads that wait for something else than the disk hold up no store.
    std::uint64_t load_bytes_per_store_byte = 8;
    std::int64_t loads_get_on_ns = 20'000'000;  // how long after a load's last I/O that holds
    std::uint64_t alignment = 4096;             // of offsets, lengths and addresses
    std::uint16_t data_file = 0;                // index into the backend's files
    std::uint16_t record_file = 1;
    std::uint64_t record_offset = 0;  // where the first record page lies in the record file
    std::int64_t wall_clock_ns = 0;  // the time of day less the clock's: sequence numbers follow it
    std::uint16_t record_area = io::area_none;  // registered area of the record staging pages
    // The direct path (one region, aligned, block_bytes == slot_bytes): no bounce copy.
    bool direct_stores = false;
    bool direct_loads = false;  // gives up the deadline of a load whose read hangs
    Region direct_region;       // where the blocks lie
    std::vector<std::span<std::byte>> direct_areas;  // registered ones, after the ring's
    std::uint16_t direct_area_first = io::area_none;
};

// Everything the pipeline counts. Times in nanoseconds, sizes in bytes.
struct PipelineStats {
    std::uint64_t rows_stored = 0, rows_loaded = 0;  // ended ok
    std::uint64_t bytes_stored = 0, bytes_loaded = 0;
    std::uint64_t rows_missed = 0, rows_corrupt = 0, rows_failed = 0, rows_timed_out = 0;
    std::uint64_t rows_refused = 0, rows_busy = 0;
    std::uint64_t ios = 0, ios_merged = 0;  // payload I/Os; those of more than one row
    std::uint64_t record_ios = 0;
    std::uint64_t load_ios_short = 0, store_ios_short = 0;  // answers that moved a part
    std::uint64_t ios_retried = 0, ios_split = 0;
    std::uint64_t unknown_completions = 0;
    std::uint64_t late_completions = 0;   // of quarantined buffers
    std::uint64_t ring_used_ns = 0;       // integral of used buffers over time
    Histogram load_io_ns, store_io_ns;    // push to completion, per I/O
    Histogram load_row_ns, store_row_ns;  // submit to end, per row

    void merge(const PipelineStats& other) noexcept;
};

// What the disk has made of loads, or of stores, since construction: the bytes that it moved for
// them, and for how long any such I/O was in flight. Their ratio is what they get from it, beside
// whatever else goes on there; what they wait for besides the disk does not count. While `busy`,
// such I/O has taken time that its bytes do not stand for yet.
struct Progress {
    std::uint64_t bytes = 0;
    std::uint64_t busy_ns = 0;
    bool busy = false;
};

class Pipeline {
  public:
    // `records` may be shared between pipelines whose slots never share a record page.
    Pipeline(const PipelineOptions& options, Ring& ring, SlotRecords& records,
             std::span<std::byte> record_staging, io::Backend& backend, Copier& copier,
             const Clock& clock, std::uint64_t sequence_next, std::uint64_t sequence_step);

    // Bytes of page-aligned staging memory that the record writes need.
    static std::uint64_t record_staging_bytes(const PipelineOptions& options) noexcept {
        return options.record_writes * record_page_bytes;
    }

    // Takes a transfer with at least one row. Slots must be below the table's count, block ids
    // below the layout's: the engine has checked.
    void submit(Transfer* transfer);

    // Ends the rows of a store that have not begun, as refused. True when the transfer was known.
    bool cancel_waiting(std::uint64_t transfer_id);

    // One bounded step. Returns when to step again at the latest: a past time means at once.
    std::int64_t step();

    Transfer* take_finished() noexcept { return finished_.pop(); }
    Transfer* take_source_free() noexcept { return source_free_.pop(); }

    // Slots whose last I/O has arrived after their row had ended: free to be used again.
    std::vector<std::uint64_t>& released_slots() noexcept { return released_slots_; }

    // Transfers not yet ended, and I/Os whose buffers are quarantined.
    std::uint32_t transfers_open() const noexcept { return transfers_open_; }
    std::uint32_t quarantined() const noexcept { return ring_.counts().quarantined; }

    // Nothing is open, in flight or quarantined.
    bool idle() const noexcept;

    // Store rows that have left the waiting queue since construction, however they left it.
    std::uint64_t store_rows_begun() const noexcept { return store_rows_begun_; }

    // As of the last step.
    Progress progress(Direction direction) const noexcept;

    // Ends what is overdue. Between steps, or while the backend's `submit` has not returned.
    void end_overdue();

    // From this time on every deadline counts as passed. The only call allowed from any thread.
    void end_by(std::int64_t time_ns) noexcept { end_by_ns_ = time_ns; }

    const PipelineStats& stats() const noexcept { return stats_; }
    void reset_stats() noexcept { stats_ = PipelineStats{}; }

    // Counts everything afresh and compares; false when a running count has drifted.
    bool recount() const;

  private:
    enum class Stage : std::uint8_t {
        free,
        gathering,
        hashing,
        ready,  // waits for a place in the disk's queue
        in_io,
        retrying,   // waits before trying again after a transient answer
        recording,  // waits for its record pages
        verifying,
        scattering,
        count,
    };
    static constexpr std::uint32_t none = UINT32_MAX;
    static constexpr std::uint32_t rows_per_buffer_max = 32;
    enum class PageWait : std::uint8_t { nothing, dirty, writing };

    // A run of rows in neighbouring slots that shares one buffer and one I/O. There is one for each
    // buffer of the ring, with the buffer's index.
    struct Extent {
        Stage stage = Stage::free;
        Direction direction = Direction::store;
        bool expired = false;      // rows must end as soon as the copier has let go
        bool ended = false;        // rows have ended; only the I/O is awaited (quarantine)
        bool split = false;        // after an error: one row at a time
        bool direct = false;       // no bounce copy: `data` is the block itself
        bool source_held = false;  // store: the block may still be read
        std::uint8_t resumes = 0;
        std::uint8_t retries = 0;
        std::uint32_t row_count = 0;
        std::uint32_t first_row = 0;
        std::uint32_t copies_pending = 0;
        std::uint32_t hash_row = 0;
        std::uint32_t previous = none, next = none;  // in its stage's list
        Transfer* transfer = nullptr;
        std::byte* data = nullptr;
        std::uint64_t slot = 0;
        std::uint64_t serial = 0;  // of this use of the buffer
        std::uint64_t io_id = 0;   // of the I/O in flight; 0: none
        std::uint64_t done_bytes = 0;
        std::uint64_t hash_bytes = 0;
        std::uint64_t io_bytes = 0;
        std::int64_t io_started_ns = 0;
        std::int64_t retry_at_ns = 0;
        std::uint64_t page_first = 0;
        PageWait page_wait[2] = {PageWait::nothing, PageWait::nothing};
        Checksum checksum;
    };

    struct ExtentRow {
        RowResult result;
        bool copying = false;
        std::uint64_t sequence = 0;
        std::uint64_t checksum = 0;
    };

    // A doubly linked list of extents in one stage (and direction), so that any can leave it at
    // once.
    struct ExtentList {
        std::uint32_t head = none, tail = none, size = 0;
    };

    struct RecordWrite {
        bool busy = false;
        std::uint8_t resumes = 0, retries = 0;
        std::uint64_t page = 0;
        std::uint64_t io_id = 0;  // 0 while it waits to be pushed
        std::uint64_t done_bytes = 0, io_bytes = 0;
        std::int64_t retry_at_ns = 0;
    };

    // A slot's use: the number of loads in flight or `slot_storing`, and whether its quarantine was
    // told.
    static constexpr std::uint16_t slot_told = 0x8000;
    static constexpr std::uint16_t slot_storing = 0x7FFF;

    // --- lists
    ExtentList& list(Stage stage, Direction direction) noexcept {
        return lists_[static_cast<std::size_t>(stage)][static_cast<std::size_t>(direction)];
    }
    const ExtentList& list(Stage stage, Direction direction) const noexcept {
        return lists_[static_cast<std::size_t>(stage)][static_cast<std::size_t>(direction)];
    }
    std::uint32_t& ios_in_flight(Direction direction) noexcept {
        return ios_in_flight_[static_cast<std::size_t>(direction)];
    }
    void enter(std::uint32_t index, Stage stage) noexcept;
    void leave(std::uint32_t index) noexcept;

    // --- starting
    using WaitingList = TransferList<&Transfer::next>;
    void poll_events(std::int64_t now);
    void poll_devices(std::int64_t now);
    void start_loads(std::int64_t now);
    void start_stores(std::int64_t now);
    void start_next(WaitingList& waiting, std::int64_t now);
    RowStatus startable(const Transfer& transfer, const Row& row) const noexcept;
    std::uint32_t run_length(const Transfer& transfer) const noexcept;
    void start_extent(std::uint32_t index, Transfer& transfer, std::uint32_t row,
                      std::uint32_t row_count);
    void prepare_row(Extent& extent, ExtentRow& prepared, std::uint32_t row);
    std::uint64_t next_sequence() noexcept;
    void start_copies(std::uint32_t index, CopyDirection direction);
    bool goes_direct(const Transfer& transfer) const noexcept;

    // --- the disk
    std::uint64_t planted_id(std::uint64_t id) const noexcept;
    void handle(const io::Completion& completion, std::int64_t now);
    void handle_payload(std::uint32_t index, std::int64_t result, std::int64_t now);
    void publish(std::uint32_t index);
    void commit_records(std::uint32_t index, std::int64_t now);
    void handle_record(RecordWrite& write, std::int64_t result, std::int64_t now);
    void payload_failed(std::uint32_t index, int error, std::int64_t now);
    void payload_moved(std::uint32_t index, std::int64_t now);
    std::uint64_t io_end(const Extent& extent) const noexcept;
    std::uint64_t io_left_bytes(const Extent& extent) const noexcept;
    void issue(std::int64_t now);
    void push_payload(std::uint32_t index, std::int64_t now);
    void issue_records(std::int64_t now);
    void begin_record(std::uint64_t page);
    void push_record(std::uint32_t index);
    void record_written(std::uint64_t page, int error, std::int64_t now);
    void fail_unrecorded(std::uint32_t index, std::uint64_t page, int error);
    std::uint16_t direct_area_of(const std::byte* data, std::uint64_t bytes) const noexcept;
    bool store_has_place(std::uint64_t io_bytes, std::int64_t now) const noexcept;
    std::int64_t store_limit_lifts_ns() const noexcept;
    std::int64_t store_credit_counts_until_ns() const noexcept;
    void wake_retries(std::int64_t now);

    // --- the copier and the checksum
    void handle_copy(const CopyCompletion& completion, std::int64_t now);
    void copies_done(std::uint32_t index, std::int64_t now);
    void hash_some(std::int64_t now);
    void verify(std::uint32_t index, std::int64_t now);
    void find_record(std::uint32_t index, std::uint32_t row_index);
    std::uint64_t seed_of(std::uint32_t index, std::uint32_t row) const noexcept;
    void take_checksum(std::uint32_t index, std::uint32_t row_index, std::uint64_t checksum);
    void hashed(std::uint32_t index, std::int64_t now);

    // --- ending
    void expire(std::int64_t due);
    void expire_waiting(WaitingList& waiting, std::int64_t due);
    void end_unstarted(Transfer& transfer, RowResult result, std::int64_t now);
    void expire_extent(std::uint32_t index, std::int64_t now);
    void quarantine_extent(std::uint32_t index, std::int64_t now);
    void finish_extent(std::uint32_t index, RowResult unresolved, std::int64_t now);
    void end_row(Transfer& transfer, std::uint32_t row, RowResult result, std::int64_t now);
    bool all_rows_known(std::uint32_t index) const noexcept;
    void count_row(const Transfer& transfer, RowResult result, std::int64_t now);
    void count_busy_time(Direction direction, std::int64_t now) noexcept;
    void free_sources(Transfer& transfer, std::uint32_t count);
    void vacate(std::uint32_t index);

    // Ids carry the extent's index below, so that a completion finds its extent, and a number that
    // is never used again above, so that a completion of the past finds nobody.
    static std::uint64_t copy_id(std::uint64_t serial, std::uint32_t index,
                                 std::uint32_t row) noexcept {
        return serial << 22 | std::uint64_t{index} << 6 | row;
    }
    static constexpr std::uint64_t record_id_bit = 0x10000;
    std::uint64_t next_io_id(std::uint64_t low) noexcept { return ++io_last_ << 17 | low; }

    ExtentRow& row_of(std::uint32_t index, std::uint32_t row) noexcept {
        return extent_rows_[std::size_t{index} * options_.rows_per_buffer + row];
    }
    const ExtentRow& row_of(std::uint32_t index, std::uint32_t row) const noexcept {
        return extent_rows_[std::size_t{index} * options_.rows_per_buffer + row];
    }
    std::int64_t next_time(std::int64_t now) const noexcept;
    void expire_due(std::int64_t now);

    PipelineOptions options_;
    Ring& ring_;
    SlotRecords& records_;
    std::span<std::byte> record_staging_;
    io::Backend& backend_;
    Copier& copier_;
    const Clock& clock_;

    std::vector<Extent> extents_;
    std::vector<ExtentRow> extent_rows_;
    std::vector<RecordWrite> record_writes_;
    std::vector<std::uint16_t> slot_uses_;
    ExtentList lists_[static_cast<std::size_t>(Stage::count)][2];
    WaitingList waiting_loads_, waiting_stores_;
    WaitingList waiting_events_;  // stores whose source is not ready
    WaitingList finished_;
    TransferList<&Transfer::next_free> source_free_;
    TransferList<&Transfer::next_busy> devices_busy_;  // loads
    std::vector<std::uint64_t> released_slots_;

    std::uint64_t sequence_next_;
    std::uint64_t sequence_step_;
    std::uint64_t serial_last_ = 0;
    std::uint64_t io_last_ = 0;
    std::uint32_t transfers_open_ = 0;
    std::uint32_t loads_open_ = 0;
    std::int64_t store_credit_bytes_ = 0;      // what stores may write while loads get on
    std::int64_t load_io_ns_ = 0;              // when an I/O of a load last began or ended
    std::uint32_t ios_in_flight_[2] = {0, 0};  // payload, per direction
    Progress progress_[2];                     // the same
    std::int64_t progress_at_ns_[2] = {0, 0};  // counted up to then, while there is such I/O
    std::uint64_t store_bytes_in_flight_ = 0;
    std::atomic<std::int64_t> end_by_ns_ = time_never;
    std::int64_t expiry_next_ns_ = time_never;  // no deadline passes before it
    std::int64_t event_poll_at_ns_ = 0;
    std::int64_t event_poll_gap_ns_ = 0;
    std::int64_t device_poll_at_ns_ = 0;
    bool moved_ = false;  // this step's later half has made work for another step
    std::uint64_t store_rows_begun_ = 0;
    std::int64_t loads_seen_ns_ = INT64_MIN / 2;
    std::int64_t stepped_ns_ = 0;
    PipelineStats stats_;
};

}  // namespace kvdisk

// The control of the pipeline: the step, what starts, what ends. What happens to an extent at the
// disk is in pipeline_disk.cpp, what happens to it in memory in pipeline_memory.cpp.
#include "pipeline/pipeline.hpp"

#include <algorithm>
#include <cerrno>
#include <stdexcept>

#include "pipeline/canary.hpp"
#include "pipeline/check.hpp"

namespace kvdisk {

namespace {

constexpr std::int64_t event_poll_gap_first_ns = 20'000;
constexpr std::int64_t event_poll_gap_max_ns = 1'000'000;

// How often a device is asked whether it is done with the blocks of loads, and how long it may be
// at it beyond their deadlines before it counts as hung.
constexpr std::int64_t device_poll_gap_ns = 10'000'000;
constexpr std::int64_t device_patience_ns = 30'000'000'000;

}  // namespace

Pipeline::Pipeline(const PipelineOptions& options, Ring& ring, SlotRecords& records,
                   std::span<std::byte> record_staging, io::Backend& backend, Copier& copier,
                   const Clock& clock, std::uint64_t sequence_next, std::uint64_t sequence_step)
    : options_(options),
      ring_(ring),
      records_(records),
      record_staging_(record_staging),
      backend_(backend),
      copier_(copier),
      clock_(clock),
      extents_(ring.buffer_count()),
      extent_rows_(std::size_t{ring.buffer_count()} * options.rows_per_buffer),
      record_writes_(options.record_writes),
      slot_uses_(records.slot_count()),
      sequence_next_(sequence_next),
      sequence_step_(sequence_step) {
    KVDISK_CHECK(options.rows_per_buffer >= 1 && options.rows_per_buffer <= rows_per_buffer_max);
    KVDISK_CHECK(options.slot_bytes >= options.block_bytes && options.block_bytes > 0);
    KVDISK_CHECK(options.slot_bytes % options.alignment == 0);
    KVDISK_CHECK(options.slot_bytes * options.rows_per_buffer <= ring.buffer_bytes());
    KVDISK_CHECK(options.load_reserve < ring.buffer_count() && options.iodepth >= 1);
    KVDISK_CHECK(backend.depth() >= 2 * options.iodepth + options.record_writes);
    KVDISK_CHECK(copier.depth() >= extent_rows_.size());
    KVDISK_CHECK(record_staging.size() >= record_staging_bytes(options));
    released_slots_.reserve(extent_rows_.size());
}

// ---------------------------------------------------------------- the step

std::int64_t Pipeline::step() {
    std::int64_t now = clock_.now_ns();
    const RingCounts counts = ring_.counts();
    KVDISK_CHECK(counts.free + counts.used + counts.quarantined == ring_.buffer_count());
    if (stepped_ns_ != 0) {
        stats_.ring_used_ns +=
            static_cast<std::uint64_t>(now - stepped_ns_) * (counts.used + counts.quarantined);
    }
    stepped_ns_ = now;
    moved_ = false;
    for (const auto direction : {Direction::store, Direction::load})
        count_busy_time(direction, now);

    // First whatever keeps the disk busy: take what it has done, give it more.
    io::Completion completions[64];
    const std::size_t completed = backend_.reap(completions);
    for (std::size_t i = 0; i < completed; ++i) handle(completions[i], now);
    poll_devices(now);
    // Starting comes before ending: a store that may not wait is taken when there is a buffer.
    start_loads(now);
    start_stores(now);
    expire_due(now);
    wake_retries(now);
    issue(now);
    backend_.submit();

    // Then a bounded piece of the work that needs this core. Should the kernel have held this
    // thread up, rows whose time has passed end here, before anything more is copied for them.
    now = clock_.now_ns();
    expire_due(now);
    CopyCompletion copies[64];
    const std::size_t copied = copier_.reap(copies);
    if (copied > 0) now = clock_.now_ns();
    for (std::size_t i = 0; i < copied; ++i) handle_copy(copies[i], now);
    hash_some(now);

    if (completed == std::size(completions) || copied == std::size(copies)) moved_ = true;
    return next_time(now);
}

std::int64_t Pipeline::next_time(std::int64_t now) const noexcept {
    if (moved_ || copier_.busy() || list(Stage::hashing, Direction::store).size > 0 ||
        list(Stage::verifying, Direction::load).size > 0) {
        return now;
    }
    std::int64_t next = std::min(expiry_next_ns_, copier_.look_at_ns());
    if (const std::int64_t end_by_ns = end_by_ns_; now < end_by_ns)
        next = std::min(next, end_by_ns);
    if (!waiting_events_.empty()) next = std::min(next, event_poll_at_ns_);
    if (!devices_busy_.empty()) next = std::min(next, device_poll_at_ns_);
    for (const Direction direction : {Direction::store, Direction::load}) {
        for (std::uint32_t at = list(Stage::retrying, direction).head; at != none;) {
            next = std::min(next, extents_[at].retry_at_ns);
            at = extents_[at].next;
        }
    }
    for (const RecordWrite& write : record_writes_) {
        if (write.busy && write.io_id == 0) next = std::min(next, write.retry_at_ns);
    }
    // Once the throttle is off, only a completion makes room: a past time here would spin.
    if (list(Stage::ready, Direction::store).size > 0) {
        for (const std::int64_t lifts_ns :
             {store_limit_lifts_ns(), store_credit_counts_until_ns()}) {
            if (now < lifts_ns) next = std::min(next, lifts_ns);
        }
    }
    return next;
}

void Pipeline::submit(Transfer* transfer) {
    const auto rows = static_cast<std::uint32_t>(transfer->rows.size());
    KVDISK_CHECK(rows > 0);
    transfer->results.assign(rows, RowResult{});
    transfer->submitted_ns = clock_.now_ns();
    constexpr std::int64_t timeout_min_ns = 1'000'000;
    transfer->timeout_ns = std::max(timeout_min_ns, transfer->deadline_ns - transfer->submitted_ns);
    transfer->device_busy = transfer->direction == Direction::load && transfer->event != 0 &&
                            transfer->deadline_ns < time_never - device_patience_ns;
    transfer->next_row = 0;
    transfer->rows_open = rows;
    transfer->sources_open = transfer->direction == Direction::store ? rows : 0;
    ++transfers_open_;
    if (transfer->device_busy) {
        transfer->deadline_ns += device_patience_ns;
        devices_busy_.push(transfer);
        device_poll_at_ns_ = transfer->submitted_ns;
    }
    expiry_next_ns_ = std::min(expiry_next_ns_, transfer->deadline_ns);
    if (transfer->direction == Direction::load) {
        ++loads_open_;
        waiting_loads_.push(transfer);
        return;
    }
    if (transfer->event != 0) {
        waiting_events_.push(transfer);
        return;
    }
    expiry_next_ns_ = std::min(expiry_next_ns_, transfer->start_by_ns);
    waiting_stores_.push(transfer);
}

bool Pipeline::cancel_waiting(std::uint64_t transfer_id) {
    for (WaitingList* waiting : {&waiting_events_, &waiting_stores_}) {
        Transfer* before = nullptr;
        for (Transfer* at = waiting->front(); at != nullptr; before = at, at = at->next) {
            if (at->id != transfer_id) continue;
            waiting->remove_after(before);
            end_unstarted(*at, {.status = RowStatus::refused}, clock_.now_ns());
            return true;
        }
    }
    return false;
}

// ---------------------------------------------------------------- starting

void Pipeline::poll_events(std::int64_t now) {
    if (waiting_events_.empty() || now < event_poll_at_ns_) return;
    bool happened = false;
    Transfer* before = nullptr;
    for (Transfer* at = waiting_events_.front(); at != nullptr;) {
        Transfer* const next = at->next;
        Readiness readiness = copier_.poll_event(at->event);
        if (canary == 19) readiness = Readiness::ready;
        if (readiness == Readiness::pending) {
            before = at;
        } else {
            happened = true;
            waiting_events_.remove_after(before);
            if (readiness == Readiness::ready) {
                // Until now the device kept it waiting, not the disk.
                if (at->start_by_ns != time_never) at->start_by_ns += now - at->submitted_ns;
                expiry_next_ns_ = std::min(expiry_next_ns_, at->start_by_ns);
                waiting_stores_.push(at);
            } else {
                end_unstarted(*at, {.status = RowStatus::copy_failed, .error = EIO}, now);
            }
        }
        at = next;
    }
    event_poll_gap_ns_ = happened ? event_poll_gap_first_ns
                                  : std::clamp(2 * event_poll_gap_ns_, event_poll_gap_first_ns,
                                               event_poll_gap_max_ns);
    event_poll_at_ns_ = now + event_poll_gap_ns_;
}

// Moves the deadlines of loads whose blocks a device was at, once it is done with them.
void Pipeline::poll_devices(std::int64_t now) {
    if (devices_busy_.empty() || now < device_poll_at_ns_) return;
    Transfer* before = nullptr;
    for (Transfer* at = devices_busy_.front(); at != nullptr;) {
        Transfer* const next = at->next_busy;
        if (copier_.poll_event(at->event) == Readiness::pending) {
            before = at;
        } else {
            devices_busy_.remove_after(before);
            at->device_busy = false;
            at->deadline_ns = now + at->timeout_ns;
            expiry_next_ns_ = std::min(expiry_next_ns_, at->deadline_ns);
        }
        at = next;
    }
    device_poll_at_ns_ = now + device_poll_gap_ns;
}

void Pipeline::start_loads(std::int64_t now) {
    if (!waiting_loads_.empty()) loads_seen_ns_ = now;
    // A buffer taken before the disk's queue has a place for it would only wait there.
    while (!waiting_loads_.empty() && ring_.counts().free > 0 &&
           ios_in_flight(Direction::load) + list(Stage::ready, Direction::load).size <
               options_.iodepth) {
        start_next(waiting_loads_, now);
    }
}

void Pipeline::start_stores(std::int64_t now) {
    poll_events(now);
    while (!waiting_stores_.empty() && ring_.counts().free > options_.load_reserve) {
        start_next(waiting_stores_, now);
    }
}

// Starts the next run of rows of the first waiting transfer, or ends its next row if that cannot
// start.
void Pipeline::start_next(WaitingList& waiting, std::int64_t now) {
    Transfer& transfer = *waiting.front();
    const std::uint32_t row = transfer.next_row;
    const RowStatus status = startable(transfer, transfer.rows[row]);
    const std::uint32_t row_count = status == RowStatus::ok ? run_length(transfer) : 1;
    transfer.next_row += row_count;
    if (transfer.direction == Direction::store) store_rows_begun_ += row_count;
    if (transfer.next_row == transfer.rows.size()) waiting.pop();
    if (status == RowStatus::ok) {
        start_extent(*ring_.acquire(), transfer, row, row_count);
    } else {
        if (transfer.direction == Direction::store) free_sources(transfer, 1);
        end_row(transfer, row, {.status = status}, now);
    }
}

RowStatus Pipeline::startable(const Transfer& transfer, const Row& row) const noexcept {
    const std::uint16_t use = slot_uses_[row.slot] & static_cast<std::uint16_t>(~slot_told);
    if (canary == 8 && use != slot_uses_[row.slot]) return RowStatus::ok;
    if (transfer.direction == Direction::store) return use == 0 ? RowStatus::ok : RowStatus::busy;
    if (use == slot_storing || use == slot_storing - 1) return RowStatus::busy;
    if (canary == 9 && records_.occupied(row.slot)) return RowStatus::ok;
    return record_holds(records_.at(row.slot), row.key) ? RowStatus::ok : RowStatus::miss;
}

bool Pipeline::goes_direct(const Transfer& transfer) const noexcept {
    return transfer.direction == Direction::store ? options_.direct_stores : options_.direct_loads;
}

// How many rows from the next one on lie in neighbouring slots and fit one buffer (and, on the
// direct path, in neighbouring blocks).
std::uint32_t Pipeline::run_length(const Transfer& transfer) const noexcept {
    const bool direct = goes_direct(transfer);
    const std::uint32_t first = transfer.next_row;
    const auto end = static_cast<std::uint32_t>(
        std::min<std::size_t>(transfer.rows.size(), first + options_.rows_per_buffer));
    std::uint32_t row = first + 1;
    while (row < end) {
        const Row& previous = transfer.rows[row - 1];
        const Row& next = transfer.rows[row];
        if (next.slot != previous.slot + 1) break;
        if (direct && (next.block_id != previous.block_id + 1 ||
                       options_.direct_region.block_stride_bytes != options_.slot_bytes)) {
            break;
        }
        if (startable(transfer, next) != RowStatus::ok) break;
        ++row;
    }
    return row - first;
}

void Pipeline::start_extent(std::uint32_t index, Transfer& transfer, std::uint32_t row,
                            std::uint32_t row_count) {
    Extent& extent = extents_[index];
    KVDISK_CHECK(extent.stage == Stage::free);
    extent = Extent{};
    extent.transfer = &transfer;
    extent.direction = transfer.direction;
    extent.first_row = row;
    extent.row_count = row_count;
    extent.slot = transfer.rows[row].slot;
    extent.serial = ++serial_last_;
    extent.direct = goes_direct(transfer);
    extent.source_held = transfer.direction == Direction::store;
    extent.data = extent.direct
                      ? options_.direct_region.base +
                            transfer.rows[row].block_id * options_.direct_region.block_stride_bytes
                      : ring_.data(index);
    for (std::uint32_t i = 0; i < row_count; ++i) prepare_row(extent, row_of(index, i), i);
    if (transfer.direction == Direction::load) {
        enter(index, Stage::ready);
    } else if (extent.direct) {
        enter(index, Stage::hashing);
    } else {
        enter(index, Stage::gathering);
        start_copies(index, CopyDirection::gather);
        if (canary == 7) {
            extent.source_held = false;
            free_sources(transfer, row_count);
        }
    }
}

void Pipeline::prepare_row(Extent& extent, ExtentRow& prepared, std::uint32_t row) {
    const std::uint64_t slot = extent.slot + row;
    prepared = ExtentRow{};
    if (extent.direction == Direction::load) {
        ++slot_uses_[slot];
        return;
    }
    slot_uses_[slot] = static_cast<std::uint16_t>((slot_uses_[slot] & slot_told) | slot_storing);
    if (canary != 11) records_.clear(slot);
    prepared.sequence = next_sequence();
    if (!extent.direct) {
        std::byte* const end = extent.data + (row + 1) * options_.slot_bytes;
        const std::uint64_t padding_bytes = options_.slot_bytes - options_.block_bytes;
        std::fill(end - padding_bytes, end, std::byte{0});
    }
}

// Grows with every store, and with time, so that numbers of other pipelines compare; each pipeline
// has its own remainder, so that no two give the same.
std::uint64_t Pipeline::next_sequence() noexcept {
    const auto wall_ns = static_cast<std::uint64_t>(stepped_ns_ + options_.wall_clock_ns);
    if (wall_ns > sequence_next_) {
        sequence_next_ = wall_ns - wall_ns % sequence_step_ + sequence_next_ % sequence_step_;
    }
    const std::uint64_t sequence = sequence_next_;
    sequence_next_ += sequence_step_;
    return sequence;
}

void Pipeline::start_copies(std::uint32_t index, CopyDirection direction) {
    Extent& extent = extents_[index];
    for (std::uint32_t i = 0; i < extent.row_count; ++i) {
        ExtentRow& row = row_of(index, i);
        if (row.result.status != RowStatus::pending) continue;
        row.copying = true;
        ++extent.copies_pending;
        copier_.start({.id = copy_id(extent.serial, index, i),
                       .block_id = extent.transfer->rows[extent.first_row + i].block_id,
                       .buffer = extent.data + i * options_.slot_bytes,
                       .direction = direction,
                       .seed = copier_.hashes() ? seed_of(index, i) : 0,
                       .event = direction == CopyDirection::scatter ? extent.transfer->event : 0});
    }
}

}  // namespace kvdisk

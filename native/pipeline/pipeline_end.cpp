// How rows end: done, failed, past their deadline, or quarantined; and the recount that proves that
// nothing was lost on the way.
#include <algorithm>
#include <cerrno>

#include "pipeline/canary.hpp"
#include "pipeline/check.hpp"
#include "pipeline/pipeline.hpp"

namespace kvdisk {

void Pipeline::end_overdue() {
    const std::int64_t now = clock_.now_ns();
    poll_devices(now);
    expire_due(now);
}

void Pipeline::expire_due(std::int64_t now) {
    const std::int64_t end_by_ns = end_by_ns_;
    if (now >= std::min(expiry_next_ns_, end_by_ns)) {
        expire(now >= end_by_ns ? time_never : now);
    }
}

// Ends what had to be done by `due`; time_never ends everything.
void Pipeline::expire(std::int64_t due) {
    expiry_next_ns_ = time_never;
    for (WaitingList* waiting : {&waiting_loads_, &waiting_stores_, &waiting_events_}) {
        expire_waiting(*waiting, due);
    }
    for (std::uint32_t index = 0; index < extents_.size(); ++index) {
        const Extent& extent = extents_[index];
        if (extent.stage == Stage::free || extent.ended || extent.expired) continue;
        if (extent.transfer->deadline_ns <= due) {
            expire_extent(index, due);
        } else {
            expiry_next_ns_ = std::min(expiry_next_ns_, extent.transfer->deadline_ns);
        }
    }
}

void Pipeline::expire_waiting(WaitingList& waiting, std::int64_t due) {
    const bool wait_for_buffers = &waiting == &waiting_stores_;
    Transfer* before = nullptr;
    for (Transfer* at = waiting.front(); at != nullptr;) {
        Transfer* const next = at->next;
        const bool late = at->deadline_ns <= due;
        const std::int64_t start_by_ns = wait_for_buffers ? at->start_by_ns : time_never;
        if (late || start_by_ns <= due) {
            waiting.remove_after(before);
            end_unstarted(*at, {.status = late ? RowStatus::timed_out : RowStatus::refused}, due);
        } else {
            expiry_next_ns_ = std::min({expiry_next_ns_, at->deadline_ns, start_by_ns});
            before = at;
        }
        at = next;
    }
}

// Ends the rows that no extent has taken up. The transfer has left its waiting list.
void Pipeline::end_unstarted(Transfer& transfer, RowResult result, std::int64_t now) {
    const auto rows = static_cast<std::uint32_t>(transfer.rows.size());
    const std::uint32_t first = transfer.next_row;
    transfer.next_row = rows;
    if (transfer.direction == Direction::store) {
        store_rows_begun_ += rows - first;
        free_sources(transfer, rows - first);
    }
    for (std::uint32_t row = first; row < rows; ++row) end_row(transfer, row, result, now);
}

// Ends an extent's rows at their deadline, whatever it is doing.
void Pipeline::expire_extent(std::uint32_t index, std::int64_t now) {
    Extent& extent = extents_[index];
    if (extent.io_id != 0) {
        if (canary == 17 && extent.direction == Direction::load) return;
        if (extent.direct && extent.direction == Direction::load) {
            extent.expired = true;  // the kernel may still write into the block: the row must wait
        } else {
            quarantine_extent(index, now);
        }
        return;
    }
    for (std::uint32_t i = 0; extent.copies_pending > 0 && i < extent.row_count; ++i) {
        ExtentRow& row = row_of(index, i);
        if (row.copying && (copier_.cancel(copy_id(extent.serial, index, i)) || canary == 14)) {
            row.copying = false;
            --extent.copies_pending;
        }
    }
    if (extent.copies_pending > 0) {
        extent.expired = true;  // the copier still touches the block: the row must wait
    } else {
        finish_extent(index, {.status = RowStatus::timed_out}, now);
    }
}

// The rows end, but the kernel still has the buffer: keep it and the slots away from everyone until
// the completion arrives.
void Pipeline::quarantine_extent(std::uint32_t index, std::int64_t now) {
    Extent& extent = extents_[index];
    Transfer& transfer = *extent.transfer;
    extent.ended = true;
    extent.transfer = nullptr;
    ring_.quarantine(index);
    for (std::uint32_t i = 0; i < extent.row_count; ++i) slot_uses_[extent.slot + i] |= slot_told;
    if (extent.source_held) free_sources(transfer, extent.row_count);
    extent.source_held = false;
    for (std::uint32_t i = 0; i < extent.row_count; ++i) {
        RowResult result = row_of(index, i).result;
        if (result.status == RowStatus::pending) result.status = RowStatus::timed_out;
        result.quarantined = true;
        end_row(transfer, extent.first_row + i, result, now);
    }
    if (canary == 3) {
        extent.io_id = 0;
        --ios_in_flight(extent.direction);
        if (extent.direction == Direction::store) store_bytes_in_flight_ -= extent.io_bytes;
        vacate(index);
    }
}

// Ends an extent and its rows; those without a result yet get `unresolved`.
void Pipeline::finish_extent(std::uint32_t index, RowResult unresolved, std::int64_t now) {
    Extent& extent = extents_[index];
    KVDISK_CHECK(extent.io_id == 0 && extent.copies_pending == 0 && !extent.ended);
    Transfer& transfer = *extent.transfer;
    const std::uint32_t first_row = extent.first_row;
    const std::uint32_t row_count = extent.row_count;
    for (std::uint32_t i = 0; i < row_count; ++i) {
        RowResult& result = row_of(index, i).result;
        if (result.status == RowStatus::pending) result = unresolved;
        const bool stored = result.status == RowStatus::ok;
        if (extent.direction == Direction::store && !stored) records_.clear(extent.slot + i);
    }
    if (extent.source_held) free_sources(transfer, row_count);
    vacate(index);
    for (std::uint32_t i = 0; i < row_count; ++i) {
        end_row(transfer, first_row + i, row_of(index, i).result, now);
        if (canary == 10) end_row(transfer, first_row + i, row_of(index, i).result, now);
    }
}

// Whether every row of an extent has its result already, so that nothing more need be done for it.
bool Pipeline::all_rows_known(std::uint32_t index) const noexcept {
    const ExtentRow* const rows = &extent_rows_[std::size_t{index} * options_.rows_per_buffer];
    return std::none_of(rows, rows + extents_[index].row_count, [](const ExtentRow& row) {
        return row.result.status == RowStatus::pending;
    });
}

// Gives back an extent's buffer and slots.
void Pipeline::vacate(std::uint32_t index) {
    Extent& extent = extents_[index];
    for (std::uint32_t i = 0; i < extent.row_count; ++i) {
        std::uint16_t& use = slot_uses_[extent.slot + i];
        const std::uint16_t told = use & slot_told;
        use = extent.direction == Direction::store ? told : static_cast<std::uint16_t>(use - 1);
        if (use == slot_told) {
            use = 0;
            released_slots_.push_back(extent.slot + i);
        }
    }
    leave(index);
    extent.stage = Stage::free;
    extent.transfer = nullptr;
    extent.serial = 0;
    const bool failed = row_of(index, 0).result.status == RowStatus::failed;
    if (canary != 18 || !failed) ring_.release(index);
    moved_ = true;
}

void Pipeline::end_row(Transfer& transfer, std::uint32_t row, RowResult result, std::int64_t now) {
    KVDISK_CHECK(transfer.results[row].status == RowStatus::pending && transfer.rows_open > 0);
    KVDISK_CHECK(result.status != RowStatus::pending);
    transfer.results[row] = result;
    count_row(transfer, result, now);
    if (--transfer.rows_open == 0) {
        KVDISK_CHECK(transfer.sources_open == 0);
        --transfers_open_;
        if (transfer.device_busy) devices_busy_.remove(&transfer);
        if (transfer.direction == Direction::load) {
            if (--loads_open_ == 0) store_credit_bytes_ = 0;
        }
        finished_.push(&transfer);
    }
}

void Pipeline::count_busy_time(Direction direction, std::int64_t now) noexcept {
    if (ios_in_flight(direction) == 0) return;
    std::int64_t& counted_to_ns = progress_at_ns_[static_cast<std::size_t>(direction)];
    progress_[static_cast<std::size_t>(direction)].busy_ns +=
        static_cast<std::uint64_t>(std::max<std::int64_t>(0, now - counted_to_ns));
    counted_to_ns = std::max(counted_to_ns, now);
}

Progress Pipeline::progress(Direction direction) const noexcept {
    Progress progress = progress_[static_cast<std::size_t>(direction)];
    progress.busy = ios_in_flight_[static_cast<std::size_t>(direction)] > 0;
    return progress;
}

void Pipeline::count_row(const Transfer& transfer, RowResult result, std::int64_t now) {
    const bool load = transfer.direction == Direction::load;
    switch (result.status) {
        case RowStatus::ok:
            ++(load ? stats_.rows_loaded : stats_.rows_stored);
            (load ? stats_.bytes_loaded : stats_.bytes_stored) += options_.block_bytes;
            if (load) {
                store_credit_bytes_ += static_cast<std::int64_t>(
                    options_.block_bytes / options_.load_bytes_per_store_byte);
            }
            (load ? stats_.load_row_ns : stats_.store_row_ns)
                .record(static_cast<std::uint64_t>(now - transfer.submitted_ns));
            break;
        case RowStatus::miss:
            ++stats_.rows_missed;
            break;
        case RowStatus::corrupt:
            ++stats_.rows_corrupt;
            break;
        case RowStatus::failed:
        case RowStatus::copy_failed:
            ++stats_.rows_failed;
            break;
        case RowStatus::timed_out:
            ++stats_.rows_timed_out;
            break;
        case RowStatus::refused:
            ++stats_.rows_refused;
            break;
        case RowStatus::busy:
            ++stats_.rows_busy;
            break;
        case RowStatus::pending:
            break;
    }
}

void Pipeline::free_sources(Transfer& transfer, std::uint32_t count) {
    KVDISK_CHECK(transfer.sources_open >= count);
    transfer.sources_open -= count;
    if (count > 0 && transfer.sources_open == 0) source_free_.push(&transfer);
}

bool Pipeline::idle() const noexcept {
    return transfers_open_ == 0 && quarantined() == 0 &&
           std::ranges::none_of(record_writes_, &RecordWrite::busy);
}

bool Pipeline::recount() const {
    std::uint32_t in_use = 0, ended = 0, ios[2] = {0, 0};
    std::uint64_t store_bytes = 0;
    std::vector<std::uint16_t> uses(slot_uses_.size());
    for (const Extent& extent : extents_) {
        if (extent.stage == Stage::free) continue;
        ++in_use;
        if (extent.ended) ++ended;
        if (extent.io_id != 0) ++ios[static_cast<std::size_t>(extent.direction)];
        if (extent.io_id != 0 && extent.direction == Direction::store) {
            store_bytes += extent.io_bytes;
        }
        for (std::uint32_t i = 0; i < extent.row_count; ++i) {
            std::uint16_t& use = uses[extent.slot + i];
            use = extent.direction == Direction::store ? slot_storing
                                                       : static_cast<std::uint16_t>(use + 1);
        }
    }
    std::uint32_t listed = 0;
    for (const auto& lists : lists_) listed += lists[0].size + lists[1].size;
    const auto same_use = [](std::uint16_t counted, std::uint16_t kept) {
        return counted == (kept & ~slot_told) && (counted != 0 || kept == 0);
    };
    const RingCounts counts = ring_.counts();
    return ring_.recount() && counts.used + counts.quarantined == in_use &&
           counts.quarantined == ended && listed == in_use && ios[0] == ios_in_flight_[0] &&
           ios[1] == ios_in_flight_[1] && store_bytes == store_bytes_in_flight_ &&
           std::ranges::equal(uses, slot_uses_, same_use);
}

}  // namespace kvdisk

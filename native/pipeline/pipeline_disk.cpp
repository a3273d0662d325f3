// The pipeline at the disk: payload I/Os, their short and failed answers, and the record pages that
// follow a stored payload.
#include <algorithm>
#include <cerrno>

#include "io/transient.hpp"
#include "pipeline/canary.hpp"
#include "pipeline/check.hpp"
#include "pipeline/pipeline.hpp"

namespace kvdisk {

namespace {

constexpr std::uint8_t resumes_max = 16;  // of one I/O that keeps coming back short
constexpr std::uint8_t retries_max = 8;   // of one I/O that keeps meeting a transient answer
constexpr std::int64_t retry_gap_first_ns = 100'000;

std::int64_t retry_time(std::int64_t now, std::uint8_t retries) noexcept {
    return now + (retry_gap_first_ns << retries);
}

}  // namespace

// ---------------------------------------------------------------- lists

void Pipeline::enter(std::uint32_t index, Stage stage) noexcept {
    leave(index);
    Extent& extent = extents_[index];
    extent.stage = stage;
    ExtentList& entered = list(stage, extent.direction);
    extent.previous = entered.tail;
    extent.next = none;
    (entered.tail == none ? entered.head : extents_[entered.tail].next) = index;
    entered.tail = index;
    ++entered.size;
}

void Pipeline::leave(std::uint32_t index) noexcept {
    Extent& extent = extents_[index];
    if (extent.stage == Stage::free) return;
    ExtentList& left = list(extent.stage, extent.direction);
    (extent.previous == none ? left.head : extents_[extent.previous].next) = extent.next;
    (extent.next == none ? left.tail : extents_[extent.next].previous) = extent.previous;
    --left.size;
}

// ---------------------------------------------------------------- what the disk has done

// The id that a planted bug takes a completion for.
std::uint64_t Pipeline::planted_id(std::uint64_t id) const noexcept {
    if ((id & record_id_bit) != 0) return id;
    const std::uint64_t index = id & (record_id_bit - 1);
    if (canary == 12 && index < extents_.size()) return extents_[index].io_id;
    if (canary != 5) return id;
    const ExtentList& loads = list(Stage::in_io, Direction::load);
    const ExtentList& stores = list(Stage::in_io, Direction::store);
    const std::uint32_t first = loads.size > 0 ? loads.head : stores.head;
    return first == none ? 0 : extents_[first].io_id;
}

void Pipeline::handle(const io::Completion& completion, std::int64_t now) {
    const std::uint64_t id = canary == 0 ? completion.id : planted_id(completion.id);
    const auto index = static_cast<std::uint32_t>(id & (record_id_bit - 1));
    if (id == 0) {
        // Nobody's: an extent without I/O has this id, too.
    } else if ((id & record_id_bit) != 0) {
        if (index < record_writes_.size() && record_writes_[index].io_id == id) {
            record_writes_[index].io_id = 0;
            handle_record(record_writes_[index], completion.result, now);
            return;
        }
    } else if (index < extents_.size() && extents_[index].io_id == id) {
        extents_[index].io_id = 0;
        handle_payload(index, completion.result, now);
        return;
    }
    ++stats_.unknown_completions;
}

void Pipeline::handle_payload(std::uint32_t index, std::int64_t result, std::int64_t now) {
    Extent& extent = extents_[index];
    const bool load = extent.direction == Direction::load;
    count_busy_time(extent.direction, now);
    progress_[static_cast<std::size_t>(extent.direction)].bytes +=
        static_cast<std::uint64_t>(std::max<std::int64_t>(0, result));
    if (load) {
        loads_seen_ns_ = load_io_ns_ = now;
    } else {
        store_bytes_in_flight_ -= extent.io_bytes;
    }
    --ios_in_flight(extent.direction);
    (load ? stats_.load_io_ns : stats_.store_io_ns)
        .record(static_cast<std::uint64_t>(now - extent.io_started_ns));
    if (extent.ended) {
        ++stats_.late_completions;
        vacate(index);
        return;
    }
    if (extent.expired) {
        finish_extent(index, {.status = RowStatus::timed_out}, now);
        return;
    }
    if (result < 0 || static_cast<std::uint64_t>(result) > extent.io_bytes) {
        const int error = result < 0 ? static_cast<int>(-result) : EIO;
        if (io::transient(error) && extent.retries < retries_max) {
            ++stats_.ios_retried;
            extent.retry_at_ns = retry_time(now, extent.retries++);
            enter(index, Stage::retrying);
        } else {
            payload_failed(index, error, now);
        }
        return;
    }
    const auto moved_bytes = static_cast<std::uint64_t>(result);
    const bool trusting = (canary == 1 || (canary == 2 && extent.resumes > 0)) && moved_bytes > 0;
    if (moved_bytes == extent.io_bytes || trusting) {
        extent.done_bytes += trusting ? extent.io_bytes : moved_bytes;
        payload_moved(index, now);
        return;
    }
    // Short: go on from the last whole unit, but not for ever and not from the end of the file.
    ++(load ? stats_.load_ios_short : stats_.store_ios_short);
    extent.done_bytes += moved_bytes - moved_bytes % options_.alignment;
    if (moved_bytes == 0 || extent.resumes == resumes_max) {
        payload_failed(index, EIO, now);
    } else {
        ++extent.resumes;
        enter(index, Stage::ready);
    }
}

// Where the extent's current I/O ends: at the end of the extent, or of the row after an error.
std::uint64_t Pipeline::io_end(const Extent& extent) const noexcept {
    const std::uint64_t total_bytes = extent.row_count * options_.slot_bytes;
    if (!extent.split) return total_bytes;
    return (extent.done_bytes / options_.slot_bytes + 1) * options_.slot_bytes;
}

std::uint64_t Pipeline::io_left_bytes(const Extent& extent) const noexcept {
    return io_end(extent) - extent.done_bytes;
}

void Pipeline::payload_failed(std::uint32_t index, int error, std::int64_t now) {
    Extent& extent = extents_[index];
    const std::uint64_t row = extent.done_bytes / options_.slot_bytes;
    if (extent.row_count > 1 && !extent.split) {
        // One bad row must not take its neighbours along: go on row by row.
        ++stats_.ios_split;
        extent.split = true;
        extent.done_bytes = row * options_.slot_bytes;
    } else {
        RowResult& result = row_of(index, static_cast<std::uint32_t>(row)).result;
        if (result.status == RowStatus::pending && canary != 16) {
            result = {.status = RowStatus::failed, .error = error};
        }
        extent.done_bytes = (row + 1) * options_.slot_bytes;
    }
    payload_moved(index, now);
}

// `done_bytes` has reached the end of an I/O: the next row of a split extent, or the next stage.
void Pipeline::payload_moved(std::uint32_t index, std::int64_t now) {
    Extent& extent = extents_[index];
    extent.resumes = 0;
    extent.retries = 0;
    if (extent.done_bytes < extent.row_count * options_.slot_bytes) {
        enter(index, Stage::ready);
        return;
    }
    if (all_rows_known(index)) {
        finish_extent(index, {}, now);
    } else if (extent.direction == Direction::load) {
        verify(index, now);
    } else {
        commit_records(index, now);
    }
}

// ---------------------------------------------------------------- giving the disk work

// While loads are about, few bytes of stores are in flight, so that a load waits behind little.
// What is in flight when a load comes was sent before, so the limit holds between loads, too.
bool Pipeline::store_has_place(std::uint64_t io_bytes, std::int64_t now) const noexcept {
    if (ios_in_flight_[static_cast<std::size_t>(Direction::store)] >= options_.iodepth)
        return false;
    if (now < store_credit_counts_until_ns() && store_credit_bytes_ <= 0) return false;
    return now >= store_limit_lifts_ns() ||
           store_bytes_in_flight_ + io_bytes <=
               options_.store_depth_beside_loads * ring_.buffer_bytes();
}

std::int64_t Pipeline::store_credit_counts_until_ns() const noexcept {
    return loads_open_ > 0 ? load_io_ns_ + options_.loads_get_on_ns : 0;
}

std::int64_t Pipeline::store_limit_lifts_ns() const noexcept {
    return loads_seen_ns_ + options_.loads_linger_ns;
}

void Pipeline::wake_retries(std::int64_t now) {
    for (const Direction direction : {Direction::load, Direction::store}) {
        for (std::uint32_t at = list(Stage::retrying, direction).head; at != none;) {
            const std::uint32_t next = extents_[at].next;
            if (extents_[at].retry_at_ns <= now) enter(at, Stage::ready);
            at = next;
        }
    }
}

void Pipeline::issue(std::int64_t now) {
    const ExtentList& loads = list(Stage::ready, Direction::load);
    while (loads.size > 0 && ios_in_flight(Direction::load) < options_.iodepth) {
        push_payload(loads.head, now);
    }
    const ExtentList& stores = list(Stage::ready, Direction::store);
    while (stores.size > 0 && store_has_place(io_left_bytes(extents_[stores.head]), now)) {
        push_payload(stores.head, now);
    }
    issue_records(now);
}

void Pipeline::push_payload(std::uint32_t index, std::int64_t now) {
    Extent& extent = extents_[index];
    const bool load = extent.direction == Direction::load;
    extent.io_id = next_io_id(index);
    extent.io_bytes = io_left_bytes(extent);
    extent.io_started_ns = now;
    if (ios_in_flight(extent.direction) == 0) {
        progress_at_ns_[static_cast<std::size_t>(extent.direction)] = now;
    }
    if (load) {
        load_io_ns_ = now;
    } else {
        store_bytes_in_flight_ += extent.io_bytes;
        if (now < store_credit_counts_until_ns()) {
            store_credit_bytes_ -= static_cast<std::int64_t>(extent.io_bytes);
        }
    }
    backend_.push(
        {.id = extent.io_id,
         .offset = extent.slot * options_.slot_bytes + extent.done_bytes,
         .data = extent.data + (canary == 15 ? 0 : extent.done_bytes),
         .length = static_cast<std::uint32_t>(extent.io_bytes),
         .file = options_.data_file,
         .area = extent.direct ? direct_area_of(extent.data, io_end(extent)) : ring_.area_of(index),
         .op = load ? io::Op::read : io::Op::write,
         .priority = load ? io::Priority::high : io::Priority::low});
    ++ios_in_flight(extent.direction);
    ++stats_.ios;
    if (extent.row_count > 1 && !extent.split) ++stats_.ios_merged;
    enter(index, Stage::in_io);
}

std::uint16_t Pipeline::direct_area_of(const std::byte* data, std::uint64_t bytes) const noexcept {
    for (std::size_t i = 0; i < options_.direct_areas.size(); ++i) {
        const std::span<std::byte> area = options_.direct_areas[i];
        if (data >= area.data() && data + bytes <= area.data() + area.size()) {
            return static_cast<std::uint16_t>(options_.direct_area_first + i);
        }
    }
    return io::area_none;
}

// ---------------------------------------------------------------- records

// Makes the records of an extent's good rows visible to loads.
void Pipeline::publish(std::uint32_t index) {
    const Extent& extent = extents_[index];
    for (std::uint32_t i = 0; i < extent.row_count; ++i) {
        const ExtentRow& row = row_of(index, i);
        if (row.result.status != RowStatus::pending) continue;
        records_.set(make_record(extent.transfer->rows[extent.first_row + i].key, extent.slot + i,
                                 row.sequence, records_.epoch(), options_.block_bytes,
                                 row.checksum));
    }
}

// The payloads are on the disk whole: publish their records, then write the pages they are in.
void Pipeline::commit_records(std::uint32_t index, std::int64_t now) {
    Extent& extent = extents_[index];
    publish(index);
    if (record_writes_.empty() || canary == 20) {
        finish_extent(index, {.status = RowStatus::ok}, now);
        return;
    }
    extent.page_first = SlotRecords::page_of(extent.slot);
    extent.page_wait[0] = PageWait::dirty;
    if (SlotRecords::page_of(extent.slot + extent.row_count - 1) != extent.page_first) {
        extent.page_wait[1] = PageWait::dirty;
    }
    enter(index, Stage::recording);
}

void Pipeline::issue_records(std::int64_t now) {
    for (std::uint32_t i = 0; i < record_writes_.size(); ++i) {
        RecordWrite& write = record_writes_[i];
        if (write.busy && write.io_id == 0 && write.retry_at_ns <= now) push_record(i);
    }
    for (std::uint32_t at = list(Stage::recording, Direction::store).head; at != none;
         at = extents_[at].next) {
        for (std::uint64_t side = 0; side < 2; ++side) {
            if (extents_[at].page_wait[side] == PageWait::dirty) {
                begin_record(extents_[at].page_first + side);
            }
        }
    }
}

// Writes a page unless it is being written already (then its turn comes when that has ended: two
// writes of one page in flight could land in either order) or no write is free. One write serves
// all that wait.
void Pipeline::begin_record(std::uint64_t page) {
    RecordWrite* unused = nullptr;
    for (RecordWrite& write : record_writes_) {
        if (write.busy && write.page == page && canary != 13) return;
        if (!write.busy && unused == nullptr) unused = &write;
    }
    if (unused == nullptr) return;
    const auto index = static_cast<std::uint32_t>(unused - record_writes_.data());
    *unused = RecordWrite{.busy = true, .page = page};
    records_.copy_page(
        page, record_staging_.subspan(index * record_page_bytes).first<record_page_bytes>());
    for (std::uint32_t at = list(Stage::recording, Direction::store).head; at != none;
         at = extents_[at].next) {
        for (std::uint64_t side = 0; side < 2; ++side) {
            PageWait& wait = extents_[at].page_wait[side];
            if (wait == PageWait::dirty && extents_[at].page_first + side == page) {
                wait = PageWait::writing;
            }
        }
    }
    push_record(index);
}

void Pipeline::push_record(std::uint32_t index) {
    RecordWrite& write = record_writes_[index];
    write.io_id = next_io_id(record_id_bit | index);
    write.io_bytes = record_page_bytes - write.done_bytes;
    backend_.push(
        {.id = write.io_id,
         .offset = options_.record_offset + write.page * record_page_bytes + write.done_bytes,
         .data = record_staging_.data() + index * record_page_bytes + write.done_bytes,
         .length = static_cast<std::uint32_t>(write.io_bytes),
         .file = options_.record_file,
         .area = options_.record_area,
         .op = io::Op::write,
         .priority = io::Priority::low});
    ++stats_.record_ios;
}

void Pipeline::handle_record(RecordWrite& write, std::int64_t result, std::int64_t now) {
    int error = 0;
    if (result < 0 || static_cast<std::uint64_t>(result) > write.io_bytes) {
        error = result < 0 ? static_cast<int>(-result) : EIO;
        if (io::transient(error) && write.retries < retries_max) {
            ++stats_.ios_retried;
            write.retry_at_ns = retry_time(now, write.retries++);
            return;
        }
    } else if (static_cast<std::uint64_t>(result) < write.io_bytes) {
        ++stats_.store_ios_short;
        const auto moved_bytes = static_cast<std::uint64_t>(result);
        write.done_bytes += moved_bytes - moved_bytes % options_.alignment;
        if (moved_bytes > 0 && write.resumes < resumes_max) {
            ++write.resumes;
            write.retry_at_ns = now;
            return;
        }
        error = EIO;
    }
    write.busy = false;
    record_written(write.page, error, now);
}

// A page write has ended: whoever waited for it goes on.
void Pipeline::record_written(std::uint64_t page, int error, std::int64_t now) {
    for (std::uint32_t at = list(Stage::recording, Direction::store).head; at != none;) {
        Extent& extent = extents_[at];
        const std::uint32_t next = extent.next;
        for (std::uint64_t side = 0; side < 2; ++side) {
            if (extent.page_wait[side] != PageWait::writing || extent.page_first + side != page) {
                continue;
            }
            extent.page_wait[side] = PageWait::nothing;
            if (error != 0) fail_unrecorded(at, page, error);
        }
        if (extent.page_wait[0] == PageWait::nothing && extent.page_wait[1] == PageWait::nothing) {
            finish_extent(at, {.status = RowStatus::ok}, now);
        }
        at = next;
    }
}

void Pipeline::fail_unrecorded(std::uint32_t index, std::uint64_t page, int error) {
    for (std::uint32_t i = 0; i < extents_[index].row_count; ++i) {
        RowResult& result = row_of(index, i).result;
        if (result.status == RowStatus::pending &&
            SlotRecords::page_of(extents_[index].slot + i) == page) {
            result = {.status = RowStatus::failed, .error = error};
        }
    }
}

}  // namespace kvdisk

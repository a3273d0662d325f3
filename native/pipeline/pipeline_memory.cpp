// The pipeline in memory: copies between blocks and buffers, and checksums, each in bounded pieces
// so that the disk is looked after in between.
#include <algorithm>
#include <cerrno>

#include "pipeline/canary.hpp"
#include "pipeline/check.hpp"
#include "pipeline/pipeline.hpp"

namespace kvdisk {

namespace {

// One step hashes at most this much: about 20 us at 10 GB/s, small beside an I/O of its size.
constexpr std::uint64_t hash_step_bytes = 256 * 1024;

}  // namespace

void Pipeline::handle_copy(const CopyCompletion& completion, std::int64_t now) {
    const auto index = static_cast<std::uint32_t>(completion.id >> 6 & 0xFFFF);
    const auto row = static_cast<std::uint32_t>(completion.id & 0x3F);
    if (index >= extents_.size() || row >= extents_[index].row_count ||
        completion.id != copy_id(extents_[index].serial, index, row) ||
        !row_of(index, row).copying) {
        ++stats_.unknown_completions;
        return;
    }
    Extent& extent = extents_[index];
    row_of(index, row).copying = false;
    --extent.copies_pending;
    if (completion.error != 0) {
        row_of(index, row).result = {.status = RowStatus::copy_failed, .error = completion.error};
    } else if (copier_.hashes()) {
        take_checksum(index, row, completion.checksum);
    }
    moved_ = true;
    if (extent.copies_pending == 0) copies_done(index, now);
}

void Pipeline::copies_done(std::uint32_t index, std::int64_t now) {
    Extent& extent = extents_[index];
    if (extent.expired) {
        finish_extent(index, {.status = RowStatus::timed_out}, now);
    } else if (extent.stage == Stage::scattering) {
        finish_extent(index, {.status = RowStatus::ok}, now);
    } else {
        if (canary != 7) free_sources(*extent.transfer, extent.row_count);
        extent.source_held = false;
        if (copier_.hashes()) {
            hashed(index, now);
        } else {
            enter(index, Stage::hashing);
        }
    }
}

// Loads whose bytes are in the buffer. A copier that hashes moves them to the block while it finds
// out whether they are the right ones: a row that is not ok leaves its block's content undefined.
void Pipeline::verify(std::uint32_t index, std::int64_t now) {
    Extent& extent = extents_[index];
    if (extent.direct || !copier_.hashes()) {
        enter(index, Stage::verifying);
        return;
    }
    for (std::uint32_t i = 0; i < extent.row_count; ++i) find_record(index, i);
    if (all_rows_known(index)) {
        finish_extent(index, {}, now);
    } else {
        enter(index, Stage::scattering);
        start_copies(index, CopyDirection::scatter);
    }
}

// Hashes a bounded piece of the first extent that waits for it; loads first.
void Pipeline::hash_some(std::int64_t now) {
    const std::uint32_t loads = list(Stage::verifying, Direction::load).head;
    const std::uint32_t index = loads != none ? loads : list(Stage::hashing, Direction::store).head;
    if (index == none) return;
    Extent& extent = extents_[index];
    std::uint64_t budget_bytes = hash_step_bytes;
    while (extent.hash_row < extent.row_count && budget_bytes > 0) {
        if (extent.hash_bytes == 0) {
            if (extent.direction == Direction::load) find_record(index, extent.hash_row);
            if (row_of(index, extent.hash_row).result.status != RowStatus::pending) {
                ++extent.hash_row;  // it needs no checksum
                continue;
            }
            extent.checksum.reset(seed_of(index, extent.hash_row));
        }
        const std::uint64_t piece_bytes =
            std::min(budget_bytes, options_.block_bytes - extent.hash_bytes);
        const std::byte* const row_data = extent.data + extent.hash_row * options_.slot_bytes;
        extent.checksum.update({row_data + extent.hash_bytes, piece_bytes});
        extent.hash_bytes += piece_bytes;
        budget_bytes -= piece_bytes;
        if (extent.hash_bytes == options_.block_bytes) {
            take_checksum(index, extent.hash_row, extent.checksum.digest());
            extent.hash_bytes = 0;
            ++extent.hash_row;
        }
    }
    if (extent.hash_row == extent.row_count) hashed(index, now);
}

// What a row of a load must turn out to be, or its result when the slot does not hold that.
void Pipeline::find_record(std::uint32_t index, std::uint32_t row_index) {
    const Extent& extent = extents_[index];
    ExtentRow& row = row_of(index, row_index);
    if (row.result.status != RowStatus::pending) return;
    const Row& wanted = extent.transfer->rows[extent.first_row + row_index];
    const SlotRecord& record = records_.at(wanted.slot);
    if (!record_holds(record, wanted.key) && canary != 9) {  // cleared while it was being read
        row.result = {.status = RowStatus::miss};
    } else if (record.valid_bytes != options_.block_bytes) {
        row.result = {.status = RowStatus::corrupt};
        records_.clear(wanted.slot);
    } else {
        row.sequence = record.sequence;
        row.checksum = record.payload_checksum;
    }
}

std::uint64_t Pipeline::seed_of(std::uint32_t index, std::uint32_t row) const noexcept {
    const Extent& extent = extents_[index];
    const Row& wanted = extent.transfer->rows[extent.first_row + row];
    return payload_seed(wanted.key, wanted.slot, row_of(index, row).sequence, records_.epoch());
}

// A store's row keeps its checksum for the record; a load's row must match its record's.
void Pipeline::take_checksum(std::uint32_t index, std::uint32_t row_index, std::uint64_t checksum) {
    Extent& extent = extents_[index];
    ExtentRow& row = row_of(index, row_index);
    if (extent.direction == Direction::store) {
        row.checksum = checksum;
    } else if (row.checksum != checksum && canary != 4) {
        row.result = {.status = RowStatus::corrupt};
        records_.clear(extent.slot + row_index);
    }
}

void Pipeline::hashed(std::uint32_t index, std::int64_t now) {
    Extent& extent = extents_[index];
    moved_ = true;
    if (all_rows_known(index)) {
        finish_extent(index, {}, clock_.now_ns());
    } else if (extent.direction == Direction::store) {
        if (canary == 6) publish(index);
        enter(index, Stage::ready);
    } else if (extent.direct) {
        finish_extent(index, {.status = RowStatus::ok}, now);
    } else {
        enter(index, Stage::scattering);
        start_copies(index, CopyDirection::scatter);
    }
}

}  // namespace kvdisk

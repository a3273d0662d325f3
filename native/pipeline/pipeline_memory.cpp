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
        row_of(index, row).result = {.status = RowStatus::failed, .error = completion.error};
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
        enter(index, Stage::hashing);
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
        ExtentRow& row = row_of(index, extent.hash_row);
        if (extent.hash_bytes == 0 &&
            !hash_begin(extent, row, extent.transfer->rows[extent.first_row + extent.hash_row])) {
            ++extent.hash_row;
            continue;
        }
        const std::uint64_t piece_bytes =
            std::min(budget_bytes, options_.block_bytes - extent.hash_bytes);
        const std::byte* const row_data = extent.data + extent.hash_row * options_.slot_bytes;
        extent.checksum.update({row_data + extent.hash_bytes, piece_bytes});
        extent.hash_bytes += piece_bytes;
        budget_bytes -= piece_bytes;
        if (extent.hash_bytes == options_.block_bytes) {
            hash_end(extent, row);
            extent.hash_bytes = 0;
            ++extent.hash_row;
        }
    }
    if (extent.hash_row == extent.row_count) hashed(index, now);
}

// Seeds the checksum of a row. False: the row needs none, because its result is known.
bool Pipeline::hash_begin(Extent& extent, ExtentRow& row, const Row& wanted) {
    if (row.result.status != RowStatus::pending) return false;
    std::uint64_t sequence = row.sequence;
    if (extent.direction == Direction::load) {
        const SlotRecord& record = records_.at(wanted.slot);
        if (!record_holds(record, wanted.key) && canary != 9) {  // dropped while it was being read
            row.result = {.status = RowStatus::miss};
            return false;
        }
        if (record.valid_bytes != options_.block_bytes) {
            row.result = {.status = RowStatus::corrupt};
            records_.clear(wanted.slot);
            return false;
        }
        row.checksum = record.payload_checksum;
        sequence = record.sequence;
    }
    extent.checksum.reset(payload_seed(wanted.key, wanted.slot, sequence, records_.epoch()));
    return true;
}

void Pipeline::hash_end(Extent& extent, ExtentRow& row) {
    const std::uint64_t digest = extent.checksum.digest();
    if (extent.direction == Direction::store) {
        row.checksum = digest;
    } else if (digest != row.checksum && canary != 4) {
        row.result = {.status = RowStatus::corrupt};
        records_.clear(extent.slot + extent.hash_row);
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

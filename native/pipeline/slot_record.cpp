#include "pipeline/slot_record.hpp"

#include <algorithm>

#include "pipeline/canary.hpp"
#include "pipeline/checksum.hpp"

namespace kvdisk {

static_assert(std::endian::native == std::endian::little, "the file format is little-endian");

namespace {

std::uint64_t record_checksum(const SlotRecord& record) noexcept {
    return checksum(std::as_bytes(std::span{&record, 1}).first<offsetof(SlotRecord, checksum)>(),
                    0);
}

}  // namespace

std::uint64_t payload_seed(const Key& key, std::uint64_t slot, std::uint64_t sequence,
                           std::uint64_t epoch) noexcept {
    if (canary == 21) return 0;
    struct {
        std::array<std::byte, key_bytes_max> key;
        std::uint64_t length, slot, sequence, epoch;
    } const identity{key.bytes, key.length, slot, sequence, epoch};
    static_assert(sizeof(identity) == key_bytes_max + 32, "no padding may enter the seed");
    return checksum(std::as_bytes(std::span{&identity, 1}), 0);
}

SlotRecord make_record(const Key& key, std::uint64_t slot, std::uint64_t sequence,
                       std::uint64_t epoch, std::uint64_t valid_bytes,
                       std::uint64_t payload_checksum) noexcept {
    SlotRecord record;
    record.magic = slot_record_magic;
    record.version = slot_record_version;
    record.key_length = key.length;
    record.slot = slot;
    record.sequence = sequence;
    record.epoch = epoch;
    record.valid_bytes = valid_bytes;
    record.payload_checksum = payload_checksum;
    record.key = key.bytes;
    record.checksum = record_checksum(record);
    return record;
}

bool record_valid(const SlotRecord& record, std::uint64_t slot, std::uint64_t epoch) noexcept {
    return record.magic == slot_record_magic && record.version == slot_record_version &&
           record.slot == slot && record.epoch == epoch && record.sequence != 0 &&
           record.key_length >= 1 && record.key_length <= key_bytes_max &&
           record.checksum == record_checksum(record);
}

bool record_holds(const SlotRecord& record, const Key& key) noexcept {
    return record.magic == slot_record_magic && record.key_length == key.length &&
           record.key == key.bytes;
}

SlotRecords::SlotRecords(std::uint64_t slot_count, std::uint64_t epoch)
    : slot_count_(slot_count), epoch_(epoch) {
    const std::uint64_t pages = (slot_count + records_per_page - 1) / records_per_page;
    records_.resize(pages * records_per_page);
}

std::uint64_t SlotRecords::restore(std::span<const std::byte> file, std::uint64_t first_slot) {
    const std::uint64_t end =
        std::min<std::uint64_t>(slot_count_, first_slot + file.size() / sizeof(SlotRecord));
    std::uint64_t kept = 0;
    for (std::uint64_t slot = first_slot; slot < end; ++slot) {
        SlotRecord record;
        std::memcpy(&record, file.data() + (slot - first_slot) * sizeof(SlotRecord),
                    sizeof(record));
        if (record_valid(record, slot, epoch_)) {
            records_[slot] = record;
            ++kept;
        }
    }
    return kept;
}

std::uint64_t SlotRecords::sequence_max() const noexcept {
    std::uint64_t newest = 0;
    for (const SlotRecord& record : records_) newest = std::max(newest, record.sequence);
    return newest;
}

void SlotRecords::copy_page(std::uint64_t page,
                            std::span<std::byte, record_page_bytes> out) const noexcept {
    std::memcpy(out.data(), records_.data() + page * records_per_page, record_page_bytes);
}

}  // namespace kvdisk

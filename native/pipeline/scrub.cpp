#include "pipeline/scrub.hpp"

#include <algorithm>
#include <cstring>

#include "pipeline/checksum.hpp"

namespace kvdisk {

RecordState record_state(const SlotRecord& record, std::uint64_t slot,
                         std::uint64_t epoch) noexcept {
    if (record_valid(record, slot, epoch)) return RecordState::valid;
    if (record_valid(record, slot, record.epoch)) return RecordState::voided;
    const auto bytes = std::as_bytes(std::span{&record, 1});
    const bool zero = std::ranges::all_of(bytes, [](std::byte b) { return b == std::byte{0}; });
    return zero ? RecordState::empty : RecordState::damaged;
}

void record_states(std::span<const std::byte> records, std::uint64_t first_slot,
                   std::uint64_t epoch, std::span<std::uint8_t> states) noexcept {
    const std::size_t count = std::min(states.size(), records.size() / sizeof(SlotRecord));
    for (std::size_t i = 0; i < count; ++i) {
        SlotRecord record;
        std::memcpy(&record, records.data() + i * sizeof(SlotRecord), sizeof(record));
        states[i] = static_cast<std::uint8_t>(record_state(record, first_slot + i, epoch));
    }
}

bool payload_matches(const SlotRecord& record, std::span<const std::byte> payload) noexcept {
    const Key key{record.key, record.key_length};
    return payload.size() == record.valid_bytes &&
           checksum(payload, payload_seed(key, record.slot, record.sequence, record.epoch)) ==
               record.payload_checksum;
}

}  // namespace kvdisk

// What a scrub asks of records and payloads that it has read itself, beside a live engine or
// without one. Pure functions over bytes; a load's own proof is in the pipeline, with the same
// arithmetic.
#pragma once

#include <cstdint>
#include <span>

#include "pipeline/slot_record.hpp"

namespace kvdisk {

enum class RecordState : std::uint8_t {
    empty = 0,    // nothing was ever stored, or the slot was given up
    valid = 1,    // proves itself and belongs to the file's epoch
    voided = 2,   // proves itself, but belongs to another epoch
    damaged = 3,  // none of these
};

RecordState record_state(const SlotRecord& record, std::uint64_t slot,
                         std::uint64_t epoch) noexcept;

// The states of neighbouring records, the first of which is that of `first_slot`; one byte for each
// whole record in `records`, as far as `states` has room.
void record_states(std::span<const std::byte> records, std::uint64_t first_slot,
                   std::uint64_t epoch, std::span<std::uint8_t> states) noexcept;

// Whether `payload`, all of the record's valid bytes, is what was stored.
bool payload_matches(const SlotRecord& record, std::span<const std::byte> payload) noexcept;

}  // namespace kvdisk

#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <vector>

#include "pipeline/checksum.hpp"
#include "pipeline/scrub.hpp"

namespace {

using kvdisk::RecordState;

kvdisk::Key some_key() {
    kvdisk::Key key;
    key.length = 3;
    std::memcpy(key.bytes.data(), "abc", 3);
    return key;
}

const std::vector<std::byte> payload(5000, std::byte{7});

kvdisk::SlotRecord some_record() {
    const std::uint64_t seed = kvdisk::payload_seed(some_key(), 4, 9, 2);
    return kvdisk::make_record(some_key(), 4, 9, 2, payload.size(),
                               kvdisk::checksum(payload, seed));
}

}  // namespace

TEST_CASE("scrub: a record is valid in its slot and epoch, void in another epoch, else damaged") {
    const kvdisk::SlotRecord record = some_record();
    CHECK(kvdisk::record_state(record, 4, 2) == RecordState::valid);
    CHECK(kvdisk::record_state(record, 4, 3) == RecordState::voided);
    CHECK(kvdisk::record_state(record, 5, 2) == RecordState::damaged);
    CHECK(kvdisk::record_state(kvdisk::SlotRecord{}, 4, 2) == RecordState::empty);
}

TEST_CASE("scrub: any byte changed damages a record") {
    for (std::size_t at = 0; at < sizeof(kvdisk::SlotRecord); ++at) {
        kvdisk::SlotRecord record = some_record();
        reinterpret_cast<std::byte*>(&record)[at] ^= std::byte{1};
        CHECK(kvdisk::record_state(record, 4, 2) == RecordState::damaged);
    }
}

TEST_CASE("scrub: states are given for whole records only") {
    std::array<std::byte, 3 * sizeof(kvdisk::SlotRecord)> file{};
    const kvdisk::SlotRecord record = some_record();
    std::memcpy(file.data() + sizeof(record), &record, sizeof(record));
    std::array<std::uint8_t, 3> states{9, 9, 9};
    kvdisk::record_states(std::span{file}.first(file.size() - 1), 3, 2, states);
    CHECK(states == std::array<std::uint8_t, 3>{0, 1, 9});
}

TEST_CASE("scrub: a payload matches its own record, whole, and no other") {
    const kvdisk::SlotRecord record = some_record();
    CHECK(kvdisk::payload_matches(record, payload));
    CHECK_FALSE(kvdisk::payload_matches(record, std::span{payload}.first(payload.size() - 1)));
    auto changed = payload;
    changed[4321] ^= std::byte{16};
    CHECK_FALSE(kvdisk::payload_matches(record, changed));
    kvdisk::SlotRecord later = record;
    later.sequence += 1;
    CHECK_FALSE(kvdisk::payload_matches(later, payload));
}

// What the record file says of each slot: whose bytes it holds and how to prove it. A record is 128
// bytes, so that it never crosses a 512-byte sector and 32 of them fill a page; the file is an
// array of them, written page by page. The table is also kept in memory: loads verify against
// memory, and the file is read once, at open.
//
// All integers little-endian. Byte offsets are asserted below and documented in
// docs/file-format.md.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

namespace kvdisk {

inline constexpr std::size_t key_bytes_max = 64;

// A key, stored and compared in full. Longer ones are digested before they get here.
struct Key {
    std::array<std::byte, key_bytes_max> bytes{};  // zero beyond `length`
    std::uint8_t length = 0;

    bool operator==(const Key& other) const noexcept {
        return length == other.length &&
               std::memcmp(bytes.data(), other.bytes.data(), key_bytes_max) == 0;
    }
};

struct SlotRecord {
    std::uint32_t magic = 0;             // slot_record_magic, or 0: empty
    std::uint8_t version = 0;            // slot_record_version
    std::uint8_t key_length = 0;         // 1..64
    std::uint16_t reserved = 0;          // 0
    std::uint64_t slot = 0;              // its own index: a misdirected record fails
    std::uint64_t sequence = 0;          // grows with every store, and with time; never 0
    std::uint64_t epoch = 0;             // the rank file's epoch; records of an older one are void
    std::uint64_t valid_bytes = 0;       // of the payload; the rest of the slot is zero
    std::uint64_t payload_checksum = 0;  // of the payload, seeded with key, slot, sequence, epoch
    std::array<std::byte, key_bytes_max> key{};
    std::uint64_t unused = 0;    // 0
    std::uint64_t checksum = 0;  // XXH3-64 of the 120 bytes before it
};
static_assert(sizeof(SlotRecord) == 128);
static_assert(offsetof(SlotRecord, slot) == 8 && offsetof(SlotRecord, sequence) == 16);
static_assert(offsetof(SlotRecord, epoch) == 24 && offsetof(SlotRecord, valid_bytes) == 32);
static_assert(offsetof(SlotRecord, payload_checksum) == 40 && offsetof(SlotRecord, key) == 48);
static_assert(offsetof(SlotRecord, checksum) == 120);

inline constexpr std::uint32_t slot_record_magic = 0x5253564B;  // "KVSR"
inline constexpr std::uint8_t slot_record_version = 1;
inline constexpr std::uint64_t record_page_bytes = 4096;
inline constexpr std::uint64_t records_per_page = record_page_bytes / sizeof(SlotRecord);

// The seed that binds a payload's checksum to whose payload it is.
std::uint64_t payload_seed(const Key& key, std::uint64_t slot, std::uint64_t sequence,
                           std::uint64_t epoch) noexcept;

SlotRecord make_record(const Key& key, std::uint64_t slot, std::uint64_t sequence,
                       std::uint64_t epoch, std::uint64_t valid_bytes,
                       std::uint64_t payload_checksum) noexcept;

// True when the record is whole, says `slot` of itself and belongs to `epoch`.
bool record_valid(const SlotRecord& record, std::uint64_t slot, std::uint64_t epoch) noexcept;

bool record_holds(const SlotRecord& record, const Key& key) noexcept;

// Every slot's record, in memory, in file order. Sized at open; pages of 32 records.
class SlotRecords {
  public:
    SlotRecords(std::uint64_t slot_count, std::uint64_t epoch);

    // Takes over what a record file held (whole pages, from that of `first_slot` on; what a shorter
    // span leaves out is empty). Records that do not prove themselves become empty. Returns how
    // many were kept.
    std::uint64_t restore(std::span<const std::byte> file, std::uint64_t first_slot = 0);

    std::uint64_t slot_count() const noexcept { return slot_count_; }
    std::uint64_t epoch() const noexcept { return epoch_; }
    std::uint64_t page_count() const noexcept { return records_.size() / records_per_page; }
    static std::uint64_t page_of(std::uint64_t slot) noexcept { return slot / records_per_page; }

    const SlotRecord& at(std::uint64_t slot) const noexcept { return records_[slot]; }
    bool occupied(std::uint64_t slot) const noexcept { return records_[slot].magic != 0; }
    void set(const SlotRecord& record) noexcept { records_[record.slot] = record; }
    void clear(std::uint64_t slot) noexcept { records_[slot] = SlotRecord{}; }

    std::uint64_t sequence_max() const noexcept;

    // The bytes to write for one page.
    void copy_page(std::uint64_t page, std::span<std::byte, record_page_bytes> out) const noexcept;

    std::span<const SlotRecord> all() const noexcept { return {records_.data(), slot_count_}; }

  private:
    std::uint64_t slot_count_;
    std::uint64_t epoch_;
    std::vector<SlotRecord> records_;
};

}  // namespace kvdisk

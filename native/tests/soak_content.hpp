// What the soak's blocks hold: bytes that say of every sector whose they are, so that a byte in the
// wrong place, of the wrong time or of nobody is seen at once.
//
// A block is a piece of a fixed noise, chosen by slot, key and generation; each 512 bytes of it
// begin with a stamp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "io/sim_random.hpp"
#include "pipeline/layout.hpp"
#include "pipeline/slot_record.hpp"

namespace kvdisk::test {

struct Stamp {
    std::uint64_t slot = 0;
    std::uint64_t key = 0;
    std::uint64_t generation = 0;  // of the slot: the count of stores into it
    std::uint64_t sector = 0;

    bool operator==(const Stamp&) const = default;
};

class Noise {
  public:
    explicit Noise(std::uint64_t seed) : words_((choices + block_bytes_max) / 8) {
        io::SimRandom random(seed);
        for (std::uint64_t& word : words_) word = random.next();
    }

    static constexpr std::size_t block_bytes_max = 64 * 1024;

    // A piece of the noise that `choice` picks.
    const std::byte* piece(std::uint64_t choice) const noexcept {
        const std::uint64_t mixed = (choice + 1) * 0x9E3779B97F4A7C15ULL;
        return reinterpret_cast<const std::byte*>(words_.data() + (mixed >> 40) % (choices / 8));
    }

    void fill(const Stamp& stamp, std::span<std::byte> block) const noexcept {
        std::memcpy(block.data(), piece(choice_of(stamp)), block.size());
        Stamp stamped = stamp;
        for (std::size_t at = 0; at < block.size(); at += stamp_every, ++stamped.sector) {
            std::memcpy(block.data() + at, &stamped, sizeof stamped);
        }
    }

    // True when the block is whole, and then whose it is.
    bool read(std::span<const std::byte> block, Stamp& found) const noexcept {
        std::memcpy(&found, block.data(), sizeof found);
        if (found.sector != 0) return false;
        const std::byte* const expected = piece(choice_of(found));
        Stamp stamped = found;
        for (std::size_t at = 0; at < block.size(); at += stamp_every, ++stamped.sector) {
            const std::size_t bytes = std::min(stamp_every, block.size() - at);
            if (std::memcmp(block.data() + at, &stamped, sizeof stamped) != 0 ||
                std::memcmp(block.data() + at + sizeof stamped, expected + at + sizeof stamped,
                            bytes - sizeof stamped) != 0) {
                return false;
            }
        }
        return true;
    }

  private:
    static constexpr std::size_t choices = 1 << 20;
    static constexpr std::size_t stamp_every = 512;

    static std::uint64_t choice_of(const Stamp& stamp) noexcept {
        return (stamp.slot * 0xD6E8FEB86659FD93ULL) ^ (stamp.key * 0xCA5A826395121157ULL) ^
               stamp.generation;
    }

    std::vector<std::uint64_t> words_;
};

// A key as the pipeline knows it. Keys of one length differ only in their last eight bytes.
inline Key make_key(std::uint64_t number) {
    Key key;
    key.length = static_cast<std::uint8_t>(8 + number % (key_bytes_max - 7));
    std::fill_n(key.bytes.begin(), key.length, std::byte{0x4B});
    std::memcpy(key.bytes.data() + key.length - 8, &number, 8);
    return key;
}

// The device: blocks as a layout strides them.
class DeviceMemory {
  public:
    DeviceMemory(std::uint64_t block_count, std::uint64_t region_count, std::uint64_t segment_bytes,
                 std::uint64_t stride_bytes)
        : bytes_(region_count * block_count * stride_bytes + alignment) {
        auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
        std::byte* base = bytes_.data() + (alignment - address % alignment) % alignment;
        for (std::uint64_t region = 0; region < region_count; ++region) {
            layout_.regions.push_back({base, stride_bytes, segment_bytes});
            base += block_count * stride_bytes;
        }
        layout_.block_count = block_count;
        layout_.block_bytes = region_count * segment_bytes;
    }

    const Layout& layout() const noexcept { return layout_; }

    void put(std::uint64_t block, std::span<const std::byte> bytes) noexcept {
        for (const Region& region : layout_.regions) {
            std::memcpy(region.base + block * region.block_stride_bytes, bytes.data(),
                        region.segment_bytes);
            bytes = bytes.subspan(region.segment_bytes);
        }
    }

    void get(std::uint64_t block, std::span<std::byte> bytes) const noexcept {
        for (const Region& region : layout_.regions) {
            std::memcpy(bytes.data(), region.base + block * region.block_stride_bytes,
                        region.segment_bytes);
            bytes = bytes.subspan(region.segment_bytes);
        }
    }

    bool equals(std::uint64_t block, const std::byte* bytes) const noexcept {
        for (const Region& region : layout_.regions) {
            if (std::memcmp(bytes, region.base + block * region.block_stride_bytes,
                            region.segment_bytes) != 0) {
                return false;
            }
            bytes += region.segment_bytes;
        }
        return true;
    }

  private:
    static constexpr std::size_t alignment = 4096;
    std::vector<std::byte> bytes_;
    Layout layout_;
};

}  // namespace kvdisk::test

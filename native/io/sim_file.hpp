// One file of the simulated disk: a sparse store of bytes with a fixed size, which outlives every
// crash. It remembers its latest writes, because a power cut may undo or tear those that no sync
// has made durable.
//
// What always holds: bytes never written read as zero; memory grows by whole pages as the file is
// first written and by nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/sim_random.hpp"

namespace kvdisk::io {

inline constexpr std::uint64_t sim_sector_bytes = 512;

class SimFile {
  public:
    // `journal_bytes`: how much of the latest writes a crash can still undo; 0: nothing.
    SimFile(std::uint64_t size_bytes, std::uint64_t journal_bytes);

    std::uint64_t size_bytes() const noexcept { return size_bytes_; }

    // How many of `length` bytes from `offset` lie inside the file.
    std::uint64_t clip(std::uint64_t offset, std::uint64_t length) const noexcept;

    // For the tests: straight to the bytes, durable at once. The range lies inside the file.
    void read(std::uint64_t offset, std::span<std::byte> out) const noexcept;
    void write(std::uint64_t offset, std::span<const std::byte> bytes);
    void flip_bit(std::uint64_t offset, unsigned bit);
    std::vector<std::byte> snapshot() const;
    void restore(std::span<const std::byte> bytes);

    // A write as a running system makes it: visible at once, durable only once synced.
    void write_unsynced(std::uint64_t offset, std::span<const std::byte> bytes);
    void sync() noexcept;
    std::size_t unsynced_writes() const noexcept { return record_count_; }

    // Power cut. Each unsynced write is undone with chance `lost`, else torn at sectors with chance
    // `torn` (each sector survives or not), else survives. Afterwards everything is durable.
    void crash(SimRandom& random, double lost, double torn);

  private:
    struct Undo {
        std::uint64_t offset = 0;    // in the file
        std::uint64_t length = 0;    // bytes
        std::uint64_t position = 0;  // of the overwritten bytes in `journal_`
    };

    std::byte* page_for_write(std::uint64_t page);
    std::uint64_t make_room(std::uint64_t length) noexcept;
    void forget_oldest() noexcept;
    Undo& undo_at(std::size_t age) noexcept;
    void swap_with_journal(const Undo& undo);

    std::uint64_t size_bytes_;
    std::vector<std::unique_ptr<std::byte[]>> pages_;
    std::vector<std::byte> journal_;  // a ring of overwritten bytes; no entry wraps around
    std::vector<std::byte> scratch_;
    std::vector<Undo> records_;  // a ring, oldest first
    std::size_t record_first_ = 0;
    std::size_t record_count_ = 0;
    std::uint64_t journal_next_ = 0;
};

}  // namespace kvdisk::io

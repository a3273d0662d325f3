// The bytes of a simulated file, and the journal from which a crash undoes unsynced writes.
#include "io/sim_file.hpp"

#include <algorithm>
#include <cstring>

namespace kvdisk::io {

namespace {

constexpr std::uint64_t page_bytes = 64 * 1024;
constexpr std::size_t unsynced_writes_max = 1024;

template <typename Visit>
void for_each_page(std::uint64_t offset, std::uint64_t length, Visit visit) {
    std::uint64_t done = 0;
    while (done < length) {
        const std::uint64_t inside = (offset + done) % page_bytes;
        const std::uint64_t count = std::min(length - done, page_bytes - inside);
        visit((offset + done) / page_bytes, inside, done, count);
        done += count;
    }
}

}  // namespace

SimFile::SimFile(std::uint64_t size_bytes, std::uint64_t journal_bytes)
    : size_bytes_(size_bytes),
      pages_((size_bytes + page_bytes - 1) / page_bytes),
      journal_(journal_bytes),
      scratch_(journal_bytes),
      records_(journal_bytes == 0 ? 0 : unsynced_writes_max) {}

std::uint64_t SimFile::clip(std::uint64_t offset, std::uint64_t length) const noexcept {
    return offset >= size_bytes_ ? 0 : std::min(length, size_bytes_ - offset);
}

void SimFile::read(std::uint64_t offset, std::span<std::byte> out) const noexcept {
    for_each_page(offset, out.size(), [&](auto page, auto inside, auto done, auto count) {
        if (pages_[page]) {
            std::memcpy(out.data() + done, pages_[page].get() + inside, count);
        } else {
            std::memset(out.data() + done, 0, count);
        }
    });
}

std::byte* SimFile::page_for_write(std::uint64_t page) {
    if (!pages_[page]) {
        pages_[page] = std::make_unique<std::byte[]>(page_bytes);
    }
    return pages_[page].get();
}

void SimFile::write(std::uint64_t offset, std::span<const std::byte> bytes) {
    for_each_page(offset, bytes.size(), [&](auto page, auto inside, auto done, auto count) {
        std::memcpy(page_for_write(page) + inside, bytes.data() + done, count);
    });
}

void SimFile::flip_bit(std::uint64_t offset, unsigned bit) {
    page_for_write(offset / page_bytes)[offset % page_bytes] ^= std::byte{1} << (bit % 8);
}

std::vector<std::byte> SimFile::snapshot() const {
    std::vector<std::byte> bytes(size_bytes_);
    read(0, bytes);
    return bytes;
}

void SimFile::restore(std::span<const std::byte> bytes) {
    sync();
    write(0, bytes.first(std::min<std::uint64_t>(bytes.size(), size_bytes_)));
}

SimFile::Undo& SimFile::undo_at(std::size_t age) noexcept {
    return records_[(record_first_ + age) % records_.size()];
}

void SimFile::forget_oldest() noexcept {
    record_first_ = (record_first_ + 1) % records_.size();
    record_count_ -= 1;
}

void SimFile::sync() noexcept {
    record_first_ = 0;
    record_count_ = 0;
    journal_next_ = 0;
}

// Where the next `length` overwritten bytes go; what lay there becomes durable.
std::uint64_t SimFile::make_room(std::uint64_t length) noexcept {
    if (record_count_ == records_.size()) {
        forget_oldest();
    }
    if (journal_next_ + length > journal_.size()) {
        while (record_count_ > 0 && undo_at(0).position >= journal_next_) {
            forget_oldest();
        }
        journal_next_ = 0;
    }
    while (record_count_ > 0 && undo_at(0).position >= journal_next_ &&
           undo_at(0).position < journal_next_ + length) {
        forget_oldest();
    }
    const std::uint64_t position = journal_next_;
    journal_next_ += length;
    return position;
}

void SimFile::write_unsynced(std::uint64_t offset, std::span<const std::byte> bytes) {
    if (journal_.size() < bytes.size()) {
        sync();  // too large to remember: it and all before it count as durable
    } else {
        const std::uint64_t position = make_room(bytes.size());
        read(offset, std::span(journal_).subspan(position, bytes.size()));
        record_count_ += 1;
        undo_at(record_count_ - 1) = {offset, bytes.size(), position};
    }
    write(offset, bytes);
}

void SimFile::swap_with_journal(const Undo& undo) {
    const auto kept = std::span(journal_).subspan(undo.position, undo.length);
    const auto current = std::span(scratch_).first(undo.length);
    read(undo.offset, current);
    write(undo.offset, kept);
    std::copy(current.begin(), current.end(), kept.begin());
}

void SimFile::crash(SimRandom& random, double lost, double torn) {
    // Undo everything, newest first; the journal then holds what each write had written. Redo what
    // survives, oldest first: a later write that survives covers an earlier one that was lost.
    for (std::size_t age = record_count_; age-- > 0;) {
        swap_with_journal(undo_at(age));
    }
    for (std::size_t age = 0; age < record_count_; ++age) {
        const Undo& undo = undo_at(age);
        const auto written =
            std::span<const std::byte>(journal_).subspan(undo.position, undo.length);
        if (random.chance(lost)) {
            continue;
        }
        if (!random.chance(torn)) {
            write(undo.offset, written);
            continue;
        }
        for (std::uint64_t done = 0; done < undo.length; done += sim_sector_bytes) {
            if (random.next() & 1) {
                const std::uint64_t count = std::min(sim_sector_bytes, undo.length - done);
                write(undo.offset + done, written.subspan(done, count));
            }
        }
    }
    sync();
}

}  // namespace kvdisk::io

// The copier for host memory: what it moves, and that a cancelled copy leaves at once.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "pipeline/checksum.hpp"
#include "pipeline/copier.hpp"

namespace {

using namespace kvdisk;

constexpr std::uint64_t segment_bytes = 300'000;  // more than one reap copies
constexpr std::uint64_t block_count = 4;

struct Memory {
    std::vector<std::byte> blocks = std::vector<std::byte>(2 * block_count * segment_bytes);
    std::vector<std::byte> buffers = std::vector<std::byte>(8 * segment_bytes);

    Layout layout() {
        Layout made;
        made.regions = {
            {blocks.data(), segment_bytes, segment_bytes},
            {blocks.data() + block_count * segment_bytes, segment_bytes, segment_bytes}};
        made.block_count = block_count;
        made.block_bytes = 2 * segment_bytes;
        return made;
    }

    std::byte* buffer(std::uint64_t index) { return buffers.data() + index * 2 * segment_bytes; }
};

std::vector<std::uint64_t> reap_all(Copier& copier) {
    std::vector<std::uint64_t> ids;
    std::array<CopyCompletion, 3> done;
    while (copier.busy()) {
        const std::size_t count = copier.reap(done);
        for (std::size_t i = 0; i < count; ++i) ids.push_back(done[i].id);
    }
    return ids;
}

}  // namespace

TEST_CASE("host copier: a gather and a scatter move a block's segments") {
    Memory memory;
    for (std::size_t i = 0; i < memory.blocks.size(); ++i) {
        memory.blocks[i] = static_cast<std::byte>(i * 7 >> 3);
    }
    const auto copier = make_host_copier(memory.layout(), 4);
    copier->start({.id = 1, .block_id = 2, .buffer = memory.buffer(0)});
    CHECK(reap_all(*copier) == std::vector<std::uint64_t>{1});
    const std::byte* const second = memory.blocks.data() + (block_count + 2) * segment_bytes;
    CHECK(std::memcmp(memory.buffer(0), memory.blocks.data() + 2 * segment_bytes, segment_bytes) ==
          0);
    CHECK(std::memcmp(memory.buffer(0) + segment_bytes, second, segment_bytes) == 0);

    copier->start(
        {.id = 2, .block_id = 0, .buffer = memory.buffer(0), .direction = CopyDirection::scatter});
    CHECK(reap_all(*copier) == std::vector<std::uint64_t>{2});
    CHECK(std::memcmp(memory.blocks.data(), memory.blocks.data() + 2 * segment_bytes,
                      segment_bytes) == 0);
}

TEST_CASE("host copier: both directions yield the checksum of what they moved") {
    Memory memory;
    for (std::size_t i = 0; i < memory.blocks.size(); ++i) {
        memory.blocks[i] = static_cast<std::byte>(i * 13 >> 4);
    }
    const auto copier = make_host_copier(memory.layout(), 4);
    REQUIRE(copier->hashes());
    for (const CopyDirection direction : {CopyDirection::gather, CopyDirection::scatter}) {
        for (std::uint64_t id = 1; id <= 2; ++id) {
            copier->start({.id = id,
                           .block_id = id,
                           .buffer = memory.buffer(id),
                           .direction = direction,
                           .seed = 40 + id});
        }
        std::array<CopyCompletion, 2> done{};
        std::size_t count = 0;
        while (count < 2) count += copier->reap(std::span(done).subspan(count));
        for (const CopyCompletion& each : done) {
            CHECK(each.checksum ==
                  checksum({memory.buffer(each.id), 2 * segment_bytes}, 40 + each.id));
        }
    }
}

TEST_CASE("checksum: a copy moves and hashes the same bytes, however they are aligned and cut") {
    std::vector<std::byte> source(100'000), target(100'200);
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>(i * 7 >> 3);
    for (const std::size_t from : {0, 1, 17, 64}) {
        for (const std::size_t to : {0, 3, 16, 63}) {
            for (const std::size_t bytes : {0, 1, 15, 63, 64, 257, 32'768, 99'000}) {
                std::ranges::fill(target, std::byte{0xEE});
                Checksum hash;
                hash.reset(7);
                const auto piece = std::span(source).subspan(from, bytes);
                hash.update_copying(piece.first(bytes / 3), target.data() + to);
                hash.update_copying(piece.subspan(bytes / 3), target.data() + to + bytes / 3);
                CHECK(hash.digest() == checksum(piece, 7));
                CHECK(std::ranges::equal(piece, std::span(target).subspan(to, bytes)));
                CHECK(target[to + bytes] == std::byte{0xEE});
                if (to > 0) CHECK(target[to - 1] == std::byte{0xEE});
            }
        }
    }
}

TEST_CASE("host copier: cancelled copies make room at once, and touch nothing more") {
    Memory memory;
    const auto copier = make_host_copier(memory.layout(), 4);
    for (std::uint64_t id = 1; id <= 4; ++id) {
        copier->start({.id = id, .block_id = id - 1, .buffer = memory.buffer(id - 1)});
    }
    std::array<CopyCompletion, 1> done;
    CHECK(copier->reap(done) == 0);  // the first one is half done
    std::memset(memory.blocks.data(), 0x55, memory.blocks.size());
    CHECK(copier->cancel(3));
    CHECK(copier->cancel(1));
    CHECK(copier->cancel(4));
    CHECK_FALSE(copier->cancel(9));
    for (std::uint64_t id = 5; id <= 7; ++id) {
        copier->start({.id = id, .block_id = 1, .buffer = memory.buffer(id - 4)});
    }
    std::memset(memory.buffer(0), 0, 2 * segment_bytes);
    CHECK(reap_all(*copier) == std::vector<std::uint64_t>{2, 5, 6, 7});
    CHECK(memory.buffer(0)[0] == std::byte{0});
    CHECK(memory.buffer(1)[2 * segment_bytes - 1] == std::byte{0x55});
}

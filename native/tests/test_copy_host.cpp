// The copier for host memory: what it moves, and that a cancelled copy leaves at once.
#include <doctest/doctest.h>

#include <array>
#include <cstring>
#include <vector>

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

// The simulator is the measure of everything above it, so each of its faults is shown to do what
// its name says, and the same seed to do it again.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <vector>

#include "io/sim.hpp"

using namespace kvdisk::io;

namespace {

constexpr std::uint64_t file_bytes = 1 << 20;
constexpr std::uint64_t block_bytes = 4096;

using Bytes = std::vector<std::byte>;

Bytes pattern(std::uint64_t seed, std::size_t bytes = block_bytes) {
    SimRandom random(seed);
    Bytes made(bytes);
    for (std::byte& byte : made) byte = static_cast<std::byte>(random.next());
    return made;
}

struct Fixture {
    SimDisk disk;
    std::uint64_t id_last = 0;

    explicit Fixture(const SimFaults& faults = {}, std::uint64_t seed = 7,
                     std::uint64_t journal_bytes = 1 << 20)
        : disk({.seed = seed,
                .file_bytes = {file_bytes, file_bytes},
                .journal_bytes = journal_bytes,
                .faults = faults}) {
        disk.attach();
    }

    std::uint64_t start(Op op, std::uint64_t offset, std::span<std::byte> bytes,
                        std::uint16_t file = 0) {
        disk.push({.id = ++id_last,
                   .offset = offset,
                   .data = bytes.data(),
                   .length = static_cast<std::uint32_t>(bytes.size()),
                   .file = file,
                   .op = op});
        disk.submit();
        return id_last;
    }

    // The first completion within `limit_ns`.
    std::optional<Completion> finish(std::int64_t limit_ns = 1'000'000'000) {
        const std::int64_t until_ns = disk.now_ns() + limit_ns;
        std::array<Completion, 1> completion;
        for (;;) {
            if (disk.reap(completion) == 1) return completion[0];
            if (disk.now_ns() >= until_ns) return std::nullopt;
            disk.wait(until_ns);
        }
    }

    std::int64_t write(std::uint64_t offset, Bytes bytes, std::uint16_t file = 0) {
        start(Op::write, offset, bytes, file);
        return finish().value().result;
    }

    std::int64_t read(std::uint64_t offset, Bytes& bytes, std::uint16_t file = 0) {
        start(Op::read, offset, bytes, file);
        return finish().value().result;
    }

    Bytes on_disk(std::uint64_t offset, std::size_t bytes = block_bytes) {
        Bytes found(bytes);
        disk.file(0).read(offset, found);
        return found;
    }
};

// How many sectors of `found` are those of `wanted`.
std::size_t equal_sectors(const Bytes& found, const Bytes& wanted) {
    std::size_t equal = 0;
    for (std::size_t at = 0; at < wanted.size(); at += sim_sector_bytes) {
        equal += std::memcmp(&found[at], &wanted[at], sim_sector_bytes) == 0 ? 1 : 0;
    }
    return equal;
}

int different_bits(const Bytes& left, const Bytes& right) {
    int bits = 0;
    for (std::size_t i = 0; i < left.size(); ++i) {
        bits += std::popcount(static_cast<unsigned>(left[i] ^ right[i]));
    }
    return bits;
}

}  // namespace

TEST_CASE("sim: what was written is read back, and the rest is zero") {
    Fixture fixture;
    const Bytes written = pattern(1, 3 * block_bytes);
    CHECK(fixture.write(65536 - block_bytes, written) == 3 * block_bytes);
    Bytes found(3 * block_bytes);
    CHECK(fixture.read(65536 - block_bytes, found) == 3 * block_bytes);
    CHECK(found == written);
    CHECK(fixture.read(4 * 65536, found) == 3 * block_bytes);
    CHECK(std::ranges::count(found, std::byte{0}) == 3 * block_bytes);
    CHECK(fixture.disk.in_flight() == 0);
    CHECK(fixture.disk.stats().completed == 3);
}

TEST_CASE("sim: the end of a file cuts a request short") {
    Fixture fixture;
    Bytes bytes(block_bytes);
    CHECK(fixture.read(file_bytes - 1024, bytes) == 1024);
    CHECK(fixture.read(file_bytes, bytes) == 0);
    CHECK(fixture.write(file_bytes - 512, bytes) == 512);
    CHECK(fixture.write(file_bytes, bytes) == -ENOSPC);
}

TEST_CASE("sim: misaligned requests are refused when an alignment is set") {
    SimDisk disk({.file_bytes = {file_bytes}, .alignment_bytes = 512});
    disk.attach();
    alignas(512) std::array<std::byte, 1024> buffer{};
    const Request good{.id = 1, .offset = 512, .data = buffer.data(), .length = 512};
    std::uint64_t id = 0;
    for (const auto& [request, result] :
         {std::pair{good, 512L},
          std::pair{Request{.offset = 100, .data = buffer.data(), .length = 512}, -long{EINVAL}},
          std::pair{Request{.offset = 0, .data = buffer.data() + 8, .length = 512}, -long{EINVAL}},
          std::pair{Request{.offset = 0, .data = buffer.data(), .length = 500}, -long{EINVAL}}}) {
        Request pushed = request;
        pushed.id = ++id;
        disk.push(pushed);
        disk.submit();
        disk.wait(-1);
        std::array<Completion, 1> completion;
        REQUIRE(disk.reap(completion) == 1);
        CHECK(completion[0].id == id);
        CHECK(completion[0].result == result);
    }
}

TEST_CASE("sim: nothing happens before submit, and no time passes but in calls") {
    Fixture fixture;
    Bytes bytes = pattern(2);
    fixture.disk.push({.id = 1, .data = bytes.data(), .length = block_bytes, .op = Op::write});
    fixture.disk.advance(1'000'000'000);
    CHECK(fixture.disk.next_event_ns() == SimDisk::never);
    CHECK(fixture.disk.in_flight() == 1);
    fixture.disk.wait(-1);
    CHECK(fixture.disk.endless_waits() == 1);
    fixture.disk.submit();
    const std::int64_t before_ns = fixture.disk.now_ns();
    fixture.disk.wait(before_ns + 10);
    CHECK(fixture.disk.now_ns() == before_ns + 10);
    fixture.disk.wait(-1);
    CHECK(fixture.disk.now_ns() >= before_ns + 80'000);
}

TEST_CASE("sim: wake ends the next wait, a neighbour's event bounds it") {
    Fixture fixture;
    const std::int64_t before_ns = fixture.disk.now_ns();
    fixture.disk.wake();
    fixture.disk.wait(before_ns + 1'000'000);
    CHECK(fixture.disk.now_ns() == before_ns);
    fixture.disk.set_neighbour([&] { return before_ns + 500; });
    fixture.disk.wait(-1);
    CHECK(fixture.disk.now_ns() == before_ns + 500);
}

TEST_CASE("sim: a read fills its buffer only at its end, a write takes its bytes meanwhile") {
    Fixture fixture;
    const Bytes first = pattern(3);
    const Bytes second = pattern(4);
    fixture.write(0, first);
    Bytes buffer(block_bytes);
    fixture.start(Op::read, 0, buffer);
    fixture.disk.advance(79'000);
    CHECK(std::ranges::count(buffer, std::byte{0}) == block_bytes);
    CHECK(fixture.finish()->result == block_bytes);
    CHECK(buffer == first);

    int early = 0;
    int late = 0;
    for (int round = 0; round < 200; ++round) {
        Bytes reused = first;
        fixture.start(Op::write, block_bytes, reused);
        fixture.disk.advance(40'000);
        reused = second;  // too early: the write has not completed
        CHECK(fixture.finish()->result == block_bytes);
        const Bytes found = fixture.on_disk(block_bytes);
        early += found == first ? 1 : 0;
        late += found == second ? 1 : 0;
    }
    CHECK(early + late == 200);
    CHECK(early > 20);
    CHECK(late > 20);
}

TEST_CASE("sim: a short read moves what it says, and its rest can come short again") {
    Fixture fixture({.short_io = 1.0, .short_again = 1.0});
    const Bytes stored = pattern(5, 16 * block_bytes);
    fixture.disk.file(0).write(0, stored);
    std::array<bool, 4> seen{};
    for (int round = 0; round < 300; ++round) {
        Bytes found(16 * block_bytes, std::byte{0xAA});
        const std::int64_t result = fixture.read(0, found);
        REQUIRE(result >= 0);
        REQUIRE(result < std::ssize(stored));
        CHECK(result % 512 == 0);
        CHECK(std::equal(found.begin(), found.begin() + result, stored.begin()));
        CHECK(found != stored);
        seen[0] |= result == 0;
        seen[1] |= result == 512;
        seen[2] |= result == std::ssize(stored) / 2;
        seen[3] |= result == std::ssize(stored) - 512;
    }
    CHECK(std::ranges::count(seen, true) == 4);

    // Only the rest of a short transfer is afflicted by `short_again`.
    fixture.disk.set_faults({.short_again = 1.0});
    fixture.disk.fail_nth(Op::read, 0, 1, 1024);
    Bytes found(block_bytes);
    CHECK(fixture.read(8192, found) == 1024);
    Bytes other(block_bytes);
    CHECK(fixture.read(16384, other) == block_bytes);
    Bytes rest(block_bytes - 1024);
    CHECK(fixture.read(8192 + 1024, rest) < std::ssize(rest));
}

TEST_CASE("sim: a short write leaves the rest of the disk as it was") {
    Fixture fixture({.short_io = 1.0, .short_unaligned = 1.0});
    bool unaligned = false;
    for (int round = 0; round < 100; ++round) {
        const Bytes before = fixture.on_disk(0);
        const Bytes written = pattern(100 + static_cast<std::uint64_t>(round));
        const std::int64_t result = fixture.write(0, written);
        REQUIRE(result < std::ssize(written));
        unaligned |= result % 512 != 0;
        const Bytes after = fixture.on_disk(0);
        CHECK(std::equal(after.begin(), after.begin() + result, written.begin()));
        CHECK(std::equal(after.begin() + result, after.end(), before.begin() + result));
    }
    CHECK(unaligned);
}

TEST_CASE("sim: errors are reported; transient ones move nothing") {
    for (const auto& [faults, error] :
         {std::pair{SimFaults{.eio = 1}, EIO}, std::pair{SimFaults{.eagain = 1}, EAGAIN},
          std::pair{SimFaults{.eintr = 1}, EINTR}, std::pair{SimFaults{.enomem = 1}, ENOMEM}}) {
        Fixture fixture(faults);
        const Bytes stored = pattern(6);
        fixture.disk.file(0).write(0, stored);
        Bytes found(block_bytes);
        CHECK(fixture.read(0, found) == -error);
        CHECK(found != stored);
        int changed = 0;
        for (std::uint64_t round = 0; round < 30; ++round) {
            CHECK(fixture.write(0, pattern(round)) == -error);
            changed += fixture.on_disk(0) != stored ? 1 : 0;
        }
        CHECK((changed > 0) == (error == EIO));
    }
    Fixture fixture({.enospc = 1});
    Bytes found(block_bytes);
    CHECK(fixture.write(0, pattern(1)) == -ENOSPC);
    CHECK(fixture.read(0, found) == block_bytes);
}

TEST_CASE("sim: faults keep to the files they are meant for") {
    Fixture fixture({.eio = 1, .files = 0b10});
    CHECK(fixture.write(0, pattern(1), 0) == block_bytes);
    CHECK(fixture.write(0, pattern(1), 1) == -EIO);
    CHECK(fixture.disk.struck(SimFault::eio) == 1);
}

TEST_CASE("sim: the nth request fails, once or from then on") {
    Fixture fixture;
    fixture.disk.fail_nth(Op::write, 0, 2, -EROFS);
    fixture.disk.fail_nth(Op::read, 0, 1, -EIO, true);
    CHECK(fixture.write(0, pattern(1)) == block_bytes);
    CHECK(fixture.write(0, pattern(1), 1) == block_bytes);
    CHECK(fixture.write(0, pattern(1)) == -EROFS);
    CHECK(fixture.write(0, pattern(1)) == block_bytes);
    Bytes found(block_bytes);
    CHECK(fixture.read(0, found) == -EIO);
    CHECK(fixture.read(0, found) == -EIO);
    fixture.disk.clear_plans();
    CHECK(fixture.read(0, found) == block_bytes);
}

TEST_CASE("sim: silent damage to a write") {
    const Bytes before = pattern(8);
    const Bytes written = pattern(9);
    for (const SimFault fault : {SimFault::torn_write, SimFault::lost_write,
                                 SimFault::misdirect_write, SimFault::flip_at_rest}) {
        for (std::uint64_t seed = 1; seed <= 20; ++seed) {
            Fixture fixture({}, seed);
            fixture.disk.file(0).write(65536, before);
            const Bytes whole_before = fixture.disk.file(0).snapshot();
            fixture.disk.plan(Op::write, 0, 1, fault);
            CHECK(fixture.write(65536, written) == block_bytes);
            CHECK(fixture.disk.struck(fault) == 1);
            const Bytes after = fixture.on_disk(65536);
            const Bytes whole_after = fixture.disk.file(0).snapshot();
            if (fault == SimFault::torn_write) {
                CHECK(equal_sectors(after, written) >= 1);
                CHECK(equal_sectors(after, before) >= 1);
                CHECK(equal_sectors(after, before) + equal_sectors(after, written) == 8);
            } else if (fault == SimFault::lost_write) {
                CHECK(whole_after == whole_before);
            } else if (fault == SimFault::misdirect_write) {
                CHECK(after != written);
                const auto place = std::ranges::search(whole_after, written);
                REQUIRE(!place.empty());
                CHECK((place.begin() - whole_after.begin()) % 512 == 0);
            } else {
                CHECK(different_bits(after, written) == 1);
            }
        }
    }
}

TEST_CASE("sim: silent damage to a read") {
    const Bytes stored = pattern(10);
    for (const SimFault fault :
         {SimFault::misdirect_read, SimFault::flip_on_read, SimFault::flip_at_rest}) {
        for (std::uint64_t seed = 1; seed <= 20; ++seed) {
            Fixture fixture({}, seed);
            fixture.disk.file(0).write(0, pattern(11, file_bytes));
            fixture.disk.file(0).write(65536, stored);
            fixture.disk.plan(Op::read, 0, 1, fault);
            Bytes found(block_bytes);
            CHECK(fixture.read(65536, found) == block_bytes);
            CHECK(found != stored);
            if (fault == SimFault::misdirect_read) {
                CHECK(different_bits(found, stored) > 1000);
            } else {
                CHECK(different_bits(found, stored) == 1);
            }
            CHECK((fixture.on_disk(65536) == stored) == (fault != SimFault::flip_at_rest));
            CHECK(fixture.read(65536, found) == block_bytes);
            CHECK((found == stored) == (fault != SimFault::flip_at_rest));
        }
    }
}

TEST_CASE("sim: a hung request completes after a thaw, and then touches its buffer") {
    Fixture fixture;
    const Bytes stored = pattern(12);
    fixture.disk.file(0).write(0, stored);
    fixture.disk.plan(Op::read, 0, 1, SimFault::hang);
    Bytes buffer(block_bytes);
    const std::uint64_t id = fixture.start(Op::read, 0, buffer);
    CHECK(!fixture.finish(3600'000'000'000).has_value());
    CHECK(fixture.disk.hung() == 1);
    CHECK(fixture.disk.in_flight() == 1);
    std::ranges::fill(buffer, std::byte{0x55});  // somebody else's by mistake
    fixture.disk.thaw();
    CHECK(fixture.finish()->id == id);
    CHECK(buffer == stored);

    Bytes other(block_bytes);
    fixture.start(Op::write, 0, other);
    fixture.disk.freeze();
    fixture.start(Op::write, block_bytes, buffer);
    CHECK(!fixture.finish().has_value());
    CHECK(fixture.disk.hung() == 2);
    fixture.disk.thaw();
    CHECK(fixture.finish()->result == block_bytes);
    CHECK(fixture.finish()->result == block_bytes);
    CHECK(fixture.on_disk(block_bytes) == stored);
}

TEST_CASE("sim: a hung write takes the bytes that lie in its buffer when it goes on") {
    int wrong = 0;
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        Fixture fixture({}, seed);
        fixture.disk.plan(Op::write, 0, 1, SimFault::hang);
        Bytes buffer = pattern(13);
        fixture.start(Op::write, 0, buffer);
        fixture.disk.advance(1'000'000'000);
        std::ranges::copy(pattern(14), buffer.begin());
        fixture.disk.thaw();
        CHECK(fixture.finish()->result == block_bytes);
        wrong += fixture.on_disk(0) == pattern(14) ? 1 : 0;
    }
    CHECK(wrong > 8);
    CHECK(wrong < 32);
}

TEST_CASE("sim: a late request is late by what was asked for") {
    Fixture fixture({.late = 1, .late_ns_min = 5'000'000'000, .late_ns_max = 6'000'000'000});
    Bytes buffer(block_bytes);
    const std::int64_t before_ns = fixture.disk.now_ns();
    fixture.start(Op::read, 0, buffer);
    CHECK(fixture.finish(60'000'000'000).has_value());
    CHECK(fixture.disk.now_ns() - before_ns >= 5'000'000'000);
    CHECK(fixture.disk.now_ns() - before_ns <= 6'100'000'000);
}

TEST_CASE("sim: duplicate and unknown completions come on top, after the real one") {
    Fixture fixture({.duplicate = 0.5, .unknown = 0.5});
    Bytes buffer(block_bytes);
    int repeated = 0;
    int unknown = 0;
    std::array<bool, 100> seen{};
    for (std::size_t round = 0; round < seen.size(); ++round) {
        fixture.start(Op::read, 0, buffer);
        while (const auto completion = fixture.finish(100'000'000)) {
            if (completion->id == 0 || completion->id > seen.size()) {
                ++unknown;
            } else if (seen[completion->id - 1]) {
                ++repeated;
            } else {
                seen[completion->id - 1] = true;
                CHECK(completion->result == block_bytes);
            }
        }
    }
    CHECK(std::ranges::count(seen, true) == 100);
    CHECK(repeated + unknown == 100);
    CHECK(repeated > 30);
    CHECK(unknown > 5);
    CHECK(fixture.disk.in_flight() == 0);
}

TEST_CASE("sim: completions come in random order") {
    Fixture fixture({.reorder = 1});
    std::vector<Bytes> buffers(32, Bytes(block_bytes));
    std::vector<std::uint64_t> order;
    for (Bytes& buffer : buffers) fixture.start(Op::read, 0, buffer);
    while (fixture.disk.in_flight() > 0) order.push_back(fixture.finish()->id);
    CHECK(!std::ranges::is_sorted(order));
    std::ranges::sort(order);
    CHECK(std::ranges::adjacent_find(order) == order.end());
    CHECK(order.size() == 32);
}

TEST_CASE("sim: requests share the bandwidth, some are slow") {
    Fixture fixture;
    fixture.disk.set_service(
        {.base_ns = 1000, .jitter_ns = 0, .bytes_per_second = 1'000'000'000, .tail_chance = 0});
    std::vector<Bytes> buffers(16, Bytes(65536));
    std::int64_t before_ns = fixture.disk.now_ns();
    for (Bytes& buffer : buffers) fixture.start(Op::read, 0, buffer);
    while (fixture.disk.in_flight() > 0) fixture.finish();
    CHECK(fixture.disk.now_ns() - before_ns >= 16 * 65536);
    CHECK(fixture.disk.now_ns() - before_ns <= 16 * 65536 + 10'000);

    fixture.disk.set_service({.base_ns = 1000, .tail_chance = 0.1, .tail_ns_max = 1'000'000});
    int slow = 0;
    for (int round = 0; round < 1000; ++round) {
        before_ns = fixture.disk.now_ns();
        Bytes buffer(512);
        fixture.read(0, buffer);
        slow += fixture.disk.now_ns() - before_ns > 100'000 ? 1 : 0;
    }
    CHECK(slow > 10);
    CHECK(slow < 100);
}

TEST_CASE("sim: a crash drops what is in flight and may undo or tear what was not synced") {
    int kept = 0;
    int lost = 0;
    int torn = 0;
    for (std::uint64_t seed = 1; seed <= 60; ++seed) {
        Fixture fixture({}, seed);
        const Bytes synced = pattern(20);
        const Bytes written = pattern(21);
        fixture.write(0, synced);
        fixture.disk.file(0).sync();
        fixture.write(0, written);
        Bytes in_flight = pattern(22);
        fixture.start(Op::write, 65536, in_flight);
        Bytes target(block_bytes);
        fixture.start(Op::read, 0, target);
        fixture.disk.crash({.lost = 0.3, .torn = 0.5});
        CHECK(fixture.disk.in_flight() == 0);
        fixture.disk.attach();
        CHECK(!fixture.finish().has_value());
        CHECK(std::ranges::count(target, std::byte{0}) == block_bytes);
        const std::size_t sectors = equal_sectors(fixture.on_disk(0), written);
        CHECK(equal_sectors(fixture.on_disk(0), synced) + sectors == 8);
        kept += sectors == 8 ? 1 : 0;
        lost += sectors == 0 ? 1 : 0;
        torn += sectors % 8 != 0 ? 1 : 0;
        CHECK(fixture.on_disk(65536) != in_flight);
    }
    CHECK(kept > 8);
    CHECK(lost > 5);
    CHECK(torn > 8);
}

TEST_CASE("sim: a lost write does not take later ones of the same place with it") {
    // The journal is small, so that old writes fall out of it and wrap around.
    for (std::uint64_t seed = 1; seed <= 50; ++seed) {
        SimFile file(65536, 10'000);
        SimRandom random(seed);
        std::vector<std::vector<std::uint64_t>> history(128, std::vector<std::uint64_t>{0});
        for (std::uint64_t round = 1; round <= 100; ++round) {
            const std::uint64_t first = random.below(120);
            const std::uint64_t count = 1 + random.below(8);
            Bytes bytes(count * 512);
            for (std::uint64_t i = 0; i < count; ++i) {
                std::memcpy(&bytes[i * 512], &round, sizeof round);
                history[first + i].push_back(round);
            }
            file.write_unsynced(first * 512, bytes);
        }
        CHECK(file.unsynced_writes() > 0);
        CHECK(file.unsynced_writes() < 30);
        SUBCASE("all kept") {
            file.crash(random, 0, 0);
            for (std::uint64_t sector = 0; sector < 128; ++sector) {
                Bytes found(8);
                file.read(sector * 512, found);
                CHECK(std::memcmp(found.data(), &history[sector].back(), 8) == 0);
            }
        }
        SUBCASE("some lost: every sector is one of those once written there") {
            file.crash(random, 0.5, 0.5);
            for (std::uint64_t sector = 0; sector < 128; ++sector) {
                Bytes found(8);
                file.read(sector * 512, found);
                std::uint64_t version = 0;
                std::memcpy(&version, found.data(), 8);
                CHECK(std::ranges::find(history[sector], version) != history[sector].end());
            }
        }
    }
}

TEST_CASE("sim: after abandon nothing is reaped, but buffers are still touched") {
    Fixture fixture;
    fixture.disk.file(0).write(0, pattern(30));
    Bytes buffer(block_bytes);
    fixture.start(Op::read, 0, buffer);
    fixture.disk.abandon();
    CHECK(!fixture.finish().has_value());
    CHECK(buffer == pattern(30));
    CHECK(fixture.disk.in_flight() == 1);
    fixture.disk.restart();
    fixture.disk.attach();
    CHECK(fixture.disk.in_flight() == 0);
}

TEST_CASE("sim: healing ends all faults") {
    Fixture fixture({.eio = 0.5, .hang = 0.5});
    std::vector<Bytes> buffers(20, Bytes(block_bytes));
    for (Bytes& buffer : buffers) fixture.start(Op::read, 0, buffer);
    fixture.disk.advance(1'000'000'000);
    CHECK(fixture.disk.hung() > 0);
    fixture.disk.heal();
    while (fixture.disk.in_flight() > 0) REQUIRE(fixture.finish().has_value());
    for (int round = 0; round < 50; ++round) CHECK(fixture.read(0, buffers[0]) == block_bytes);
}

namespace {

// A mixed load with all faults on: what the trace hash and the disk look like at its end.
std::pair<std::uint64_t, Bytes> mixed_run(std::uint64_t seed, int rounds) {
    Fixture fixture(SimFaults::all(3), seed);
    SimRandom random(seed + 1);
    std::vector<Bytes> buffers(32, Bytes(16384));
    std::vector<std::size_t> owners(1, 0);
    std::vector<std::size_t> free_buffers;
    for (std::size_t i = 0; i < buffers.size(); ++i) free_buffers.push_back(i);
    std::array<Completion, 8> completions;
    for (int round = 0; round < rounds; ++round) {
        if (!free_buffers.empty()) {
            const std::size_t buffer = free_buffers.back();
            free_buffers.pop_back();
            owners.push_back(buffer);
            const Op op = random.below(2) == 0 ? Op::read : Op::write;
            const std::uint64_t bytes = (1 + random.below(32)) * 512;
            fixture.start(op, random.below(1024) * 512, std::span(buffers[buffer]).first(bytes));
        } else {
            fixture.disk.wait(fixture.disk.now_ns() + 1'000'000);
            if (round % 1000 == 0) fixture.disk.thaw();
        }
        const std::size_t count = fixture.disk.reap(completions);
        for (std::size_t i = 0; i < count; ++i) {
            const std::uint64_t id = completions[i].id;
            if (id == 0 || id >= owners.size() || owners[id] == SIZE_MAX) continue;
            free_buffers.push_back(owners[id]);
            owners[id] = SIZE_MAX;
        }
    }
    for (std::size_t fault = 1; fault < sim_fault_count; ++fault) {
        INFO(sim_fault_name(static_cast<SimFault>(fault)));
        CHECK(fixture.disk.struck(static_cast<SimFault>(fault)) > 0);
    }
    return {fixture.disk.trace_hash(), fixture.disk.file(0).snapshot()};
}

}  // namespace

TEST_CASE("sim: the same seed replays the same run, another seed another") {
    const auto first = mixed_run(1, 30'000);
    const auto again = mixed_run(1, 30'000);
    const auto other = mixed_run(2, 30'000);
    CHECK(first.first == again.first);
    CHECK(first.second == again.second);
    CHECK(first.first != other.first);
}

// The contract of io/backend.hpp, put to every backend. What only a real kernel can do (errors,
// hangs, signals) is in test_backend_real.cpp.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "backend_contract.hpp"

using namespace kvdisk;
using namespace kvdisk::test;

namespace {

constexpr std::uint32_t block_bytes = 4096;

// A request for the numbered block of file 0, from the same block of `memory`.
io::Request block_request(std::uint64_t id, std::byte* memory, io::Op op, std::uint64_t block) {
    return {.id = id,
            .offset = block * block_bytes,
            .data = memory + block * block_bytes,
            .length = block_bytes,
            .op = op};
}

}  // namespace

TEST_CASE("contract: every request completes exactly once with its id") {
    KVDISK_EACH_BACKEND(contract_case) {
        Memory memory(16 * block_bytes);
        auto subject = contract_case.make({});
        std::uint64_t id = 1000;
        for (int round = 0; round < 50; ++round) {
            std::multiset<std::uint64_t> expected;
            for (std::uint64_t block = 0; block < 16; ++block) {
                id += 1 + id % 3;
                expected.insert(id);
                subject->backend().push(block_request(
                    id, memory.data(), round % 2 == 0 ? io::Op::write : io::Op::read, block));
            }
            std::multiset<std::uint64_t> seen;
            for (const io::Completion& completion : collect(*subject, 16)) {
                seen.insert(completion.id);
                CHECK(completion.result == block_bytes);
            }
            REQUIRE(seen == expected);
            REQUIRE(subject->backend().in_flight() == 0);
        }
        CHECK(subject->backend().stats().completed == 16 * 50);
        CHECK(subject->backend().stats().submitted == 16 * 50);
        CHECK(subject->backend().stats().unknown_completions == 0);
    }
}

TEST_CASE("contract: bytes come back as they were written, from areas and from other memory") {
    KVDISK_EACH_BACKEND(contract_case) {
        Memory first(4 * block_bytes);
        Memory second(4 * block_bytes);
        Memory other(4 * block_bytes);
        auto subject = contract_case.make(
            {.file_bytes = {1 << 20, 1 << 20}, .areas = {first.span(), second.span()}});
        io::Backend& backend = subject->backend();
        const auto move = [&](std::byte* data, std::uint16_t area, std::uint16_t file, io::Op op) {
            static std::uint64_t id = 0;
            backend.push({.id = ++id,
                          .offset = 8 * block_bytes,
                          .data = data + block_bytes,
                          .length = 2 * block_bytes,
                          .file = file,
                          .area = area,
                          .op = op});
            const auto completions = collect(*subject, 1);
            REQUIRE(completions.size() == 1);
            REQUIRE(completions[0].result == 2 * block_bytes);
        };
        std::fill_n(first.data(), 4 * block_bytes, std::byte{1});
        std::fill_n(other.data(), 4 * block_bytes, std::byte{2});
        move(first.data(), 0, 0, io::Op::write);
        move(other.data(), io::area_none, 1, io::Op::write);
        move(second.data(), 1, 1, io::Op::read);
        move(other.data(), io::area_none, 0, io::Op::read);
        const auto count = [](const Memory& memory, int value) {
            return std::count(memory.data(), memory.data() + 4 * block_bytes,
                              static_cast<std::byte>(value));
        };
        CHECK(count(second, 2) == 2 * block_bytes);  // nothing beyond what was asked for
        CHECK(count(second, 0) == 2 * block_bytes);
        CHECK(count(other, 1) == 2 * block_bytes);
        CHECK(count(other, 2) == 2 * block_bytes);
    }
}

TEST_CASE("contract: a read across the end of the file is short, one beyond it moves nothing") {
    KVDISK_EACH_BACKEND(contract_case) {
        Memory memory(4 * block_bytes);
        auto subject = contract_case.make({.file_bytes = {10 * block_bytes + 512}});
        const auto read = [&](std::uint64_t id, std::uint64_t offset) {
            subject->backend().push(
                {.id = id, .offset = offset, .data = memory.data(), .length = 4 * block_bytes});
            const auto completions = collect(*subject, 1);
            REQUIRE(completions.size() == 1);
            return completions[0].result;
        };
        CHECK(read(1, 8 * block_bytes) == 2 * block_bytes + 512);
        CHECK(read(2, 10 * block_bytes) == 512);
        CHECK(read(3, 20 * block_bytes) == 0);
    }
}

TEST_CASE("contract: a request counts as in flight from push until it is reaped") {
    KVDISK_EACH_BACKEND(contract_case) {
        Memory memory(16 * block_bytes);
        auto subject = contract_case.make({.depth = 5});
        io::Backend& backend = subject->backend();
        CHECK(backend.depth() == 5);
        for (std::uint64_t block = 0; block < 5; ++block) {
            CHECK(backend.in_flight() == block);
            backend.push(block_request(block + 1, memory.data(), io::Op::read, block));
        }
        backend.submit();
        CHECK(backend.in_flight() == 5);
        const std::int64_t give_up_ns = subject->now_ns() + 10'000'000'000;
        for (std::uint32_t left = 5; left > 0;) {
            REQUIRE(subject->now_ns() < give_up_ns);
            backend.wait(give_up_ns);
            io::Completion one[1];
            left -= static_cast<std::uint32_t>(backend.reap(one));
            CHECK(backend.in_flight() == left);
        }
        io::Completion none[4];
        CHECK(backend.reap(none) == 0);
    }
}

TEST_CASE("contract: the depth can be used up again and again, at its smallest and its largest") {
    KVDISK_EACH_BACKEND(contract_case) {
        for (const std::uint32_t depth : {1U, 2U, 3U, 4096U}) {
            Memory memory(8 * block_bytes);
            auto subject = contract_case.make({.depth = depth});
            for (std::uint64_t round = 0; round < 3; ++round) {
                for (std::uint64_t i = 1; i <= depth; ++i) {
                    subject->backend().push({.id = round * depth + i,
                                             .offset = i % 64 * block_bytes,
                                             .data = memory.data() + (i - 1) * 8,
                                             .length = 8});
                }
                REQUIRE(collect(*subject, depth).size() == depth);
            }
        }
    }
}

TEST_CASE("contract: wait ends at its time, not long after, without spinning") {
    KVDISK_EACH_BACKEND(contract_case) {
        auto subject = contract_case.make({});
        const std::int64_t until_ns = subject->now_ns() + 50'000'000;
        int returns = 0;
        while (subject->now_ns() < until_ns) {
            subject->backend().wait(until_ns);
            ++returns;
        }
        CHECK(returns <= 5);
        CHECK(subject->now_ns() < until_ns + 20'000'000'000);  // liveness, on a busy machine
        subject->backend().wait(until_ns);                     // past: at once
        subject->backend().wait(0);
    }
}

TEST_CASE("contract: wake ends the next wait when nobody waits yet") {
    KVDISK_EACH_BACKEND(contract_case) {
        auto subject = contract_case.make({});
        for (int round = 0; round < 100; ++round) {
            subject->backend().wake();
            subject->backend().wait(-1);
        }
    }
}

TEST_CASE("contract: no wake from another thread is lost") {
    KVDISK_EACH_BACKEND(contract_case) {
        if (contract_case.real) {
            auto subject = contract_case.make({});
            std::atomic<int> asked{0};
            std::atomic<int> answered{0};
            std::thread other([&] {
                for (int round = 1; round <= 2000; ++round) {
                    asked.store(round);
                    subject->backend().wake();
                    while (answered.load() < round) std::this_thread::yield();
                    if (round % 200 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
                }
            });
            while (answered.load() < 2000) {
                if (asked.load() > answered.load()) {
                    answered.store(asked.load());
                } else {
                    subject->backend().wait(-1);
                }
            }
            other.join();
        }
    }
}

TEST_CASE("contract: a wake beside I/O costs no completion") {
    KVDISK_EACH_BACKEND(contract_case) {
        Memory memory(16 * block_bytes);
        auto subject = contract_case.make({});
        for (std::uint64_t round = 0; round < 100; ++round) {
            for (std::uint64_t block = 0; block < 16; ++block) {
                subject->backend().push(
                    block_request(round * 16 + block + 1, memory.data(), io::Op::read, block));
            }
            subject->backend().wake();
            REQUIRE(collect(*subject, 16).size() == 16);
        }
    }
}

TEST_CASE("contract: a backend may go unused, or with nothing in flight") {
    KVDISK_EACH_BACKEND(contract_case) {
        for (int round = 0; round < 20; ++round) contract_case.make({});
        Memory memory(16 * block_bytes);
        auto subject = contract_case.make({.areas = {memory.span()}});
        subject->backend().push(block_request(1, memory.data(), io::Op::read, 0));
        CHECK(collect(*subject, 1).size() == 1);
    }
}

TEST_CASE("contract: 10,000 random operations at random depth move the right bytes") {
    KVDISK_EACH_BACKEND(contract_case) {
        const std::uint64_t seed = std::random_device{}();
        CAPTURE(seed);
        for (const bool direct : {false, true}) {
            const std::uint32_t operations = direct ? 3'000 : 10'000;  // a real disk is slow
            const SoakResult result =
                soak(contract_case, {.seed = seed, .operations = operations, .direct = direct});
            CHECK(result.completed == operations);
            CHECK(result.wrong_results == 0);
            CHECK(result.wrong_bytes == 0);
            CHECK(result.strange_ids == 0);
        }
    }
}

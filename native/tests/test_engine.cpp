// The engine with its threads, over real files: what callers on several threads see.
// ThreadSanitizer runs these cases to prove the queues between them.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/engine.hpp"

namespace {

using namespace kvdisk;

constexpr std::uint64_t slot_bytes = 16384;
constexpr std::uint64_t slot_count = 256;
constexpr std::int64_t patience_ns = 60'000'000'000;

// Two unlinked files and the blocks' memory.
struct Fixture {
    int data_fd = open_unlinked(slot_count * slot_bytes);
    int record_fd = open_unlinked(0);
    std::vector<std::byte> blocks = std::vector<std::byte>(2 * slot_count * slot_bytes);

    ~Fixture() {
        ::close(data_fd);
        ::close(record_fd);
    }

    static int open_unlinked(std::uint64_t bytes) {
        const char* const directory = std::getenv("KVDISK_TEST_DIR");
        std::string name =
            std::string(directory == nullptr ? "/tmp" : directory) + "/kvdisk-XXXXXX";
        const int file = ::mkstemp(name.data());
        REQUIRE(file >= 0);
        ::unlink(name.c_str());
        REQUIRE(::ftruncate(file, static_cast<off_t>(bytes)) == 0);
        return file;
    }

    EngineOptions options(const char* backend, std::uint32_t shards) {
        EngineOptions options;
        options.layout.regions = {
            {blocks.data(), slot_bytes / 2, slot_bytes / 2},
            {blocks.data() + slot_count * slot_bytes, slot_bytes / 2, slot_bytes / 2}};
        options.layout.block_count = 2 * slot_count;
        options.layout.block_bytes = slot_bytes;
        options.slot_bytes = slot_bytes;
        options.slot_count = slot_count;
        options.data_fd = data_fd;
        options.record_fd = record_fd;
        options.backend = backend;
        options.shards = shards;
        options.iodepth = 4;
        options.buffers = 12;
        options.load_reserve = 4;
        options.rows_per_buffer = 4;
        return options;
    }

    void fill(std::uint64_t block, unsigned seed) {
        for (std::uint64_t half = 0; half < 2; ++half) {
            std::byte* const segment =
                blocks.data() + half * slot_count * slot_bytes + block * slot_bytes / 2;
            for (std::uint64_t i = 0; i < slot_bytes / 2; ++i) {
                segment[i] = static_cast<std::byte>(seed * 31 + i * (half + 3));
            }
        }
    }

    bool equal(std::uint64_t first, std::uint64_t second) const {
        const std::uint64_t segment_bytes = slot_bytes / 2;
        for (std::uint64_t half = 0; half < 2; ++half) {
            const std::byte* const base = blocks.data() + half * slot_count * slot_bytes;
            if (std::memcmp(base + first * segment_bytes, base + second * segment_bytes,
                            segment_bytes) != 0) {
                return false;
            }
        }
        return true;
    }
};

Row row(std::uint64_t slot, std::uint64_t block) {
    Row made{.block_id = block, .slot = slot};
    made.key.length = 8;
    std::memcpy(made.key.bytes.data(), &slot, 8);
    return made;
}

// One thread takes the events for everyone, as a serving engine's scheduler does.
class Collector {
  public:
    explicit Collector(Engine& engine) : engine_(engine), thread_([this] { collect(); }) {}

    ~Collector() {
        stopping_ = true;
        thread_.join();
    }

    FinishedTransfer take(std::uint64_t id) {
        for (int tries = 0; tries < 60'000; ++tries) {
            {
                const std::lock_guard lock(mutex_);
                if (const auto found = finished_.find(id); found != finished_.end()) {
                    return found->second;
                }
            }
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        FAIL("a transfer did not end");
        return {};
    }

    std::size_t sources_freed() {
        const std::lock_guard lock(mutex_);
        return sources_freed_;
    }

  private:
    void collect() {
        while (!stopping_) {
            engine_.wait(1'000'000);
            Events events = engine_.poll();
            const std::lock_guard lock(mutex_);
            sources_freed_ += events.source_free.size();
            for (FinishedTransfer& transfer : events.finished) {
                const bool first = finished_.emplace(transfer.id, transfer).second;
                if (!first) std::abort();  // ended twice
            }
        }
    }

    Engine& engine_;
    std::atomic<bool> stopping_ = false;
    std::mutex mutex_;
    std::map<std::uint64_t, FinishedTransfer> finished_;
    std::size_t sources_freed_ = 0;
    std::thread thread_;
};

bool all_ok(const FinishedTransfer& transfer) {
    for (const RowResult& result : transfer.results) {
        if (result.status != RowStatus::ok) return false;
    }
    return true;
}

}  // namespace

TEST_CASE("engine: several threads store and load at once") {
    for (const char* const backend : {"uring", "threads"}) {
        SUBCASE(backend) {
            Fixture fixture;
            Engine engine(fixture.options(backend, 3));
            constexpr std::uint64_t caller_count = 3;
            constexpr std::uint64_t slots_each = slot_count / caller_count / 2;
            for (std::uint64_t block = 0; block < slot_count / 2; ++block) {
                fixture.fill(block, static_cast<unsigned>(block));
            }
            std::atomic<int> wrong = 0;
            {
                Collector collector(engine);
                std::vector<std::thread> callers;
                for (std::uint64_t caller = 0; caller < caller_count; ++caller) {
                    callers.emplace_back([&, caller] {
                        for (int round = 0; round < 20; ++round) {
                            std::vector<Row> stores, loads;
                            for (std::uint64_t i = 0; i < slots_each; ++i) {
                                const std::uint64_t slot = caller * slots_each + i;
                                stores.push_back(row(slot, slot));
                                loads.push_back(row(slot, slot + slot_count / 2));
                            }
                            const std::uint64_t stored =
                                engine.submit(Direction::store, stores, patience_ns, -1, 0);
                            if (!all_ok(collector.take(stored))) ++wrong;
                            const std::uint64_t loaded =
                                engine.submit(Direction::load, loads, patience_ns, -1, 0);
                            engine.stats();
                            if (!all_ok(collector.take(loaded))) ++wrong;
                            for (const Row& each : stores) {
                                if (!fixture.equal(each.slot, each.slot + slot_count / 2)) ++wrong;
                            }
                        }
                    });
                }
                for (std::thread& caller : callers) caller.join();
                CHECK(collector.sources_freed() == caller_count * 20);
            }
            CHECK(wrong == 0);
            CHECK(engine.stats().ring.used == 0);
            CHECK(engine.close(patience_ns) == 0);
        }
    }
}

TEST_CASE("engine: closing ends what is in flight, and later calls are refused") {
    Fixture fixture;
    Engine engine(fixture.options("auto", 2));
    std::vector<Row> rows;
    for (std::uint64_t slot = 0; slot < slot_count; ++slot) rows.push_back(row(slot, slot));
    const std::uint64_t id = engine.submit(Direction::store, rows, -1, -1, 0);
    CHECK(engine.close(patience_ns) == 0);
    const Events events = engine.poll();
    REQUIRE(events.finished.size() == 1);
    CHECK(events.finished[0].id == id);
    CHECK(all_ok(events.finished[0]));
    CHECK(events.source_free == std::vector{id});
    CHECK_THROWS_AS(engine.submit(Direction::store, rows, -1, -1, 0), std::logic_error);
    CHECK(engine.close(patience_ns) == 0);
}

TEST_CASE("engine: what was stored is found by the next one") {
    Fixture fixture;
    std::vector<Row> stores, loads;
    for (std::uint64_t slot = 0; slot < 100; ++slot) {
        fixture.fill(slot, static_cast<unsigned>(slot + 7));
        stores.push_back(row(slot, slot));
        loads.push_back(row(slot, slot + slot_count / 2));
    }
    {
        Engine engine(fixture.options("auto", 1));
        CHECK(engine.take_restored().empty());
        engine.submit(Direction::store, stores, -1, -1, 0);
        CHECK(engine.close(patience_ns) == 0);
    }
    EngineOptions options = fixture.options("auto", 2);
    {
        Engine engine(options);
        CHECK(engine.take_restored().size() == 100);
        engine.submit(Direction::load, loads, -1, -1, 0);
        CHECK(engine.close(patience_ns) == 0);
        const Events events = engine.poll();
        REQUIRE(events.finished.size() == 1);
        CHECK(all_ok(events.finished[0]));
        for (const Row& each : stores) {
            CHECK(fixture.equal(each.slot, each.slot + slot_count / 2));
        }
    }
    options.epoch = 2;  // everything before an invalidation is void
    Engine engine(options);
    CHECK(engine.take_restored().empty());
}

TEST_CASE("engine: what cannot work is refused at open") {
    Fixture fixture;
    const EngineOptions good = fixture.options("auto", 1);
    const auto refused = [&good](auto change) {
        EngineOptions options = good;
        change(options);
        CHECK_THROWS_AS(Engine{options}, std::invalid_argument);
    };
    refused([](EngineOptions& o) { o.slot_bytes = slot_bytes - 512; });
    refused([](EngineOptions& o) { o.slot_bytes = slot_bytes + 1; });
    refused([](EngineOptions& o) { o.iodepth = 0; });
    refused([](EngineOptions& o) { o.shards = 65; });
    refused([](EngineOptions& o) { o.load_reserve = o.buffers; });
    refused([](EngineOptions& o) { o.alignment = 3000; });
    refused([](EngineOptions& o) { o.direct_stores = true; });
    refused([](EngineOptions& o) { o.backend = "libaio"; });
    refused([](EngineOptions& o) { o.layout.block_bytes += 1; });
}

TEST_CASE("engine: the direct path moves blocks without a bounce copy") {
    Fixture fixture;
    void* memory = nullptr;
    REQUIRE(::posix_memalign(&memory, 4096, 2 * slot_count * slot_bytes) == 0);
    auto* const blocks = static_cast<std::byte*>(memory);
    EngineOptions options = fixture.options("auto", 1);
    options.layout.regions = {{blocks, slot_bytes, slot_bytes}};
    options.direct_stores = true;
    options.direct_loads = true;
    std::vector<Row> stores, loads;
    for (std::uint64_t slot = 0; slot < slot_count; ++slot) {
        std::memset(blocks + slot * slot_bytes, static_cast<int>(slot + 1), slot_bytes);
        stores.push_back(row(slot, slot));
        loads.push_back(row(slot, slot + slot_count));
    }
    Engine engine(options);
    engine.submit(Direction::store, stores, -1, -1, 0);
    std::size_t ended = 0;
    const auto wait_for = [&](std::size_t count) {
        while (ended < count) {
            REQUIRE(engine.wait(patience_ns));
            for (const FinishedTransfer& transfer : engine.poll().finished) {
                CHECK(all_ok(transfer));
                ++ended;
            }
        }
    };
    wait_for(1);
    engine.submit(Direction::load, loads, -1, -1, 0);
    wait_for(2);
    CHECK(engine.close(patience_ns) == 0);
    CHECK(std::memcmp(blocks, blocks + slot_count * slot_bytes, slot_count * slot_bytes) == 0);
    std::free(memory);
}

// The engine with its threads, over real files: what callers on several threads see.
// ThreadSanitizer runs these cases to prove the queues between them.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <iterator>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/engine.hpp"
#include "pipeline/outbox.hpp"

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

// The record file in memory with pages missing: reading those through /proc/self/mem is a true EIO.
// No two in a row: into a hole of more than a page something else could be mapped.
class RecordsWithHoles {
  public:
    RecordsWithHoles(int record_fd, std::size_t pages, std::vector<std::size_t> holes)
        : pages_(pages), holes_(std::move(holes)) {
        memory_ =
            static_cast<std::byte*>(::mmap(nullptr, pages * page_bytes, PROT_READ | PROT_WRITE,
                                           MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        REQUIRE(memory_ != MAP_FAILED);
        REQUIRE(::pread(record_fd, memory_, pages * page_bytes, 0) > 0);
        for (const std::size_t page : holes_) unmap(page);
        fd = ::open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
        REQUIRE(fd >= 0);
    }
    RecordsWithHoles(const RecordsWithHoles&) = delete;
    RecordsWithHoles& operator=(const RecordsWithHoles&) = delete;
    ~RecordsWithHoles() {
        ::close(fd);
        for (std::size_t page = 0; page < pages_; ++page) {
            if (std::ranges::find(holes_, page) == holes_.end()) unmap(page);
        }
    }

    std::uint64_t offset() const noexcept { return reinterpret_cast<std::uintptr_t>(memory_); }

    int fd = -1;

  private:
    static constexpr std::size_t page_bytes = 4096;

    void unmap(std::size_t page) { ::munmap(memory_ + page * page_bytes, page_bytes); }

    std::byte* memory_ = nullptr;
    std::size_t pages_;
    std::vector<std::size_t> holes_;
};

TEST_CASE("A15 engine: a page of records that the disk has lost costs its own blocks") {
    Fixture fixture;
    std::vector<Row> stores;
    for (std::uint64_t slot = 0; slot < 100; ++slot) stores.push_back(row(slot, slot));
    {
        Engine engine(fixture.options("threads", 1));
        engine.submit(Direction::store, stores, -1, -1, 0);
        CHECK(engine.close(patience_ns) == 0);
    }
    for (const std::size_t hole : {0, 1, 3}) {
        const RecordsWithHoles records(fixture.record_fd, slot_count / 32, {hole});
        EngineOptions options = fixture.options("threads", 1);
        options.record_fd = records.fd;
        options.record_offset = records.offset();
        Engine engine(options);
        CHECK(engine.lost_record_pages() == 1);
        CHECK(engine.take_restored().size() == (hole == 3 ? 96 : 68));
    }
}

TEST_CASE("A15 engine: behind sixteen lost pages of records the rest counts as lost too") {
    Fixture fixture;
    constexpr std::size_t pages = 40;
    EngineOptions options = fixture.options("threads", 1);
    options.slot_count = pages * records_per_page;
    {
        Engine engine(options);
        std::vector<Row> stores;
        for (const std::uint64_t page : {0, 30, 39}) {
            stores.push_back(row(page * records_per_page, stores.size()));
        }
        engine.submit(Direction::store, stores, -1, -1, 0);
        CHECK(engine.close(patience_ns) == 0);
    }
    std::vector<std::size_t> holes;
    for (std::size_t page = 1; holes.size() < 17; page += 2) holes.push_back(page);
    const RecordsWithHoles records(fixture.record_fd, pages, holes);
    options.record_fd = records.fd;
    options.record_offset = records.offset();
    Engine engine(options);
    CHECK(engine.lost_record_pages() == 16 + 8);  // the sixteenth is page 31
    const RestoredRecords restored = engine.take_restored();
    CHECK(restored.slots == std::vector<std::uint64_t>{0, 30 * records_per_page});
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

namespace {

// A backend whose submissions hang while somebody holds the gate, as in the kernel on some file
// systems.
struct Gate {
    std::mutex mutex;
    std::condition_variable changed;
    bool closed = false;
    bool hanging = false;  // somebody waits at it

    void set(bool value) {
        const std::lock_guard lock(mutex);
        closed = value;
        changed.notify_all();
    }
    void pass() {
        std::unique_lock lock(mutex);
        hanging = closed;
        changed.notify_all();
        changed.wait(lock, [this] { return !closed; });
        hanging = false;
    }
    void wait_until_hanging() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return hanging; });
    }
};

class HangingBackend final : public io::Backend {
  public:
    HangingBackend(std::unique_ptr<io::Backend> backend, std::shared_ptr<Gate> gate)
        : backend_(std::move(backend)), gate_(std::move(gate)) {}
    const char* name() const noexcept override { return "hanging"; }
    void attach() override { backend_->attach(); }
    std::uint32_t depth() const noexcept override { return backend_->depth(); }
    std::uint32_t in_flight() const noexcept override { return backend_->in_flight(); }
    void push(const io::Request& request) override {
        backend_->push(request);
        pushed_ = true;
    }
    void submit() override {
        if (std::exchange(pushed_, false)) gate_->pass();
        backend_->submit();
    }
    std::size_t reap(std::span<io::Completion> completions) override {
        return backend_->reap(completions);
    }
    void wait(std::int64_t until_ns) override { backend_->wait(until_ns); }
    void wake() noexcept override { backend_->wake(); }
    io::BackendStats stats() const override { return backend_->stats(); }
    void abandon() noexcept override { backend_->abandon(); }

  private:
    std::unique_ptr<io::Backend> backend_;
    std::shared_ptr<Gate> gate_;
    bool pushed_ = false;
};

void hear(Engine& engine, Events& heard) {
    Events events = engine.poll();
    const auto append = [](auto& all, auto& more) {
        all.insert(all.end(), std::make_move_iterator(more.begin()),
                   std::make_move_iterator(more.end()));
    };
    append(heard.source_free, events.source_free);
    append(heard.released_slots, events.released_slots);
    append(heard.finished, events.finished);
}

// The results of a transfer, or nothing when it does not end within twenty seconds: liveness, on a
// busy machine.
std::vector<RowResult> results_of(Engine& engine, std::uint64_t id, Events& heard) {
    const std::int64_t give_up_ns = MonotonicClock().now_ns() + 20'000'000'000;
    while (MonotonicClock().now_ns() < give_up_ns) {
        const auto found = std::ranges::find(heard.finished, id, &FinishedTransfer::id);
        if (found != heard.finished.end()) return found->results;
        engine.wait(1'000'000'000);
        hear(engine, heard);
    }
    return {};
}

}  // namespace

TEST_CASE("engine: transfers end in time although their thread hangs in a submission") {
    Fixture fixture;
    const auto gate = std::make_shared<Gate>();
    EngineOptions options = fixture.options("threads", 1);
    options.make_backend = [gate](const io::BackendOptions& backend) {
        return std::make_unique<HangingBackend>(io::make_threads(backend), gate);
    };
    Engine engine(options);
    Events heard;
    for (std::uint64_t slot : {1, 2}) fixture.fill(slot, static_cast<unsigned>(slot));
    const std::uint64_t stored =
        engine.submit(Direction::store, {row(1, 1), row(2, 2)}, patience_ns, -1, 0);
    REQUIRE(results_of(engine, stored, heard)[0].status == RowStatus::ok);

    gate->set(true);
    const std::uint64_t at_disk =
        engine.submit(Direction::load, {row(1, slot_count)}, 200'000'000, -1, 0);
    gate->wait_until_hanging();
    const std::uint64_t unheard =  // the thread never learns of these before they are over
        engine.submit(Direction::load, {row(2, slot_count + 1)}, 200'000'000, -1, 0);
    const std::uint64_t store = engine.submit(Direction::store, {row(3, 3)}, 200'000'000, -1, 0);
    const std::vector<RowResult> first = results_of(engine, at_disk, heard);
    REQUIRE(first.size() == 1);  // else it did not end in time
    CHECK(first[0].status == RowStatus::timed_out);
    CHECK(first[0].quarantined);
    for (const std::uint64_t id : {unheard, store}) {
        const std::vector<RowResult> later = results_of(engine, id, heard);
        REQUIRE(later.size() == 1);
        CHECK(later[0].status == RowStatus::timed_out);
        CHECK_FALSE(later[0].quarantined);
    }
    CHECK(std::ranges::count(heard.source_free, store) == 1);
    CHECK(heard.released_slots.empty());

    // The read comes after all, and writes to nobody's block.
    fixture.fill(slot_count, 77);
    fixture.fill(slot_count + 2, 77);
    gate->set(false);
    const std::uint64_t again =
        engine.submit(Direction::load, {row(2, slot_count + 1)}, patience_ns, -1, 0);
    REQUIRE(results_of(engine, again, heard)[0].status == RowStatus::ok);
    while (heard.released_slots.empty() && engine.wait(10'000'000'000)) hear(engine, heard);
    CHECK(heard.released_slots == std::vector<std::uint64_t>{1});
    CHECK(fixture.equal(slot_count, slot_count + 2));
    CHECK(fixture.equal(2, slot_count + 1));
    CHECK(engine.close(patience_ns) == 0);
}

// Found by reading: a slot could be told as released before the result that said it was held.
TEST_CASE("engine: a slot's release is told after the results of all that were open when it came") {
    Outbox outbox;
    const std::lock_guard lock(outbox.mutex);
    const std::vector<std::uint64_t> seven{7}, eight{8};
    outbox.open(1, {.parts_open = 2});
    outbox.open(2, {.parts_open = 1});
    outbox.release(seven);
    outbox.open(3, {.parts_open = 1});
    CHECK(outbox.empty());
    outbox.finish(2);
    outbox.release(eight);
    CHECK(outbox.events.released_slots.empty());
    outbox.finish(1);
    CHECK(outbox.events.released_slots == seven);
    outbox.finish(3);
    CHECK(outbox.events.released_slots == std::vector<std::uint64_t>{7, 8});
    outbox.events = {};
    outbox.release(seven);
    CHECK(outbox.events.released_slots == seven);
}

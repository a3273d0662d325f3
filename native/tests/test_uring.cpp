// What only io_uring can get wrong: a kernel that does not take submissions, a full completion
// queue, completions of nobody's request, refused registration. The kernel's answers are changed by
// standing in for io_uring_enter(2); the ring behind it is a real one.
#include <doctest/doctest.h>
#include <liburing.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <fstream>
#include <thread>

#include "backend_contract.hpp"
#include "io/uring.hpp"
#include "io/uring_ring.hpp"

using namespace kvdisk;
using namespace kvdisk::test;

namespace {

constexpr std::uint32_t block_bytes = 4096;

// What the stand-in for io_uring_enter does. One test at a time uses it, on one thread.
struct Kernel {
    int error = 0;          // to answer instead of entering; 0: enter
    unsigned every = 1;     // the answer comes on the first and then on every n-th call
    bool when_idle = true;  // also to calls that submit nothing
    std::uint64_t calls = 0;
    unsigned ring = 0;
};
Kernel kernel;

int enter(unsigned ring, unsigned to_submit, unsigned completions_min, unsigned flags,
          void* argument, std::size_t argument_bytes) {
    kernel.ring = ring;
    const std::uint64_t call = kernel.calls++;
    if (kernel.error != 0 && call % kernel.every == 0 && (to_submit > 0 || kernel.when_idle)) {
        return -kernel.error;
    }
    return io::enter_kernel(ring, to_submit, completions_min, flags, argument, argument_bytes);
}

struct Bench {
    explicit Bench(io::UringTuning tuning = {}, std::uint32_t depth = 16) : file(64 * block_bytes) {
        kernel = {};
        tuning.enter = enter;
        backend = io::make_uring_tuned({.files = {file.descriptor()}, .depth = depth}, tuning);
        backend->attach();
    }
    void push(std::uint64_t id, io::Op op = io::Op::read) {
        backend->push({.id = id,
                       .offset = id % 64 * block_bytes,
                       .data = memory.data(),
                       .length = block_bytes,
                       .op = op});
    }
    Memory memory{block_bytes};
    TemporaryFile file;
    std::unique_ptr<io::Backend> backend;
};

// Posts a completion to another ring, as if the kernel had made a mistake.
void post_completion(unsigned ring, std::uint64_t token, int result) {
    io_uring sender;
    REQUIRE(io_uring_queue_init(4, &sender, 0) == 0);
    io_uring_sqe* const entry = io_uring_get_sqe(&sender);
    io_uring_prep_rw(IORING_OP_MSG_RING, entry, static_cast<int>(ring), nullptr,
                     static_cast<unsigned>(result), token);
    io_uring_submit(&sender);
    io_uring_cqe* completion = nullptr;
    REQUIRE(io_uring_wait_cqe(&sender, &completion) == 0);
    CHECK(completion->res == 0);
    io_uring_queue_exit(&sender);
}

std::uint64_t pinned_kib() {
    std::ifstream status("/proc/self/status");
    for (std::string word; status >> word;) {
        if (word == "VmPin:") {
            std::uint64_t value = 0;
            status >> value;
            return value;
        }
    }
    return 0;
}

// A mapping of a file, which the kernel does not register.
class MappedFile {
  public:
    explicit MappedFile(std::size_t bytes)
        : bytes_(bytes),
          file_(bytes),
          data_(::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_.descriptor(), 0)) {
        REQUIRE(data_ != MAP_FAILED);
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;
    ~MappedFile() { ::munmap(data_, bytes_); }
    std::span<std::byte> span() const noexcept { return {static_cast<std::byte*>(data_), bytes_}; }

  private:
    std::size_t bytes_;
    TemporaryFile file_;
    void* data_;
};

}  // namespace

// ---------------------------------------------------------------- A29: submissions that are not
// taken

TEST_CASE("A29: a transient answer on the first and every third call costs nothing") {
    for (const int error : {EINTR, EAGAIN, EBUSY, ENOMEM}) {
        CAPTURE(error);
        Bench bench;
        kernel.error = error;
        kernel.every = 3;
        std::uint64_t id = 0;
        for (int round = 0; round < 100; ++round) {
            for (int i = 0; i < 16; ++i) bench.push(++id);
            const auto completions = collect(*bench.backend, 16);
            REQUIRE(completions.size() == 16);
            for (const io::Completion& completion : completions) {
                REQUIRE(completion.result == block_bytes);
            }
        }
        const io::BackendStats stats = bench.backend->stats();
        CHECK(stats.submitted == 1600);
        CHECK(stats.submit_retries > 0);
        CHECK(stats.unknown_completions == 0);
    }
}

TEST_CASE("A29: what the kernel never takes fails in bounded time, and can never reach it later") {
    for (const std::uint32_t submission_entries : {0U, 2U}) {
        CAPTURE(submission_entries);
        Bench bench({.submission_entries = submission_entries});
        std::fill_n(bench.memory.data(), block_bytes, std::byte{7});
        kernel.error = EAGAIN;
        for (std::uint64_t id = 1; id <= 16; ++id) bench.push(id, io::Op::write);
        const std::int64_t begun_ns = real_now_ns();
        const auto completions = collect(*bench.backend, 16);  // which has patience, but an end
        const std::int64_t took_ns = real_now_ns() - begun_ns;
        REQUIRE(completions.size() == 16);
        for (const io::Completion& completion : completions) CHECK(completion.result == -EAGAIN);
        CHECK(took_ns > 500'000'000);
        CHECK(kernel.calls < 500);

        kernel.error = 0;
        bench.push(100);
        const auto healed = collect(*bench.backend, 1);
        REQUIRE(healed.size() == 1);
        CHECK(healed[0].result == block_bytes);
        CHECK(bench.memory.data()[0] == std::byte{0});  // none of the writes was made
        CHECK(bench.backend->stats().submitted == 1);
    }
}

TEST_CASE("A29: submissions that are refused for good fail at once") {
    Bench bench;
    kernel.error = EPERM;
    bench.push(1);
    bench.backend->submit();
    io::Completion completions[2];
    REQUIRE(bench.backend->reap(completions) == 1);
    CHECK(completions[0].id == 1);
    CHECK(completions[0].result == -EPERM);
    CHECK(bench.backend->in_flight() == 0);
}

TEST_CASE("A29: a kernel that refuses to wait makes neither a busy loop nor a hang") {
    for (const int error : {EPERM, EBADR, EAGAIN, EBUSY}) {
        CAPTURE(error);
        Bench bench;
        bench.push(1);
        bench.backend->submit();
        kernel.error = error;
        kernel.calls = 0;
        const std::int64_t until_ns = real_now_ns() + 200'000'000;
        while (real_now_ns() < until_ns) bench.backend->wait(until_ns);
        CHECK(kernel.calls < 100);
        std::thread other([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(20));
            bench.backend->wake();
        });
        bench.backend->wait(-1);
        other.join();
        kernel.error = 0;
        CHECK(collect(*bench.backend, 1).size() == 1);
    }
}

TEST_CASE("A29: no wait is long while submissions are not taken") {
    Bench bench({.submission_entries = 2});
    kernel.error = EAGAIN;
    for (std::uint64_t id = 1; id <= 16; ++id) bench.push(id);
    bench.backend->submit();
    const std::int64_t begun_ns = real_now_ns();
    // No completion can come, and yet it returns.
    bench.backend->wait(-1);
    CHECK(real_now_ns() < begun_ns + 20'000'000'000);  // liveness, on a busy machine
    kernel.error = 0;
    CHECK(collect(*bench.backend, 16).size() == 16);
}

// ---------------------------------------------------------------- completions

TEST_CASE(
    "A29: more in flight than the completion queue holds: overflow is counted, nothing is lost") {
    Bench bench({.submission_entries = 4, .completion_entries = 4}, 256);
    std::uint64_t id = 0;
    for (int round = 0; round < 20; ++round) {
        std::set<std::uint64_t> seen;
        for (int i = 0; i < 256; ++i) bench.push(++id);
        for (const io::Completion& completion : collect(*bench.backend, 256)) {
            CHECK(completion.result == block_bytes);
            seen.insert(completion.id);
        }
        REQUIRE(seen.size() == 256);
    }
    CHECK(bench.backend->stats().overflows > 0);
}

TEST_CASE("A2: completions of unknown requests are counted and change nothing") {
    Bench bench;
    bench.push(1);
    REQUIRE(collect(*bench.backend, 1).size() == 1);
    const std::uint64_t used_token = 1U << 12;  // the first push, in the table's first place
    for (const std::uint64_t token : {std::uint64_t{0}, used_token, std::uint64_t{0xABCDEF}}) {
        post_completion(kernel.ring, token, 5);
    }
    bench.push(2);
    const auto completions = collect(*bench.backend, 1);
    REQUIRE(completions.size() == 1);
    CHECK(completions[0].id == 2);
    io::Completion more[4];
    CHECK(bench.backend->reap(more) == 0);
    CHECK(bench.backend->stats().unknown_completions == 3);
}

TEST_CASE(
    "a request is tried again when the kernel refused its priority, or ended it for a signal") {
    int pipe_ends[2];
    REQUIRE(::pipe(pipe_ends) == 0);
    Memory memory(block_bytes);
    for (const int error : {EINVAL, EINTR, EAGAIN}) {
        CAPTURE(error);
        kernel = {};
        auto backend = io::make_uring_tuned({.files = {pipe_ends[0]}}, {.enter = enter});
        backend->attach();
        backend->push(
            {.id = 1, .data = memory.data(), .length = 8, .priority = io::Priority::high});
        backend->submit();
        post_completion(kernel.ring, 1U << 12, -error);  // in the name of the request, which waits
        io::Completion completions[4];
        backend->wait(real_now_ns() + 50'000'000);
        CHECK(backend->reap(completions) == 0);
        CHECK(backend->in_flight() == 1);
        // Two reads of the pipe wait now: the one whose completion was forged, and the new one.
        REQUIRE(::write(pipe_ends[1], "12345678abcdefgh", 16) == 16);
        const auto ended = collect(*backend, 1);
        REQUIRE(ended.size() == 1);
        CHECK(ended[0].id == 1);
        CHECK(ended[0].result == 8);
        backend->wait(real_now_ns() + 50'000'000);
        CHECK(backend->reap(completions) == 0);
        CHECK(backend->stats().unknown_completions == 1);
    }
    ::close(pipe_ends[0]);
    ::close(pipe_ends[1]);
}

// ---------------------------------------------------------------- A26: registration

TEST_CASE("A26: memory that cannot be registered is used unregistered, whichever part it is") {
    const std::uint64_t pinned_before_kib = pinned_kib();
    for (std::size_t bad = 0; bad < 3; ++bad) {
        CAPTURE(bad);
        std::vector<std::unique_ptr<Memory>> memories;
        std::vector<std::span<std::byte>> areas;
        const MappedFile mapped(1 << 20);
        for (std::size_t i = 0; i < 3; ++i) {
            memories.push_back(std::make_unique<Memory>(1 << 20));
            areas.push_back(i == bad ? mapped.span() : memories.back()->span());
        }
        const TemporaryFile file(block_bytes);
        auto backend = io::make_uring({.files = {file.descriptor()}, .areas = areas});
        backend->attach();
        const io::BackendStats stats = backend->stats();
        CHECK_FALSE(stats.areas_registered);
        CHECK(stats.files_registered);
        CHECK(stats.note.find("1 MiB") == std::string::npos);
        CHECK(stats.note.find("3 MiB") != std::string::npos);
        CHECK(stats.note.find("RLIMIT_MEMLOCK") != std::string::npos);
        CHECK(pinned_kib() == pinned_before_kib);
        for (std::uint16_t area = 0; area < 3; ++area) {
            CHECK(perform(
                      *backend,
                      {.id = area + 1U, .data = areas[area].data(), .length = 512, .area = area}) ==
                  512);
        }
    }
}

TEST_CASE("A26: memory that may stay unregistered does not take the rest along") {
    const Memory buffers(1 << 20);
    const MappedFile mapped(2 << 20);
    const TemporaryFile file(block_bytes);
    auto backend = io::make_uring({.files = {file.descriptor()},
                                   .areas = {buffers.span(), mapped.span()},
                                   .areas_dispensable = 1});
    backend->attach();
    const io::BackendStats stats = backend->stats();
    CHECK(stats.areas_registered);
    CHECK(stats.note.find("the blocks' own memory") != std::string::npos);
    CHECK(stats.note.find("3 MiB") != std::string::npos);
    for (const std::span<std::byte> area : {buffers.span(), mapped.span()}) {
        const std::uint16_t index = area.data() == mapped.span().data() ? 1 : 0;
        CHECK(perform(*backend,
                      {.id = index + 1U, .data = area.data(), .length = 512, .area = index}) ==
              512);
    }
}

TEST_CASE("A26: registered memory is unpinned as soon as the backend is gone") {
    const std::uint64_t pinned_before_kib = pinned_kib();
    Memory memory(4 << 20);
    auto backend = io::make_uring({.areas = {memory.span()}});
    backend->attach();
    if (backend->stats().areas_registered) CHECK(pinned_kib() == pinned_before_kib + 4096);
    backend.reset();
    CHECK(pinned_kib() == pinned_before_kib);
}

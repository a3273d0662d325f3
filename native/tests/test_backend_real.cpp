// The contract of io/backend.hpp where only a real kernel can be asked: errors, limits, signals,
// and I/O that hangs. Each case runs on every backend that works on descriptors.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "backend_contract.hpp"

using namespace kvdisk;
using namespace kvdisk::test;

namespace {

constexpr std::uint32_t block_bytes = 4096;

class Descriptor {
  public:
    explicit Descriptor(int value) : value_(value) { REQUIRE(value_ >= 0); }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    ~Descriptor() { ::close(value_); }
    int get() const noexcept { return value_; }

  private:
    int value_;
};

std::unique_ptr<io::Backend> attached(const RealBackend& real, std::vector<int> files,
                                      std::uint32_t depth = 8) {
    auto backend = real.make({.files = std::move(files), .depth = depth});
    backend->attach();
    return backend;
}

// A file-size limit for this process, without the signal that comes with it; undone at the end.
class FileSizeLimit {
  public:
    explicit FileSizeLimit(rlim_t bytes) : handler_before_(::signal(SIGXFSZ, SIG_IGN)) {
        ::getrlimit(RLIMIT_FSIZE, &before_);
        const rlimit limit{.rlim_cur = bytes, .rlim_max = before_.rlim_max};
        ::setrlimit(RLIMIT_FSIZE, &limit);
    }
    ~FileSizeLimit() {
        ::setrlimit(RLIMIT_FSIZE, &before_);
        ::signal(SIGXFSZ, handler_before_);
    }

  private:
    rlimit before_{};
    void (*handler_before_)(int);
};

// A timer that interrupts system calls of this thread's process every five milliseconds.
class IntervalTimer {
  public:
    IntervalTimer() {
        struct sigaction action {};
        action.sa_handler = [](int) { ticks = ticks + 1; };  // and no SA_RESTART
        ::sigaction(SIGALRM, &action, &before_);
        const itimerval often{.it_interval = {.tv_sec = 0, .tv_usec = 5000},
                              .it_value = {.tv_sec = 0, .tv_usec = 5000}};
        ticks = 0;
        ::setitimer(ITIMER_REAL, &often, nullptr);
    }
    ~IntervalTimer() {
        const itimerval never{};
        ::setitimer(ITIMER_REAL, &never, nullptr);
        ::sigaction(SIGALRM, &before_, nullptr);
    }
    static volatile sig_atomic_t ticks;

  private:
    struct sigaction before_ {};
};
volatile sig_atomic_t IntervalTimer::ticks = 0;

// A page that makes whoever touches it, the kernel included, wait until `let_go`. Needs privilege.
class StuckPage {
  public:
    StuckPage()
        : descriptor_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC))),
          page_(::mmap(nullptr, block_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0)) {
        if (descriptor_ < 0) return;
        uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
        uffdio_register watched{
            .range = range(), .mode = UFFDIO_REGISTER_MODE_MISSING, .ioctls = 0};
        usable_ = ::ioctl(descriptor_, UFFDIO_API, &api) == 0 &&
                  ::ioctl(descriptor_, UFFDIO_REGISTER, &watched) == 0;
    }
    ~StuckPage() {
        let_go();
        if (descriptor_ >= 0)
            ::close(descriptor_);  // the page stays: a late read may still fill it
    }
    bool usable() const noexcept { return usable_; }
    std::byte* data() const noexcept { return static_cast<std::byte*>(page_); }
    void let_go() {
        uffdio_zeropage zero{.range = range(), .mode = 0, .zeropage = 0};
        if (usable_) ::ioctl(descriptor_, UFFDIO_ZEROPAGE, &zero);
    }

  private:
    uffdio_range range() const noexcept {
        return {.start = reinterpret_cast<std::uintptr_t>(page_), .len = block_bytes};
    }
    int descriptor_;
    void* page_;
    bool usable_ = false;
};

class TemporaryFileSystem {
  public:
    TemporaryFileSystem() {
        if (::mkdtemp(path_) == nullptr) return;
        mounted_ = ::mount("tmpfs", path_, "tmpfs", 0, "size=8m") == 0;
    }
    ~TemporaryFileSystem() {
        if (mounted_) ::umount2(path_, MNT_DETACH);
        ::rmdir(path_);
    }
    bool mounted() const noexcept { return mounted_; }
    std::string file() const { return std::string(path_) + "/file"; }

  private:
    char path_[32] = "/tmp/kvdisk-tmpfs-XXXXXX";
    bool mounted_ = false;
};

}  // namespace

TEST_CASE("contract: a file that is not open for it, or not open at all, answers EBADF") {
    KVDISK_EACH_REAL_BACKEND(real) {
        Memory memory(block_bytes);
        const Descriptor read_only(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
        const Descriptor write_only(::open("/dev/null", O_WRONLY | O_CLOEXEC));
        const auto backend = attached(real, {read_only.get(), write_only.get(), -1});
        const auto result = [&](std::uint16_t file, io::Op op) {
            return perform(
                *backend,
                {.id = 1, .data = memory.data(), .length = block_bytes, .file = file, .op = op});
        };
        CHECK(result(0, io::Op::read) == block_bytes);
        CHECK(result(0, io::Op::write) == -EBADF);
        CHECK(result(1, io::Op::read) == -EBADF);
        CHECK(result(2, io::Op::read) == -EBADF);
    }
}

// Found by reading: -EBADF at the first I/O was all that was heard of it.
TEST_CASE("contract: without room for its own descriptors a backend is refused at open") {
    KVDISK_EACH_REAL_BACKEND(real) {
        Memory memory(block_bytes);
        const Descriptor file(::open("/dev/zero", O_RDONLY | O_CLOEXEC));
        const int lowest_free = ::dup(file.get());
        ::close(lowest_free);
        rlimit before{};
        REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
        const rlimit full{static_cast<rlim_t>(lowest_free), before.rlim_max};
        REQUIRE(::setrlimit(RLIMIT_NOFILE, &full) == 0);
        int error = 0;
        try {
            real.make({.files = {file.get()}, .depth = 4});
        } catch (const std::system_error& refused) {
            ::setrlimit(RLIMIT_NOFILE, &before);  // UBSan looks at the exception through a pipe
            error = refused.code().value();
        }
        ::setrlimit(RLIMIT_NOFILE, &before);
        CHECK(error == EMFILE);
        const int still_free = ::dup(file.get());
        ::close(still_free);
        CHECK(still_free == lowest_free);
    }
}

TEST_CASE("contract: the caller's descriptors may be closed once the backend has them") {
    KVDISK_EACH_REAL_BACKEND(real) {
        Memory memory(block_bytes);
        auto file = std::make_unique<TemporaryFile>(block_bytes);
        const auto backend = attached(real, {file->descriptor()});
        file.reset();
        CHECK(perform(*backend, {.id = 1, .data = memory.data(), .length = 100}) == 100);
    }
}

TEST_CASE("contract: a misaligned direct request answers EINVAL, once, at every priority") {
    KVDISK_EACH_REAL_BACKEND(real) {
        Memory memory(2 * block_bytes);
        const TemporaryFile file(4 * block_bytes, O_DIRECT);
        const auto backend = attached(real, {file.descriptor()});
        std::uint64_t id = 0;
        const auto write = [&](std::byte* data, io::Priority priority) {
            return perform(*backend, {.id = ++id,
                                      .data = data,
                                      .length = block_bytes,
                                      .op = io::Op::write,
                                      .priority = priority});
        };
        if (write(memory.data() + 1, io::Priority::normal) == block_bytes) {
            MESSAGE("skipped: this file system takes any alignment");
        } else {
            for (const auto priority :
                 {io::Priority::high, io::Priority::low, io::Priority::normal}) {
                CHECK(write(memory.data() + 1, priority) == -EINVAL);
                CHECK(write(memory.data(), priority) == block_bytes);
                CHECK(write(memory.data() + 1, priority) == -EINVAL);
            }
            CHECK(backend->in_flight() == 0);
            CHECK(backend->stats().unknown_completions == 0);
        }
    }
}

TEST_CASE("contract: a full device answers ENOSPC") {
    KVDISK_EACH_REAL_BACKEND(real) {
        Memory memory(block_bytes);
        const Descriptor full(::open("/dev/full", O_RDWR | O_CLOEXEC));
        const auto backend = attached(real, {full.get()});
        for (std::uint64_t id = 1; id < 20; ++id) {
            CHECK(perform(*backend, {.id = id,
                                     .data = memory.data(),
                                     .length = block_bytes,
                                     .op = io::Op::write}) == -ENOSPC);
        }
    }
}

TEST_CASE("contract: a write that fills a file system is short, the next one answers ENOSPC") {
    KVDISK_EACH_REAL_BACKEND(real) {
        const TemporaryFileSystem file_system;
        if (!file_system.mounted()) {
            MESSAGE("skipped: mounting a tmpfs needs root");
        } else {
            constexpr std::uint32_t length = 3 << 20;
            Memory memory(length);
            const Descriptor file(
                ::open(file_system.file().c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
            const auto backend = attached(real, {file.get()});
            const auto write = [&](std::uint64_t id) {
                return perform(*backend, {.id = id,
                                          .offset = (id - 1) * length,
                                          .data = memory.data(),
                                          .length = length,
                                          .op = io::Op::write});
            };
            CHECK(write(1) == length);
            CHECK(write(2) == length);
            CHECK(write(3) == 2 << 20);
            CHECK(write(4) == -ENOSPC);
        }
    }
}

TEST_CASE("contract: a write across the file-size limit is short, one beyond it answers EFBIG") {
    KVDISK_EACH_REAL_BACKEND(real) {
        Memory memory(2 * block_bytes);
        const TemporaryFile file(0);
        const auto backend = attached(real, {file.descriptor()});
        const auto write = [&](std::uint64_t id, std::uint64_t offset) {
            return perform(*backend, {.id = id,
                                      .offset = offset,
                                      .data = memory.data(),
                                      .length = 6144,
                                      .op = io::Op::write});
        };
        const FileSizeLimit limit(65536);
        CHECK(write(1, 65536 - 4096) == 4096);
        CHECK(write(2, 65536) == -EFBIG);
        CHECK(write(3, 0) == 6144);
    }
}

TEST_CASE("A29: 10,000 operations under a timer that interrupts every five milliseconds") {
    for (const ContractCase& contract_case : contract_cases()) {
        if (!contract_case.real) continue;
        SUBCASE(contract_case.name.c_str()) {
            const IntervalTimer timer;
            for (const bool direct : {false, true}) {
                const std::uint32_t operations = direct ? 3'000 : 10'000;  // a real disk is slow
                const SoakResult result =
                    soak(contract_case, {.seed = 29, .operations = operations, .direct = direct});
                CHECK(result.completed == operations);
                CHECK(result.wrong_results + result.wrong_bytes + result.strange_ids == 0);
            }
            CHECK(IntervalTimer::ticks > 0);
        }
    }
}

TEST_CASE("A29: priorities, refused or not, change no result") {
    for (const ContractCase& contract_case : contract_cases()) {
        SUBCASE(contract_case.name.c_str()) {
            for (const auto priority : {io::Priority::high, io::Priority::low}) {
                const SoakResult result =
                    soak(contract_case, {.seed = 7, .operations = 2000, .priority = priority});
                CHECK(result.completed == 2000);
                CHECK(result.wrong_results + result.wrong_bytes + result.strange_ids == 0);
            }
        }
    }
}

// ---------------------------------------------------------------- A18: what hangs

TEST_CASE("A18: an abandoned backend goes at once, although its I/O hangs") {
    KVDISK_EACH_REAL_BACKEND(real) {
        StuckPage page;
        int pipe_ends[2];
        REQUIRE(::pipe2(pipe_ends, O_CLOEXEC) == 0);
        const Descriptor read_end(pipe_ends[0]);
        const Descriptor write_end(pipe_ends[1]);
        const TemporaryFile file(block_bytes);
        // io_uring: a read of an empty pipe. pread refuses pipes, so there: a page that is
        // withheld.
        const bool pool = real.name == "threads";
        if (pool && !page.usable()) {
            MESSAGE("skipped: userfaultfd needs privilege");
        } else {
            static Memory& memory = *new Memory(block_bytes);  // outlives abandoned I/O
            std::int64_t took_ns = 0;
            std::thread user([&] {  // its exit must not hang either
                auto backend = attached(real, {pool ? file.descriptor() : read_end.get()});
                backend->push(
                    {.id = 1, .data = pool ? page.data() : memory.data(), .length = block_bytes});
                backend->submit();
                backend->wait(real_now_ns() + 20'000'000);
                io::Completion none[1];
                CHECK(backend->reap(none) == 0);
                CHECK(backend->in_flight() == 1);
                const std::int64_t begun_ns = real_now_ns();
                backend->abandon();
                backend.reset();
                took_ns = real_now_ns() - begun_ns;
            });
            user.join();
            CHECK(took_ns < 2'000'000'000);  // less than a drain waits
        }
    }
}

TEST_CASE("A18: a backend that goes with I/O in flight waits for it") {
    KVDISK_EACH_REAL_BACKEND(real) {
        Memory memory(std::size_t{32} << 20);
        const TemporaryFile file(std::uint64_t{32} << 20, O_DIRECT);
        auto backend = attached(real, {file.descriptor()}, 32);
        for (std::uint64_t i = 0; i < 32; ++i) {
            backend->push({.id = i + 1,
                           .offset = i << 20,
                           .data = memory.data() + (i << 20),
                           .length = 1 << 20,
                           .op = io::Op::write});
        }
        backend->submit();
        const std::int64_t begun_ns = real_now_ns();
        backend.reset();
        CHECK(real_now_ns() - begun_ns < 10'000'000'000);
    }
}

TEST_CASE("A18: work that no one has begun never begins once the pool is gone") {
    StuckPage page;
    if (!page.usable()) {
        MESSAGE("skipped: userfaultfd needs privilege");
    } else {
        static Memory& memory = *new Memory(block_bytes);
        std::fill_n(memory.data(), block_bytes, std::byte{7});
        const TemporaryFile file(4 * block_bytes);
        auto backend = io::make_threads({.files = {file.descriptor()}, .depth = 40});  // 32 workers
        backend->attach();
        for (std::uint64_t id = 1; id <= 32; ++id) {
            backend->push({.id = id, .data = page.data() + id * 100, .length = 100});
        }
        backend->submit();
        backend->wait(real_now_ns() + 50'000'000);  // until every worker is stuck
        backend->push({.id = 33,
                       .offset = 2 * block_bytes,
                       .data = memory.data(),
                       .length = block_bytes,
                       .op = io::Op::write});
        backend->submit();
        backend->abandon();
        backend.reset();
        page.let_go();
        std::this_thread::sleep_for(std::chrono::milliseconds(100));
        char byte = 1;
        CHECK(::pread(file.descriptor(), &byte, 1, 2 * block_bytes) == 1);
        CHECK(byte == 0);
    }
}

TEST_CASE("an idle backend uses no processor time") {
    KVDISK_EACH_REAL_BACKEND(real) {
        const auto backend = attached(real, {});
        rusage before{};
        rusage after{};
        ::getrusage(RUSAGE_SELF, &before);
        const std::int64_t until_ns = real_now_ns() + 300'000'000;
        while (real_now_ns() < until_ns) backend->wait(until_ns);
        ::getrusage(RUSAGE_SELF, &after);
        const auto used_us = [](const rusage& usage) {
            return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1'000'000 +
                   usage.ru_utime.tv_usec + usage.ru_stime.tv_usec;
        };
        CHECK(used_us(after) - used_us(before) < 3'000);  // 1 % of a core
    }
}

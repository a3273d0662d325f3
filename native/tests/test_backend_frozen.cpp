// A18 and A23 on a disk that answers nothing: a file system that is frozen (FIFREEZE) holds every
// write until it is thawed, and nothing cancels them. Runs only where KVDISK_FROZEN_DIRECTORY names
// a mount made for it (tests/faults/test_frozen_disk.py).
//
// What this pins down: a backend goes at once even then, but with io_uring the *thread* that used
// it cannot end before the disk answers, because its exit waits for the kernel's workers. So that
// thread is let go here, never joined.
#include <doctest/doctest.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <future>
#include <thread>

#include "backend_contract.hpp"

using namespace kvdisk;
using namespace kvdisk::test;

namespace {

constexpr std::uint32_t block_bytes = 4096;

class Freeze {
  public:
    explicit Freeze(const std::string& directory)
        : descriptor_(::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
        REQUIRE(::ioctl(descriptor_, FIFREEZE, 0) == 0);
    }
    Freeze(const Freeze&) = delete;
    Freeze& operator=(const Freeze&) = delete;
    ~Freeze() {
        ::ioctl(descriptor_, FITHAW, 0);
        ::close(descriptor_);
    }

  private:
    int descriptor_;
};

struct Times {
    std::int64_t submit_ns = 0;
    std::int64_t wait_ns = 0;
    std::int64_t close_ns = 0;
    std::size_t reaped = 0;
};

// Writes one block that hangs, then lets the backend go.
Times use_and_leave(const RealBackend& real, int file, std::byte* data, bool abandons) {
    auto backend = real.make({.files = {file}, .depth = 4});
    backend->attach();
    Times times;
    std::int64_t begun_ns = real_now_ns();
    backend->push({.id = 1, .data = data, .length = block_bytes, .op = io::Op::write});
    backend->submit();
    times.submit_ns = real_now_ns() - begun_ns;
    begun_ns = real_now_ns();
    while (real_now_ns() < begun_ns + 50'000'000) backend->wait(begun_ns + 50'000'000);
    times.wait_ns = real_now_ns() - begun_ns;
    io::Completion completions[4];
    times.reaped = backend->reap(completions);
    begun_ns = real_now_ns();
    if (abandons) backend->abandon();
    backend.reset();
    times.close_ns = real_now_ns() - begun_ns;
    return times;
}

}  // namespace

TEST_CASE("A18: on a frozen disk nothing stalls the caller, and the backend goes in time") {
    const char* const directory = std::getenv("KVDISK_FROZEN_DIRECTORY");
    if (directory == nullptr) {
        MESSAGE("skipped: KVDISK_FROZEN_DIRECTORY names no mount");
        return;
    }
    KVDISK_EACH_REAL_BACKEND(real) {
        for (const bool abandons : {true, false}) {
            CAPTURE(abandons);
            static Memory& memory =
                *new Memory(block_bytes);  // the hung write reads it after the thaw
            const std::string path = std::string(directory) + "/file";
            const int file =
                ::open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_DIRECT | O_CLOEXEC, 0600);
            REQUIRE(file >= 0);
            auto result = std::make_shared<std::promise<Times>>();
            auto future = result->get_future();
            {
                const Freeze freeze(directory);
                std::thread([=, &real] {
                    result->set_value(use_and_leave(real, file, memory.data(), abandons));
                }).detach();
                REQUIRE(future.wait_for(std::chrono::seconds(20)) == std::future_status::ready);
            }
            const Times times = future.get();
            // It stays frozen for as long as this runs, so bounds on liveness are enough.
            CHECK(times.submit_ns < 5'000'000'000);
            CHECK(times.wait_ns < 5'000'000'000);
            CHECK(times.reaped == 0);
            // One that abandons does not even wait the two seconds that a drain may take.
            CHECK(times.close_ns < (abandons ? 2'000'000'000 : 15'000'000'000));
            ::close(file);
        }
    }
}

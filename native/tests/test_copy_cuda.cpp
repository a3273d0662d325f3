// The copier for device memory, on a driver without a device (fake_cuda.hpp): which bytes it moves
// and when it says so, what it does about errors, and what it gives back.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <map>
#include <numeric>
#include <random>
#include <system_error>
#include <thread>
#include <vector>

#include "fake_cuda.hpp"
#include "pipeline/clock.hpp"
#include "pipeline/copy_cuda.hpp"
#include "pipeline/cuda_driver.hpp"

namespace {

using namespace kvdisk;

constexpr std::uint64_t block_count = 32;
constexpr std::uint32_t buffer_count = 16;
constexpr int driver_error = 700;  // CUDA_ERROR_ILLEGAL_ADDRESS

// Blocks in segments of these sizes, with a gap behind each, and buffers of whole pages.
class Device {
  public:
    explicit Device(std::vector<std::uint64_t> segments) {
        for (const std::uint64_t bytes : segments) {
            const std::uint64_t stride = bytes + gap_bytes;
            memory_.emplace_back(stride * block_count + gap_bytes, gap_byte);
            layout_.regions.push_back({memory_.back().data() + gap_bytes / 2, stride, bytes});
            layout_.block_bytes += bytes;
        }
        layout_.block_count = block_count;
        buffer_bytes_ = (layout_.block_bytes + 4095) / 4096 * 4096;
        buffers_.resize(buffer_count * buffer_bytes_);
    }

    const Layout& layout() const { return layout_; }
    std::span<std::byte> buffers() { return buffers_; }
    std::byte* buffer(std::uint64_t index) { return buffers_.data() + index * buffer_bytes_; }

    void fill_block(std::uint64_t block, std::uint64_t seed) {
        std::mt19937_64 random(seed);
        for (const Region& region : layout_.regions) {
            std::byte* const segment = region.base + block * region.block_stride_bytes;
            for (std::uint64_t i = 0; i < region.segment_bytes; ++i) {
                segment[i] = static_cast<std::byte>(random());
            }
        }
    }

    // Whether a buffer holds the block, segment after segment, and zeros behind it.
    bool buffer_holds(std::uint64_t index, std::uint64_t block) {
        const std::byte* at = buffer(index);
        for (const Region& region : layout_.regions) {
            if (std::memcmp(at, region.base + block * region.block_stride_bytes,
                            region.segment_bytes) != 0) {
                return false;
            }
            at += region.segment_bytes;
        }
        return std::all_of(at, static_cast<const std::byte*>(buffer(index)) + buffer_bytes_,
                           [](std::byte byte) { return byte == std::byte{0}; });
    }

    // Whether nothing was written between the segments.
    bool gaps_untouched() const {
        for (std::size_t r = 0; r < memory_.size(); ++r) {
            std::vector<std::byte> masked = memory_[r];
            const Region& region = layout_.regions[r];
            for (std::uint64_t block = 0; block < block_count; ++block) {
                const auto first =
                    masked.begin() +
                    static_cast<std::ptrdiff_t>(gap_bytes / 2 + block * region.block_stride_bytes);
                std::fill_n(first, region.segment_bytes, gap_byte);
            }
            if (std::ranges::any_of(masked, [](std::byte b) { return b != gap_byte; }))
                return false;
        }
        return true;
    }

  private:
    static constexpr std::uint64_t gap_bytes = 24;
    static constexpr std::byte gap_byte{0x5C};
    Layout layout_;
    std::vector<std::vector<std::byte>> memory_;
    std::vector<std::byte> buffers_;
    std::uint64_t buffer_bytes_ = 0;
};

CudaCopierOptions options_of(Device& device) {
    return {.device = 1, .buffers = device.buffers(), .depth = buffer_count};
}

std::unique_ptr<Copier> attached(Device& device, const CudaCopierOptions& options) {
    auto copier = make_cuda_copier(device.layout(), options);
    copier->attach();
    return copier;
}

// Reaps as the engine's thread does, asleep until the copier wants to be looked after.
std::vector<CopyCompletion> reap(Copier& copier, std::size_t count) {
    std::vector<CopyCompletion> all;
    const MonotonicClock clock;
    const std::int64_t patience_end_ns = clock.now_ns() + 20'000'000'000;
    while (all.size() < count && clock.now_ns() < patience_end_ns) {
        std::array<CopyCompletion, 3> done;
        const std::size_t reaped = copier.reap(done);
        all.insert(all.end(), done.begin(), done.begin() + static_cast<std::ptrdiff_t>(reaped));
        const std::int64_t pause_ns = copier.look_at_ns() - clock.now_ns();
        if (all.size() < count && pause_ns > 0) {
            REQUIRE(copier.look_at_ns() != Copier::never_look);
            std::this_thread::sleep_for(std::chrono::nanoseconds(pause_ns));
        }
    }
    return all;
}

struct Way {
    const char* name;
    std::uint64_t kernel_below_bytes;
    bool batched;
};

constexpr Way ways[] = {{"kernel", std::uint64_t{1} << 40, true},
                        {"batched copies", 0, true},
                        {"single copies", 0, false},
                        {"both", 8192, true}};

const std::vector<std::vector<std::uint64_t>> segment_lists = {
    {65536, 65536, 65536, 65536},  // layers
    {1, 3, 17, 4095, 4097, 16},    // nothing is aligned
    {8192, 72, 8192, 72},          // values and scales
    {300'000},                     // one region
};

}  // namespace

TEST_CASE("cuda copier: every way moves the block's bytes and no others") {
    for (const Way& way : ways) {
        for (const auto& segments : segment_lists) {
            CAPTURE(way.name);
            CAPTURE(segments.front());
            fake_cuda_reset(1, 200);
            Device device(segments);
            CudaCopierOptions options = options_of(device);
            options.kernel_below_bytes = way.kernel_below_bytes;
            options.batched = way.batched;
            const auto copier = attached(device, options);
            std::vector<std::uint64_t> blocks(block_count / 2);
            std::iota(blocks.begin(), blocks.end(), 0);
            std::shuffle(blocks.begin(), blocks.end(), std::mt19937(7));
            for (std::uint64_t i = 0; i < blocks.size(); ++i) {
                device.fill_block(blocks[i], 100 + i);
                copier->start({.id = i + 1, .block_id = blocks[i], .buffer = device.buffer(i)});
            }
            for (const CopyCompletion& done : reap(*copier, blocks.size())) {
                CHECK(done.error == 0);
                CHECK(device.buffer_holds(done.id - 1, blocks[done.id - 1]));
            }
            for (std::uint64_t i = 0; i < blocks.size(); ++i) {
                copier->start({.id = i + 1,
                               .block_id = block_count / 2 + blocks[i],
                               .buffer = device.buffer(i),
                               .direction = CopyDirection::scatter});
            }
            CHECK(reap(*copier, blocks.size()).size() == blocks.size());
            for (std::uint64_t i = 0; i < blocks.size(); ++i) {
                CHECK(device.buffer_holds(i, block_count / 2 + blocks[i]));
            }
            CHECK(device.gaps_untouched());
        }
    }
}

TEST_CASE("cuda copier: in any order of starts and ends, each copy ends once and is whole then") {
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
        CAPTURE(seed);
        fake_cuda_reset(seed, 300);
        Device device({8192, 8192, 24});
        const auto copier = attached(device, options_of(device));
        std::mt19937_64 random(seed);
        std::vector<std::uint64_t> free_buffers(buffer_count);
        std::iota(free_buffers.begin(), free_buffers.end(), 0);
        std::map<std::uint64_t, Copy> in_flight;
        std::uint64_t id = 0, ended = 0;
        constexpr std::uint64_t total = 300;
        while (ended < total) {
            while (id < total && !free_buffers.empty() && random() % 3 != 0) {
                const std::uint64_t index = free_buffers.back();
                free_buffers.pop_back();
                // A gather reads a block of the lower half, a scatter writes one of the upper, each
                // one that no other copy in flight uses: the buffer's own.
                const bool scatter = random() % 2 == 0;
                const std::uint64_t block = index + (scatter ? buffer_count : 0);
                device.fill_block(block, random());
                std::memset(device.buffer(index), 0, device.layout().block_bytes);
                Copy copy{.id = ++id, .block_id = block, .buffer = device.buffer(index)};
                if (scatter) copy.direction = CopyDirection::scatter;
                in_flight[copy.id] = copy;
                copier->start(copy);
            }
            for (const CopyCompletion& done :
                 reap(*copier, std::min<std::size_t>(in_flight.size(), random() % 4))) {
                const auto found = in_flight.find(done.id);
                REQUIRE(found != in_flight.end());
                const Copy& copy = found->second;
                const auto index = static_cast<std::uint64_t>(copy.buffer - device.buffer(0)) /
                                   static_cast<std::uint64_t>(device.buffer(1) - device.buffer(0));
                CHECK(done.error == 0);
                CHECK(device.buffer_holds(index, copy.block_id));
                free_buffers.push_back(index);
                in_flight.erase(found);
                ++ended;
            }
        }
        CHECK(device.gaps_untouched());
        CHECK(copier->look_at_ns() == Copier::never_look);
    }
}

TEST_CASE("cuda copier: what the driver refuses ends with an error, when nothing of it runs") {
    struct Refusal {
        const char* call;
        std::uint64_t kernel_below_bytes;
        bool batched;
    };
    for (const Refusal& refusal :
         {Refusal{"cuMemcpyBatchAsync", 0, true}, Refusal{"cuMemcpyAsync", 0, false},
          Refusal{"cuLaunchKernel", 1 << 20, true}, Refusal{"cuEventRecord", 1 << 20, true}}) {
        CAPTURE(refusal.call);
        fake_cuda_reset(3, 2000);
        Device device({65536, 65536});
        CudaCopierOptions options = options_of(device);
        options.kernel_below_bytes = refusal.kernel_below_bytes;
        options.batched = refusal.batched;
        const auto copier = attached(device, options);
        device.fill_block(5, 1);
        fake_cuda_fail(refusal.call, refusal.batched ? 0 : 1, 1, 0);
        copier->start({.id = 1, .block_id = 5, .buffer = device.buffer(0)});
        const auto done = reap(*copier, 1);
        REQUIRE(done.size() == 1);
        CHECK(done[0].error == EIO);
        std::memset(device.buffer(0), 0, device.layout().block_bytes);  // nobody writes any more
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        CHECK(device.buffer(0)[0] == std::byte{0});
        copier->start({.id = 2, .block_id = 5, .buffer = device.buffer(1)});
        CHECK(reap(*copier, 1).at(0).error == 0);
        CHECK(device.buffer_holds(1, 5));
    }
}

TEST_CASE("cuda copier: a broken context fails every copy and ends nothing else") {
    fake_cuda_reset(4, 500);
    Device device({65536, 4096});
    {
        const auto copier = attached(device, options_of(device));
        for (std::uint64_t i = 0; i < buffer_count; ++i) {
            copier->start({.id = i + 1, .block_id = i, .buffer = device.buffer(i)});
            std::array<CopyCompletion, 1> none;
            if (i == 7) CHECK(copier->reap(none) == 0);
        }
        fake_cuda_break(driver_error);
        const auto done = reap(*copier, buffer_count);
        REQUIRE(done.size() == buffer_count);
        for (const CopyCompletion& each : done) CHECK(each.error == EIO);
        CHECK(copier->poll_event(1) == Readiness::failed);
    }
    CHECK(fake_cuda_live("context", 1) == 0);
}

TEST_CASE("cuda copier: an event is asked, and fails alone") {
    fake_cuda_reset(5, 0);
    Device device({4096});
    const auto copier = attached(device, options_of(device));
    void* const event = fake_cuda_make_event(600);
    const auto handle = reinterpret_cast<std::uint64_t>(event);
    CHECK(copier->poll_event(handle) == Readiness::pending);
    fake_cuda_set_event(event, driver_error);
    CHECK(copier->poll_event(handle) == Readiness::failed);
    fake_cuda_set_event(event, 0);
    CHECK(copier->poll_event(handle) == Readiness::ready);
    CHECK_FALSE(copier->cancel(1));
}

TEST_CASE("cuda copier: a copy can be cancelled until the device has it") {
    fake_cuda_reset(8, 0);
    Device device({4096});
    const auto copier = attached(device, options_of(device));
    std::memset(device.buffers().data(), 7, device.buffers().size());
    void* const event = fake_cuda_make_event(600);
    device.fill_block(9, 9);
    const auto start = [&](std::uint64_t id, CopyDirection direction) {
        copier->start({.id = id,
                       .block_id = id,
                       .buffer = device.buffer(id),
                       .direction = direction,
                       .event = direction == CopyDirection::scatter
                                    ? reinterpret_cast<std::uint64_t>(event)
                                    : 0});
    };
    for (const std::uint64_t id : {1, 2, 3}) start(id, CopyDirection::gather);
    start(9, CopyDirection::scatter);
    CHECK(copier->cancel(2));
    CHECK_FALSE(copier->cancel(2));
    CHECK(copier->cancel(9));
    fake_cuda_freeze(1);
    std::array<CopyCompletion, 3> none;
    CHECK(copier->reap(none) == 0);  // the device has them now
    CHECK_FALSE(copier->cancel(1));
    fake_cuda_freeze(0);
    fake_cuda_set_event(event, 0);
    const auto done = reap(*copier, 2);
    REQUIRE(done.size() == 2);
    CHECK(done[0].id == 1);
    CHECK(done[1].id == 3);
    CHECK(copier->look_at_ns() == Copier::never_look);
    CHECK(device.buffer(2)[0] == std::byte{7});
    CHECK_FALSE(device.buffer_holds(9, 9));
    // Their places are free: as many as ever may be started.
    for (std::uint64_t id = 0; id < buffer_count; ++id) {
        copier->start({.id = id + 100, .block_id = id, .buffer = device.buffer(id)});
    }
    CHECK(reap(*copier, buffer_count).size() == buffer_count);
}

TEST_CASE("cuda copier: a scatter writes only after its event, and no gather waits for it") {
    for (const std::uint64_t kernel_below_bytes : {std::uint64_t{0}, std::uint64_t{1} << 20}) {
        fake_cuda_reset(6, 0);
        Device device({4096, 65536});
        CudaCopierOptions options = options_of(device);
        options.kernel_below_bytes = kernel_below_bytes;
        const auto copier = attached(device, options);
        device.fill_block(1, 1);
        device.fill_block(2, 2);
        std::memset(device.buffer(0), 7, device.layout().block_bytes);
        void* const event = fake_cuda_make_event(600);
        copier->start({.id = 1,
                       .block_id = 1,
                       .buffer = device.buffer(0),
                       .direction = CopyDirection::scatter,
                       .event = reinterpret_cast<std::uint64_t>(event)});
        copier->start({.id = 2, .block_id = 2, .buffer = device.buffer(2)});
        const auto gathered = reap(*copier, 1);
        REQUIRE(gathered.size() == 1);
        CHECK(gathered[0].id == 2);
        device.fill_block(1, 3);  // the last use of the block, before the event
        fake_cuda_set_event(event, 0);
        const auto scattered = reap(*copier, 1);
        REQUIRE(scattered.size() == 1);
        CHECK(scattered[0].error == 0);
        CHECK(device.buffer_holds(0, 1));

        fake_cuda_fail("cuStreamWaitEvent", 0, 1, 0);
        device.fill_block(1, 4);
        copier->start({.id = 3,
                       .block_id = 1,
                       .buffer = device.buffer(0),
                       .direction = CopyDirection::scatter,
                       .event = reinterpret_cast<std::uint64_t>(event)});
        CHECK(reap(*copier, 1).at(0).error == EIO);
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
        CHECK_FALSE(device.buffer_holds(0, 1));  // nothing was written without the event
    }
}

TEST_CASE("cuda copier: everything is given back, also when attaching fails halfway") {
    Device device({4096, 1 << 20});
    const auto nothing_left = [] {
        for (const char* const kind : {"stream", "event", "registration", "memory", "module"}) {
            CAPTURE(kind);
            CHECK(fake_cuda_live(kind, 0) == 0);
        }
        CHECK(fake_cuda_live("context", 0) == 0);
        CHECK(fake_cuda_live("context", 1) == 0);
    };
    for (const char* const call :
         {"", "cuCtxSetCurrent", "cuMemHostRegister", "cuMemHostGetDevicePointer",
          "cuStreamCreateWithPriority", "cuEventCreate", "cuModuleLoadData", "cuMemAlloc",
          "cuMemcpyHtoD"}) {
        CAPTURE(call);
        for (const unsigned skipped : {0U, 1U}) {
            fake_cuda_reset(6, 0);
            fake_cuda_fail(call, skipped, 2, 0);
            auto copier = make_cuda_copier(device.layout(), options_of(device));
            CHECK(fake_cuda_live("context", 1) == 1);
            if (*call != '\0' && skipped == 0) {
                try {
                    copier->attach();
                    FAIL("attached");
                } catch (const std::system_error& error) {
                    CHECK(error.code().value() == ENOMEM);
                    CHECK(std::string(error.what()).find("CUDA_ERROR") != std::string::npos);
                }
            } else {
                try {
                    copier->attach();
                } catch (const std::system_error&) {
                }
            }
            std::thread([&copier] { copier.reset(); }).join();  // from a thread without a context
            nothing_left();
        }
    }
}

TEST_CASE("cuda driver: a device is named in one of three ways") {
    fake_cuda_reset(7, 0);
    std::thread([] {
        CHECK(cuda::resolve_device("cuda") == 0);  // nothing is current here
        CHECK(cuda::resolve_device("cuda:1") == 1);
        cuda::Context context = nullptr;
        cuda::driver().device_primary_ctx_retain(&context, 1);
        cuda::driver().ctx_set_current(context);
        CHECK(cuda::resolve_device("cuda") == 1);
    }).join();
    for (const char* const wrong : {"cuda:2", "cuda:-1", "cuda:", "cuda:x", "cuda:1 ", "gpu", ""}) {
        CAPTURE(wrong);
        CHECK_THROWS_AS(cuda::resolve_device(wrong), std::invalid_argument);
    }
}

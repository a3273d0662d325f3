// The copier for blocks in device memory, by the CUDA driver.
//
// Copies of one direction go to a stream of their own, in batches: one submission and one event for
// several blocks. Large segments take the copy engines, which cost no compute; small ones a kernel,
// since a copy engine needs a command for each segment. Nobody spins for a batch to end:
// `look_at_ns` says when it should have, and the engine's thread sleeps until then.
//
// What always holds:
//   * Only the thread that attached makes driver calls, in the device's primary context, so that no
//     context comes to be on any other device; the exception is the destructor.
//   * A copy ends when the event behind it has happened, or when the driver says that the context
//   is
//     broken, in which case nothing of it runs any more.
//   * A copy can be cancelled until the device has it, and not afterwards.
#include "pipeline/copy_cuda.hpp"

#include <algorithm>
#include <cerrno>
#include <string>
#include <vector>

#include "pipeline/check.hpp"
#include "pipeline/clock.hpp"
#include "pipeline/cuda_driver.hpp"
#include "pipeline/cuda_gather.hpp"

namespace kvdisk {

namespace {

// A batch is as large as pays its submission (some microseconds), and no larger, since its blocks
// end together. So many of them wait in the stream that the device always has the next one; what
// comes in meanwhile makes the one after that.
constexpr std::uint64_t batch_bytes_max = 4 << 20;
constexpr std::uint32_t batches_in_flight_max = 4;

// From these sizes on the copy engines are as fast as the kernel, and take nothing from compute
// (docs/adr/0006).
constexpr std::uint64_t kernel_below_batched_bytes = 64 << 10;
constexpr std::uint64_t kernel_below_single_bytes = 512 << 10;

// When to look at a batch: after the time that it takes at the rate of PCIe 5 x16, and again after
// growing gaps, so that a slow link costs few calls and a hung device next to none.
constexpr std::int64_t batch_latency_ns = 10'000;
constexpr std::uint64_t bytes_per_ns = 50;
constexpr std::int64_t look_gap_first_ns = 5'000;
constexpr std::int64_t look_gap_max_ns = 1'000'000;

struct Batch {
    cuda::Event event = nullptr;
    bool marked = false;  // the event was recorded behind the batch's work
    cuda::Result result = cuda::success;
    std::int64_t expected_ns = 0;
    std::uint32_t told = 0;  // copies whose completion was handed out
    std::vector<std::uint64_t> ids;
};

// A circle of a fixed size.
template <typename T>
class Circle {
  public:
    void resize(std::size_t capacity) { entries_.resize(capacity); }
    std::vector<T>& entries() noexcept { return entries_; }
    std::size_t size() const noexcept { return count_; }
    bool empty() const noexcept { return count_ == 0; }
    bool full() const noexcept { return count_ == entries_.size(); }
    T& front() noexcept { return entries_[first_]; }
    T& push() noexcept { return at(count_++); }
    void pop() noexcept {
        first_ = (first_ + 1) % entries_.size();
        --count_;
    }
    // Takes out the first entry that matches; false: there is none. The others keep their order.
    template <typename Predicate>
    bool remove(Predicate matches) {
        std::size_t i = 0;
        while (i < count_ && !matches(at(i))) ++i;
        if (i == count_) return false;
        for (; i + 1 < count_; ++i) at(i) = std::move(at(i + 1));
        --count_;
        return true;
    }

  private:
    T& at(std::size_t i) noexcept { return entries_[(first_ + i) % entries_.size()]; }

    std::vector<T> entries_;
    std::size_t first_ = 0;
    std::size_t count_ = 0;
};

// The copies of one direction.
struct Lane {
    CopyDirection direction = CopyDirection::gather;
    cuda::Stream stream = nullptr;
    Circle<Copy> waiting;
    Circle<Batch> batches;  // in flight, in the order in which they end
    std::int64_t look_at_ns = 0;
    std::int64_t look_gap_ns = 0;
};

// The copies of a batch that go through the copy engines, as the driver takes them.
struct CopyList {
    std::vector<cuda::DeviceAddress> targets, sources;
    std::vector<std::size_t> sizes;

    void reserve(std::size_t count) {
        targets.reserve(count);
        sources.reserve(count);
        sizes.reserve(count);
    }
    void clear() noexcept {
        targets.clear();
        sources.clear();
        sizes.clear();
    }
};

class CudaCopier final : public Copier {
  public:
    CudaCopier(const Layout& layout, const CudaCopierOptions& options)
        : options_(options),
          layout_(layout),
          cuda_(cuda::driver()),
          rows_per_batch_(static_cast<std::uint32_t>(std::clamp<std::uint64_t>(
              batch_bytes_max / layout.block_bytes, 1, gather_rows_max))) {
        split_segments();
        for (Lane& lane : lanes_) {
            lane.waiting.resize(options.depth);
            lane.batches.resize(batches_in_flight_max);
            for (Batch& batch : lane.batches.entries()) batch.ids.reserve(rows_per_batch_);
        }
        lanes_[1].direction = CopyDirection::scatter;
        copies_.reserve(large_.size() * rows_per_batch_);
        cuda::require(cuda_.device_get(&device_, options.device), "cuDeviceGet");
        cuda::require(cuda_.device_primary_ctx_retain(&context_, device_),
                      "cuDevicePrimaryCtxRetain");
    }

    ~CudaCopier() override {
        {
            const cuda::CurrentContext current(context_);
            release();
        }
        cuda_.device_primary_ctx_release(device_);
    }

    const char* name() const noexcept override { return "cuda"; }
    std::string note() const override { return note_; }

    // What belongs to the context is made here, where it is current, so that the thread that opens
    // the engine keeps whatever is current there.
    void attach() override {
        cuda::require(cuda_.ctx_set_current(context_), "cuCtxSetCurrent");
        cuda::require(
            cuda_.mem_host_register(options_.buffers.data(), options_.buffers.size(),
                                    cuda::host_register_portable | cuda::host_register_device_map),
            "cuMemHostRegister");
        registered_ = true;
        cuda::require(
            cuda_.mem_host_get_device_pointer(&buffers_address_, options_.buffers.data(), 0),
            "cuMemHostGetDevicePointer");
        int least = 0, greatest = 0;
        cuda::require(cuda_.ctx_get_stream_priority_range(&least, &greatest),
                      "cuCtxGetStreamPriorityRange");
        for (Lane& lane : lanes_) {
            cuda::require(
                cuda_.stream_create_with_priority(&lane.stream, cuda::stream_non_blocking, least),
                "cuStreamCreateWithPriority");
            for (Batch& batch : lane.batches.entries()) {
                cuda::require(cuda_.event_create(&batch.event, cuda::event_disable_timing),
                              "cuEventCreate");
            }
        }
        kernel_.load(small_);
        note_ = describe();
    }

    // Asked, not waited for in the stream: a source that is never ready must neither hold a buffer
    // nor keep the stores behind it.
    Readiness poll_event(std::uint64_t event) override {
        const cuda::Result result = cuda_.event_query(reinterpret_cast<cuda::Event>(event));
        if (result == cuda::error_not_ready) return Readiness::pending;
        return result == cuda::success ? Readiness::ready : Readiness::failed;
    }

    std::uint32_t depth() const noexcept override { return options_.depth; }

    void start(const Copy& copy) override {
        Lane& lane = lanes_[copy.direction == CopyDirection::scatter ? 1 : 0];
        KVDISK_CHECK(!lane.waiting.full() && copy.block_id < layout_.block_count);
        lane.waiting.push() = copy;
    }

    std::size_t reap(std::span<CopyCompletion> completions) override {
        std::size_t count = 0;
        const std::int64_t now = clock_.now_ns();
        for (Lane* lane : {&lanes_[1], &lanes_[0]}) {  // a request waits for a scatter
            count += collect(*lane, completions.subspan(count), now);
            while (!lane->waiting.empty() && !lane->batches.full()) submit(*lane, now);
        }
        return count;
    }

    bool busy() const noexcept override { return false; }

    std::int64_t look_at_ns() const noexcept override {
        std::int64_t next = never_look;
        for (const Lane& lane : lanes_) {
            if (!lane.batches.empty()) next = std::min(next, lane.look_at_ns);
            if (!lane.waiting.empty() && !lane.batches.full()) next = 0;
        }
        return next;
    }

    bool cancel(std::uint64_t id) override {
        return std::ranges::any_of(lanes_, [id](Lane& lane) {
            return lane.waiting.remove([id](const Copy& copy) { return copy.id == id; });
        });
    }

  private:
    bool batches_copies() const noexcept {
        return options_.batched && cuda_.memcpy_batch_async != nullptr;
    }

    std::string describe() const {
        const char* const copies = batches_copies() ? "batched copies" : "single copies";
        if (small_.empty()) return copies;
        return large_.empty() ? "gather kernel" : std::string(copies) + " and gather kernel";
    }

    void split_segments() {
        const std::uint64_t below_bytes = options_.kernel_below_bytes.value_or(
            batches_copies() ? kernel_below_batched_bytes : kernel_below_single_bytes);
        std::uint64_t offset = 0;
        for (const Region& region : layout_.regions) {
            auto& way = region.segment_bytes < below_bytes ? small_ : large_;
            way.push_back({region, offset});
            offset += region.segment_bytes;
        }
    }

    // --- ending

    // Hands out the copies of batches that have passed.
    std::size_t collect(Lane& lane, std::span<CopyCompletion> completions, std::int64_t now) {
        std::size_t count = 0;
        while (!lane.batches.empty() && count < completions.size()) {
            Batch& batch = lane.batches.front();
            if (batch.told == 0 && (now < lane.look_at_ns || !passed(lane, batch))) {
                if (now >= lane.look_at_ns) look_later(lane, now);
                break;
            }
            while (batch.told < batch.ids.size() && count < completions.size()) {
                completions[count++] = {.id = batch.ids[batch.told++],
                                        .error = cuda::errno_of(batch.result)};
            }
            if (batch.told < batch.ids.size()) break;
            lane.batches.pop();
            if (!lane.batches.empty()) look_first(lane, now);
        }
        return count;
    }

    // Whether nothing of a batch runs any more; its result is known then.
    bool passed(Lane& lane, Batch& batch) {
        const cuda::Result result =
            batch.marked ? cuda_.event_query(batch.event) : cuda_.stream_query(lane.stream);
        if (result == cuda::error_not_ready) return false;
        if (batch.result == cuda::success) batch.result = result;
        return true;
    }

    static void look_first(Lane& lane, std::int64_t now) {
        const std::int64_t expected_ns = lane.batches.front().expected_ns;
        lane.look_at_ns = now + expected_ns;
        lane.look_gap_ns = std::max(look_gap_first_ns, expected_ns / 8);
    }

    static void look_later(Lane& lane, std::int64_t now) {
        lane.look_at_ns = now + lane.look_gap_ns;
        lane.look_gap_ns = std::min(2 * lane.look_gap_ns, look_gap_max_ns);
    }

    // --- beginning

    // Gives the next batch to the device. Should the driver refuse it, part of it may run all the
    // same, so that it ends like any other, with the error.
    void submit(Lane& lane, std::int64_t now) {
        const bool idle = lane.batches.empty();
        Batch& batch = lane.batches.push();
        batch.ids.clear();
        batch.told = 0;
        batch.result = cuda::success;
        std::uint64_t waited_for = 0;
        rows_.clear();
        copies_.clear();
        while (!lane.waiting.empty() && batch.ids.size() < rows_per_batch_) {
            const Copy& copy = lane.waiting.front();
            batch.ids.push_back(copy.id);
            // Blocks to be loaded may still be in use by what the caller's own stream has to do.
            if (copy.event != 0 && copy.event != waited_for && batch.result == cuda::success) {
                batch.result = cuda_.stream_wait_event(
                    lane.stream, reinterpret_cast<cuda::Event>(copy.event), 0);
                waited_for = copy.event;
            }
            add(copy);
            lane.waiting.pop();
        }
        if (batch.result == cuda::success) batch.result = submit_large(lane);
        if (batch.result == cuda::success) {
            batch.result =
                kernel_.launch(lane.direction, rows_, options_.kernel_ctas_max, lane.stream);
        }
        const cuda::Result recorded = cuda_.event_record(batch.event, lane.stream);
        batch.marked = recorded == cuda::success;
        if (batch.result == cuda::success) batch.result = recorded;
        batch.expected_ns =
            static_cast<std::int64_t>(batch.ids.size() * layout_.block_bytes / bytes_per_ns) +
            (idle ? batch_latency_ns : 0);
        if (idle) look_first(lane, now);
    }

    void add(const Copy& copy) {
        const cuda::DeviceAddress buffer =
            buffers_address_ +
            static_cast<cuda::DeviceAddress>(copy.buffer - options_.buffers.data());
        rows_.add(copy.block_id, buffer);
        for (const Segment& segment : large_) {
            const auto block = reinterpret_cast<cuda::DeviceAddress>(segment.region.base) +
                               copy.block_id * segment.region.block_stride_bytes;
            const cuda::DeviceAddress staged = buffer + segment.buffer_offset;
            const bool gather = copy.direction == CopyDirection::gather;
            copies_.targets.push_back(gather ? staged : block);
            copies_.sources.push_back(gather ? block : staged);
            copies_.sizes.push_back(segment.region.segment_bytes);
        }
    }

    cuda::Result submit_large(const Lane& lane) {
        if (copies_.sizes.empty()) return cuda::success;
        if (batches_copies()) {
            // A load's source is a buffer that nobody touches until the load has ended.
            cuda::CopyAttributes attributes{.source_order = lane.direction == CopyDirection::gather
                                                                ? cuda::SourceOrder::stream
                                                                : cuda::SourceOrder::any};
            std::size_t first = 0, failed = 0;
            return cuda_.memcpy_batch_async(copies_.targets.data(), copies_.sources.data(),
                                            copies_.sizes.data(), copies_.sizes.size(), &attributes,
                                            &first, 1, &failed, lane.stream);
        }
        for (std::size_t i = 0; i < copies_.sizes.size(); ++i) {
            const cuda::Result result = cuda_.memcpy_async(copies_.targets[i], copies_.sources[i],
                                                           copies_.sizes[i], lane.stream);
            if (result != cuda::success) return result;
        }
        return cuda::success;
    }

    // Gives everything back. No copy runs any more, unless this is called in spite of the contract:
    // then the streams are waited for, since the buffers' memory goes next.
    void release() {
        for (Lane& lane : lanes_) {
            if (lane.stream != nullptr) cuda_.stream_synchronize(lane.stream);
        }
        kernel_.unload();
        for (Lane& lane : lanes_) {
            for (const Batch& batch : lane.batches.entries()) {
                if (batch.event != nullptr) cuda_.event_destroy(batch.event);
            }
            if (lane.stream != nullptr) cuda_.stream_destroy(lane.stream);
        }
        if (registered_) cuda_.mem_host_unregister(options_.buffers.data());
    }

    const CudaCopierOptions options_;
    const Layout layout_;
    const cuda::Driver& cuda_;
    const std::uint32_t rows_per_batch_;
    const MonotonicClock clock_;
    std::vector<Segment> large_, small_;  // through the copy engines, through the kernel
    GatherKernel kernel_;
    Lane lanes_[2];  // stores, loads
    CopyList copies_;
    GatherBatch rows_;
    cuda::Device device_ = 0;
    cuda::Context context_ = nullptr;
    cuda::DeviceAddress buffers_address_ = 0;
    bool registered_ = false;
    std::string note_;
};

}  // namespace

std::unique_ptr<Copier> make_cuda_copier(const Layout& layout, const CudaCopierOptions& options) {
    return std::make_unique<CudaCopier>(layout, options);
}

}  // namespace kvdisk

#include "pipeline/copy_job.hpp"

#include <ctime>
#include <vector>

#include "io/choose.hpp"
#include "pipeline/clock.hpp"
#include "pipeline/cuda_driver.hpp"

namespace kvdisk {

namespace {

std::uint64_t whole_pages(std::uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

std::int64_t thread_cpu_ns() {
    timespec time{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::unique_ptr<Copier> make_copier(const CopyJobOptions& options, const Ring& ring) {
    if (options.device == "cpu") return make_host_copier(options.layout, options.buffers);
    return make_cuda_copier(options.layout, {.device = cuda::resolve_device(options.device),
                                             .buffers = ring.memory(),
                                             .depth = options.buffers,
                                             .kernel_below_bytes = options.kernel_below_bytes,
                                             .kernel_ctas_max = options.kernel_ctas_max,
                                             .batched = options.batched});
}

}  // namespace

CopyJob::CopyJob(const CopyJobOptions& options)
    : layout_(options.layout),
      ring_(options.buffers, whole_pages(options.layout.block_bytes)),
      backend_(io::choose_backend({.depth = 1}, "auto").backend),
      copier_(make_copier(options, ring_)) {
    backend_->attach();
    copier_->attach();
}

CopyJob::~CopyJob() = default;

CopyJobResult CopyJob::run(bool gathers, bool scatters, std::int64_t duration_ns) {
    const MonotonicClock clock;
    CopyJobResult result;
    std::vector<std::uint32_t> idle;
    for (std::uint32_t buffer = 0; buffer < ring_.buffer_count(); ++buffer) idle.push_back(buffer);
    const std::int64_t started_ns = clock.now_ns(), cpu_started_ns = thread_cpu_ns();
    std::uint64_t number = 0;
    while (true) {
        const bool over = clock.now_ns() - started_ns >= duration_ns;
        while (!over && !idle.empty()) {
            const std::uint32_t buffer = idle.back();
            idle.pop_back();
            const bool scatter = scatters && (!gathers || number % 2 == 1);
            copier_->start({.id = buffer + 1,
                            .block_id = number++ % layout_.block_count,
                            .buffer = ring_.data(buffer),
                            .direction = scatter ? CopyDirection::scatter : CopyDirection::gather});
        }
        if (over && idle.size() == ring_.buffer_count()) break;
        CopyCompletion done[64];
        const std::size_t count = copier_->reap(done);
        for (std::size_t i = 0; i < count; ++i) {
            idle.push_back(static_cast<std::uint32_t>(done[i].id - 1));
            ++(done[i].error == 0 ? result.copies : result.errors);
        }
        if (count == 0 && !copier_->busy()) backend_->wait(copier_->look_at_ns());
    }
    result.bytes = result.copies * layout_.block_bytes;
    result.elapsed_ns = clock.now_ns() - started_ns;
    result.thread_cpu_ns = thread_cpu_ns() - cpu_started_ns;
    return result;
}

}  // namespace kvdisk

// The fallback backend: a fixed pool of threads that call pread and pwrite. It exists for machines
// where io_uring is not permitted, and behaves the same to its caller.
//
// What always holds:
//   * Everything a worker touches is in `Shared`, which the workers keep alive; so a worker that
//   hangs in
//     the kernel outlives an abandoned backend and harms nobody.
//   * A request that no worker has begun when the backend goes never begins.
//   * An idle backend uses no CPU: workers and caller sleep on condition variables.
//   * Nothing is allocated after construction.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#include "io/backend.hpp"
#include "io/fixed_queue.hpp"
#include "io/owned_files.hpp"
#include "io/require.hpp"
#include "io/signals.hpp"

namespace kvdisk::io {
namespace {

constexpr std::uint32_t depth_max = 4096;
constexpr std::uint32_t workers_max = 32;
constexpr int tries_max = 8;  // of a call that a signal or a lack of resources ended
constexpr std::size_t priority_count = 3;
constexpr std::chrono::seconds close_drain{2};

// Where a priority queues: high first, low last.
std::size_t queue_of(Priority priority) noexcept {
    switch (priority) {
        case Priority::high:
            return 0;
        case Priority::normal:
            return 1;
        case Priority::low:
            return 2;
    }
    return 1;
}

struct Shared {
    Shared(const BackendOptions& options)
        : files(options.files),
          submitted{FixedQueue<Request>(options.depth), FixedQueue<Request>(options.depth),
                    FixedQueue<Request>(options.depth)},
          finished(options.depth) {}

    bool has_work() const noexcept {
        return std::any_of(submitted.begin(), submitted.end(),
                           [](const auto& queue) { return !queue.empty(); });
    }

    Request take() noexcept {
        for (auto& queue : submitted) {
            if (!queue.empty()) return queue.pop();
        }
        require(false, "a worker takes only what is there");
        return {};
    }

    const OwnedFiles files;
    std::mutex mutex;  // guards everything below
    std::condition_variable work_arrived;
    std::condition_variable something_happened;                 // for the caller in wait
    std::array<FixedQueue<Request>, priority_count> submitted;  // by urgency
    FixedQueue<Completion> finished;
    std::uint64_t retries = 0;
    std::uint32_t idle_workers = 0;
    std::uint32_t live_workers = 0;
    bool stopping = false;
    bool woken = false;
};

std::int64_t perform(const Request& request, int file, std::uint64_t& retries) noexcept {
    const auto offset = static_cast<off_t>(request.offset);
    for (int attempt = 1;; ++attempt) {
        const ssize_t moved = request.op == Op::read
                                  ? ::pread(file, request.data, request.length, offset)
                                  : ::pwrite(file, request.data, request.length, offset);
        if (moved >= 0) return moved;
        const int error = errno;
        if ((error != EINTR && error != EAGAIN) || attempt == tries_max) return -error;
        ++retries;
    }
}

void work(const std::shared_ptr<Shared>& shared) {
    std::unique_lock lock(shared->mutex);
    for (;;) {
        ++shared->idle_workers;
        shared->work_arrived.wait(lock, [&] { return shared->stopping || shared->has_work(); });
        --shared->idle_workers;
        if (shared->stopping) break;
        const Request request = shared->take();
        lock.unlock();
        std::uint64_t retries = 0;
        const std::int64_t result =
            perform(request, shared->files.descriptors()[request.file], retries);
        lock.lock();
        shared->finished.push({.id = request.id, .result = result});
        shared->retries += retries;
        shared->something_happened.notify_one();
    }
    --shared->live_workers;
    shared->something_happened.notify_one();
}

class Threads final : public Backend {
  public:
    explicit Threads(const BackendOptions& options);
    ~Threads() override;

    const char* name() const noexcept override { return "threads"; }
    void attach() override {}
    std::uint32_t depth() const noexcept override { return depth_; }
    std::uint32_t in_flight() const noexcept override { return in_flight_; }
    void push(const Request& request) override;
    void submit() override;
    std::size_t reap(std::span<Completion> completions) override;
    void wait(std::int64_t until_ns) override;
    void wake() noexcept override;
    BackendStats stats() const override;
    void abandon() noexcept override { abandoned_ = true; }

  private:
    void start_workers(std::uint32_t count);
    void stop_workers() noexcept;

    const std::uint32_t depth_;
    const std::size_t area_count_;
    const std::shared_ptr<Shared> shared_;
    FixedQueue<Request> pushed_;
    std::vector<std::thread> workers_;
    std::uint32_t in_flight_ = 0;
    bool abandoned_ = false;
    BackendStats stats_;
};

Threads::Threads(const BackendOptions& options)
    : depth_(options.depth),
      area_count_(options.areas.size()),
      shared_(std::make_shared<Shared>(options)),
      pushed_(options.depth) {
    require(depth_ >= 1 && depth_ <= depth_max, "depth is within 1..4096");
    start_workers(std::min(depth_, workers_max));
}

void Threads::start_workers(std::uint32_t count) {
    const AllSignalsBlocked blocked;
    workers_.reserve(count);
    try {
        const std::lock_guard lock(shared_->mutex);
        while (workers_.size() < count) {
            workers_.emplace_back(work, shared_);
            ++shared_->live_workers;
        }
    } catch (const std::exception& error) {
        if (workers_.empty()) throw;
        stats_.note = "only " + std::to_string(workers_.size()) + " of " + std::to_string(count) +
                      " I/O threads could be started (" + std::string(error.what()) +
                      "): raise the limit on processes (ulimit -u, pids.max)";
    }
}

Threads::~Threads() { stop_workers(); }

// Workers at work in the kernel are given some time to end; one that hangs there is abandoned.
void Threads::stop_workers() noexcept {
    {
        std::unique_lock lock(shared_->mutex);
        shared_->stopping = true;
        for (auto& queue : shared_->submitted) queue.clear();
        shared_->work_arrived.notify_all();
        const auto all_gone = [this] { return shared_->live_workers == 0; };
        const auto give_up = std::chrono::steady_clock::now() + close_drain;
        if (!abandoned_ && !shared_->something_happened.wait_until(lock, give_up, all_gone)) {
            abandoned_ = true;
        }
    }
    for (std::thread& worker : workers_) {
        if (abandoned_) {
            worker.detach();
        } else {
            worker.join();
        }
    }
}

void Threads::push(const Request& request) {
    require(in_flight_ < depth_, "push needs in_flight() < depth()");
    require(request.id != 0 && request.length > 0, "a request has an id and a length");
    require(request.file < shared_->files.size(), "a request names one of the files");
    require(request.area == area_none || request.area < area_count_,
            "a request names one of the areas or none");
    pushed_.push(request);
    ++in_flight_;
}

void Threads::submit() {
    if (pushed_.empty()) return;
    std::size_t to_rouse = 0;
    {
        const std::lock_guard lock(shared_->mutex);
        to_rouse = std::min<std::size_t>(pushed_.size(), shared_->idle_workers);
        stats_.submitted += pushed_.size();
        while (!pushed_.empty()) {
            const Request request = pushed_.pop();
            shared_->submitted[queue_of(request.priority)].push(request);
        }
    }
    ++stats_.submit_calls;
    for (; to_rouse > 0; --to_rouse) shared_->work_arrived.notify_one();
}

std::size_t Threads::reap(std::span<Completion> completions) {
    std::size_t count = 0;
    {
        const std::lock_guard lock(shared_->mutex);
        while (count < completions.size() && !shared_->finished.empty()) {
            completions[count++] = shared_->finished.pop();
        }
    }
    in_flight_ -= static_cast<std::uint32_t>(count);
    stats_.completed += count;
    return count;
}

void Threads::wait(std::int64_t until_ns) {
    submit();
    std::unique_lock lock(shared_->mutex);
    const auto happened = [this] { return shared_->woken || !shared_->finished.empty(); };
    if (until_ns < 0) {
        shared_->something_happened.wait(lock, happened);
    } else {
        // The steady clock is CLOCK_MONOTONIC in every C++ library for Linux.
        const std::chrono::steady_clock::time_point until{std::chrono::nanoseconds(until_ns)};
        shared_->something_happened.wait_until(lock, until, happened);
    }
    shared_->woken = false;
}

void Threads::wake() noexcept {
    const std::lock_guard lock(shared_->mutex);
    shared_->woken = true;
    shared_->something_happened.notify_one();
}

BackendStats Threads::stats() const {
    BackendStats stats = stats_;
    const std::lock_guard lock(shared_->mutex);
    stats.submit_retries = shared_->retries;
    return stats;
}

}  // namespace

std::unique_ptr<Backend> make_threads(const BackendOptions& options) {
    return std::make_unique<Threads>(options);
}

}  // namespace kvdisk::io

// The io_uring backend. It exists because nothing else keeps an NVMe drive busy from one thread:
// many requests in flight, one system call for a batch, buffers and files registered once.
//
// What always holds:
//   * A request lives in one slot of a fixed table from push until its completion is drained. The
//   kernel
//     sees only the slot's token, which is never used twice, so a stray completion finds no slot.
//   * A request is in exactly one place: the pending queue, a submission entry that the kernel has
//   not
//     taken, the kernel, or the finished queue. What the kernel took is read from its queue head,
//     never from a return value, so an interrupted call can neither lose nor double a request.
//   * Every retry is bounded in number and spread over time; no answer of the kernel makes this
//   spin.
//   * Nothing is allocated after construction.
#include <linux/time_types.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <system_error>
#include <thread>

#include "io/backend.hpp"
#include "io/fixed_queue.hpp"
#include "io/owned_files.hpp"
#include "io/require.hpp"
#include "io/transient.hpp"
#include "io/uring_ring.hpp"

#if defined(__SANITIZE_THREAD__)
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
}
#endif

namespace kvdisk::io {
namespace {

constexpr std::uint32_t depth_max = 4096;
constexpr std::uint64_t slot_bits = 12;  // 1 << slot_bits == depth_max
constexpr std::uint64_t wake_token = UINT64_MAX;

// A submission that the kernel does not take is tried again after 1, 2, 4 ... 32 ms, so for two
// seconds.
constexpr std::uint32_t submit_tries_max = 64;
constexpr std::uint32_t submit_tries_at_once = 8;
constexpr std::int64_t submit_gap_first_ns = 1'000'000;
constexpr std::uint32_t submit_gap_doublings_max = 5;

// A request that the kernel ended with a transient errno is tried this often before the caller sees
// it.
constexpr std::uint8_t request_tries_max = 8;

constexpr std::int64_t close_drain_ns = 2'000'000'000;

// ioprio_set(2): class best-effort (2) in the top three bits, levels 0 (first) to 7 (last).
constexpr std::uint16_t ioprio_high = (2U << 13) | 0U;
constexpr std::uint16_t ioprio_low = (2U << 13) | 7U;

std::int64_t now_ns() noexcept {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

class Uring final : public Backend {
  public:
    Uring(const BackendOptions& options, const UringTuning& tuning);
    ~Uring() override;

    const char* name() const noexcept override { return "uring"; }
    void attach() override;
    std::uint32_t depth() const noexcept override { return depth_; }
    std::uint32_t in_flight() const noexcept override { return in_flight_; }
    void push(const Request& request) override;
    void submit() override;
    std::size_t reap(std::span<Completion> completions) override;
    void wait(std::int64_t until_ns) override;
    void wake() noexcept override;
    BackendStats stats() const override { return stats_; }
    void abandon() noexcept override { abandoned_ = true; }

  private:
    struct Slot {
        Request request;
        std::uint64_t token = 0;  // 0: free
        std::uint8_t tries = 0;
        bool plain_priority = false;  // sent without a priority after a refusal
    };
    enum class PrioritySupport : std::uint8_t { untested, works, refused };

    // --- towards the kernel
    void fill_submission_queue(bool arm_wake) noexcept;
    void prepare(io_uring_sqe* entry, Slot& slot) noexcept;
    int enter(unsigned to_submit, unsigned completions_min, unsigned flags, void* argument,
              std::size_t argument_bytes) noexcept;
    bool try_again_now(int result) noexcept;
    void fail_unsubmitted(int error) noexcept;
    bool must_pause() const noexcept { return stalled_tries_ > 0 && now_ns() < next_try_ns_; }

    // --- from the kernel
    bool drain() noexcept;
    bool flush_completions() noexcept;
    void handle(std::uint64_t token, std::int32_t result) noexcept;
    bool goes_again(Slot& slot, std::int32_t result) noexcept;
    void finish(std::uint16_t index, std::int64_t result) noexcept;

    // --- sleeping
    void sleep_in_kernel(std::int64_t until_ns) noexcept;
    void sleep_beside_kernel(std::int64_t until_ns) noexcept;
    void clear_wake_signal() noexcept;
    void drain_for_close() noexcept;

    const std::uint32_t depth_;
    const bool force_async_;
    const bool force_async_reads_;
    const EnterFunction enter_;
    OwnedFiles files_;
    UringRing ring_;
    std::size_t area_count_;
    std::size_t areas_registered_ = 0;  // the first ones
    std::vector<Slot> slots_;
    FixedQueue<std::uint16_t> free_;
    FixedQueue<std::uint16_t> pending_;
    FixedQueue<Completion> finished_;
    std::uint64_t pushes_ = 0;
    std::uint32_t in_flight_ = 0;
    PrioritySupport priority_support_ = PrioritySupport::untested;
    bool requeued_ = false;
    bool abandoned_ = false;

    std::uint32_t stalled_tries_ = 0;  // submissions in a row that moved nothing
    std::int64_t next_try_ns_ = 0;
    std::uint32_t failed_waits_ = 0;  // waits in a row that the kernel refused

    int wake_descriptor_ = -1;
    bool wake_armed_ = false;
    std::atomic<bool> asleep_{false};
    std::atomic<bool> woken_{false};
    std::thread::id owner_;
    BackendStats stats_;
};

Uring::Uring(const BackendOptions& options, const UringTuning& tuning)
    : depth_(options.depth),
      force_async_(options.force_async),
      force_async_reads_(options.force_async || options.force_async_reads),
      enter_(tuning.enter != nullptr ? tuning.enter : enter_kernel),
      files_(options.files),
      ring_(std::clamp<std::uint32_t>(options.depth, 1, depth_max) + 1,
            tuning),  // and the wake poll
      area_count_(options.areas.size()),
      slots_(options.depth),
      free_(options.depth),
      pending_(options.depth),
      finished_(options.depth) {
    require(depth_ >= 1 && depth_ <= depth_max, "depth is within 1..4096");
    for (std::uint32_t i = 0; i < depth_; ++i) free_.push(static_cast<std::uint16_t>(i));
    stats_.files_registered = ring_.register_files(files_.descriptors());
    areas_registered_ = ring_.register_areas(options.areas, options.areas_dispensable);
    stats_.areas_registered = areas_registered_ > 0;
    stats_.note = ring_.note();
    wake_descriptor_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (wake_descriptor_ < 0) throw std::system_error(errno, std::system_category(), "eventfd");
}

Uring::~Uring() {
    if (!abandoned_ && owner_ != std::thread::id{}) drain_for_close();
    if (abandoned_) {
        ring_.leak();
        files_.leak();
        return;  // the wake descriptor stays too: the kernel still polls it
    }
    ::close(wake_descriptor_);
}

void Uring::attach() {
    ring_.enable();
    owner_ = std::this_thread::get_id();
}

// ---------------------------------------------------------------- towards the kernel

void Uring::push(const Request& request) {
    require(in_flight_ < depth_, "push needs in_flight() < depth()");
    require(request.id != 0 && request.length > 0, "a request has an id and a length");
    require(request.file < files_.size(), "a request names one of the files");
    require(request.area == area_none || request.area < area_count_,
            "a request names one of the areas or none");
    const std::uint16_t index = free_.pop();
    slots_[index] = {.request = request, .token = (++pushes_ << slot_bits) | index};
    pending_.push(index);
    ++in_flight_;
}

void Uring::submit() {
    requeued_ = false;
    for (;;) {
        fill_submission_queue(false);
        const unsigned waiting = ring_.unsubmitted();
        if (waiting == 0 || must_pause()) return;
        const int result = enter(waiting, 0, 0, nullptr, 0);
        if (ring_.unsubmitted() < waiting) {
            stalled_tries_ = 0;
        } else if (!try_again_now(result)) {
            return;
        }
    }
}

// Moves pending requests into free submission entries, the wake poll first.
void Uring::fill_submission_queue(bool arm_wake) noexcept {
    if (arm_wake && !wake_armed_) {
        if (io_uring_sqe* const entry = io_uring_get_sqe(ring_.get())) {
            io_uring_prep_poll_add(entry, wake_descriptor_, POLLIN);
            entry->user_data = wake_token;
            wake_armed_ = true;
        }
    }
    while (!pending_.empty()) {
        io_uring_sqe* const entry = io_uring_get_sqe(ring_.get());
        if (entry == nullptr) break;
        prepare(entry, slots_[pending_.pop()]);
        ++stats_.submitted;
    }
    ring_.publish();
}

void Uring::prepare(io_uring_sqe* entry, Slot& slot) noexcept {
    const Request& request = slot.request;
    const bool fixed_area = request.area < areas_registered_;
    const int operation = request.op == Op::read
                              ? (fixed_area ? IORING_OP_READ_FIXED : IORING_OP_READ)
                              : (fixed_area ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE);
    const int file =
        stats_.files_registered ? int{request.file} : files_.descriptors()[request.file];
    io_uring_prep_rw(operation, entry, file, request.data, request.length, request.offset);
    if (fixed_area) entry->buf_index = request.area;
    unsigned flags = 0;
    if (stats_.files_registered) flags |= IOSQE_FIXED_FILE;
    if (request.op == Op::read ? force_async_reads_ : force_async_) flags |= IOSQE_ASYNC;
    entry->flags = static_cast<std::uint8_t>(flags);
    slot.plain_priority = priority_support_ == PrioritySupport::refused || slot.plain_priority;
    if (!slot.plain_priority && request.priority != Priority::normal) {
        entry->ioprio = request.priority == Priority::high ? ioprio_high : ioprio_low;
    }
    entry->user_data = slot.token;
}

int Uring::enter(unsigned to_submit, unsigned completions_min, unsigned flags, void* argument,
                 std::size_t argument_bytes) noexcept {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(this);
#endif
    if (to_submit > 0) ++stats_.submit_calls;
    const auto ring = static_cast<unsigned>(ring_.get()->ring_fd);
    return enter_(ring, to_submit, completions_min, flags, argument, argument_bytes);
}

// Decides after a submission that moved nothing: again at once, later, or never.
bool Uring::try_again_now(int result) noexcept {
    const int error = result < 0 ? -result : EAGAIN;
    if (!transient(error)) {
        fail_unsubmitted(error);
        return false;
    }
    ++stats_.submit_retries;
    if (++stalled_tries_ >= submit_tries_max) {
        fail_unsubmitted(error);
        return false;
    }
    const bool room_made = error != EINTR && flush_completions();
    if ((error == EINTR || room_made) && stalled_tries_ < submit_tries_at_once) return true;
    next_try_ns_ =
        now_ns() + (submit_gap_first_ns << std::min(stalled_tries_ - 1, submit_gap_doublings_max));
    return false;
}

// Ends every request that the kernel has not taken; its entries are taken back first.
void Uring::fail_unsubmitted(int error) noexcept {
    for (unsigned count = ring_.unsubmitted(), i = 0; i < count; ++i) {
        const std::uint64_t token = ring_.unsubmitted_entry(i).user_data;
        if (token == wake_token) {
            wake_armed_ = false;
        } else {
            --stats_.submitted;
            finish(static_cast<std::uint16_t>(token & (depth_max - 1)), -error);
        }
    }
    ring_.rewind();
    while (!pending_.empty()) finish(pending_.pop(), -error);
    stalled_tries_ = 0;
}

// ---------------------------------------------------------------- from the kernel

std::size_t Uring::reap(std::span<Completion> completions) {
    flush_completions();
    if (finished_.size() < completions.size() && (ring_.flags() & IORING_SQ_TASKRUN) != 0) {
        enter(0, 0, IORING_ENTER_GETEVENTS, nullptr, 0);
        flush_completions();
    }
    if (requeued_) submit();
    std::size_t count = 0;
    while (count < completions.size() && !finished_.empty()) {
        completions[count++] = finished_.pop();
    }
    in_flight_ -= static_cast<std::uint32_t>(count);
    stats_.completed += count;
    return count;
}

// Takes what lies in the completion queue. Returns whether there was anything.
bool Uring::drain() noexcept {
    io_uring* const ring = ring_.get();
    io_uring_cqe* entry = nullptr;
    unsigned head = 0;
    unsigned count = 0;
    io_uring_for_each_cqe(ring, head, entry) {
        handle(entry->user_data, entry->res);
        ++count;
    }
    io_uring_cq_advance(ring, count);
#if defined(__SANITIZE_THREAD__)
    if (count > 0) __tsan_acquire(this);
#endif
    return count > 0;
}

// Drains, and fetches what the kernel keeps aside because the completion queue was full.
bool Uring::flush_completions() noexcept {
    const bool any = drain();
    while ((ring_.flags() & IORING_SQ_CQ_OVERFLOW) != 0) {
        ++stats_.overflows;
        enter(0, 0, IORING_ENTER_GETEVENTS, nullptr, 0);
        if (!drain()) break;
    }
    return any;
}

void Uring::handle(std::uint64_t token, std::int32_t result) noexcept {
    if (token == wake_token) {
        wake_armed_ = false;
        clear_wake_signal();
        return;
    }
    const std::uint64_t index = token & (depth_max - 1);
    if (token == 0 || index >= depth_ || slots_[index].token != token) {
        ++stats_.unknown_completions;
        return;
    }
    Slot& slot = slots_[index];
    if (goes_again(slot, result)) {
        slot.token = (++pushes_ << slot_bits) | index;
        pending_.push(static_cast<std::uint16_t>(index));
        --stats_.submitted;
        requeued_ = true;
    } else {
        finish(static_cast<std::uint16_t>(index), result);
    }
}

// Whether a request whose I/O has ended must be sent once more: after a transient errno, or because
// the kernel may have refused nothing but its priority.
bool Uring::goes_again(Slot& slot, std::int32_t result) noexcept {
    if (result == -EINTR || result == -EAGAIN) {
        ++stats_.submit_retries;
        return ++slot.tries < request_tries_max;
    }
    if (slot.request.priority == Priority::normal) return false;
    if (result >= 0 && priority_support_ == PrioritySupport::untested) {
        priority_support_ = slot.plain_priority ? PrioritySupport::refused : PrioritySupport::works;
    }
    const bool suspect =
        result == -EINVAL && !slot.plain_priority && priority_support_ != PrioritySupport::works;
    slot.plain_priority = slot.plain_priority || suspect;
    return suspect;
}

void Uring::finish(std::uint16_t index, std::int64_t result) noexcept {
    finished_.push({.id = slots_[index].request.id, .result = result});
    slots_[index].token = 0;
    free_.push(index);
}

// ---------------------------------------------------------------- sleeping

void Uring::wait(std::int64_t until_ns) {
    flush_completions();
    if (!finished_.empty() || woken_.load(std::memory_order_acquire)) {
        submit();
        woken_.exchange(false, std::memory_order_acq_rel);
        return;
    }
    asleep_.store(true);
    // Sequentially consistent with wake(): either it sees `asleep_` or this sees `woken_`.
    if (!woken_.load()) sleep_in_kernel(until_ns);
    asleep_.store(false);
    woken_.exchange(false, std::memory_order_acq_rel);
    flush_completions();
}

// Submits and sleeps in one system call.
void Uring::sleep_in_kernel(std::int64_t until_ns) noexcept {
    fill_submission_queue(true);
    const bool paused = must_pause();
    const unsigned waiting = paused ? 0 : ring_.unsubmitted();
    if (paused && (until_ns < 0 || until_ns > next_try_ns_)) until_ns = next_try_ns_;
    std::int64_t left_ns = until_ns < 0 ? 0 : std::max<std::int64_t>(until_ns - now_ns(), 0);
    __kernel_timespec timeout{.tv_sec = left_ns / 1'000'000'000,
                              .tv_nsec = left_ns % 1'000'000'000};
    io_uring_getevents_arg argument{};
    argument.sigmask_sz = NSIG / 8;
    argument.ts = until_ns < 0 ? 0 : reinterpret_cast<std::uintptr_t>(&timeout);
    // With more to submit, or no ear for wake(), it must not sleep; unless it must not submit
    // either.
    const bool may_sleep = paused || (pending_.empty() && wake_armed_);
    const bool sleeps = may_sleep && (until_ns < 0 || left_ns > 0);
    const int result = enter(waiting, sleeps ? 1 : 0, IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG,
                             &argument, sizeof argument);
    if (waiting > 0) {
        if (ring_.unsubmitted() < waiting) {
            stalled_tries_ = 0;
        } else {
            try_again_now(result);
        }
    }
    if (result >= 0 || result == -ETIME || result == -EINTR) {
        failed_waits_ = 0;
    } else if (finished_.empty() && !drain()) {
        sleep_beside_kernel(until_ns);
    }
}

// When the kernel refuses to wait (a security filter, a lost completion): sleeps on the wake signal
// alone and for a short time, so that neither a busy loop nor a hang comes of it.
void Uring::sleep_beside_kernel(std::int64_t until_ns) noexcept {
    failed_waits_ = std::min(failed_waits_ + 1, submit_gap_doublings_max);
    std::int64_t left_ns = submit_gap_first_ns << failed_waits_;
    if (until_ns >= 0) left_ns = std::clamp<std::int64_t>(until_ns - now_ns(), 0, left_ns);
    const timespec timeout{.tv_sec = 0, .tv_nsec = static_cast<long>(left_ns)};
    pollfd wake_signal{.fd = wake_descriptor_, .events = POLLIN, .revents = 0};
    if (::ppoll(&wake_signal, 1, &timeout, nullptr) > 0) clear_wake_signal();
}

void Uring::wake() noexcept {
    woken_.store(true);
    if (!asleep_.load()) return;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(wake_descriptor_, &one, sizeof one);
}

void Uring::clear_wake_signal() noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto read = ::read(wake_descriptor_, &count, sizeof count);
}

// What the kernel holds must end before the ring goes. What does not end in time, or cannot be
// waited for from this thread, is abandoned: a leak, never a write into memory that has another
// owner.
void Uring::drain_for_close() noexcept {
    fail_unsubmitted(ECANCELED);
    const std::int64_t give_up_ns = now_ns() + close_drain_ns;
    flush_completions();
    while (free_.size() < depth_) {
        if (owner_ != std::this_thread::get_id() || now_ns() >= give_up_ns) {
            abandoned_ = true;
            return;
        }
        sleep_in_kernel(give_up_ns);
        flush_completions();
        fail_unsubmitted(ECANCELED);
    }
}

}  // namespace

std::unique_ptr<Backend> make_uring(const BackendOptions& options) {
    return make_uring_tuned(options, {});
}

std::unique_ptr<Backend> make_uring_tuned(const BackendOptions& options,
                                          const UringTuning& tuning) {
    return std::make_unique<Uring>(options, tuning);
}

}  // namespace kvdisk::io

#include "io/workload.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <system_error>

#include "io/choose.hpp"
#include "io/large_pages.hpp"
#include "io/require.hpp"

namespace kvdisk::io {

namespace {

constexpr std::uint32_t sector_bytes = 512;
constexpr std::uint64_t slot_bits = 12;  // of a request's id: the depth is 4096 at most
// The random bytes under the stamps repeat after this much, which is more than any file system's
// compression looks back.
constexpr std::uint64_t write_buffers_bytes_min = std::uint64_t{8} << 20;
constexpr std::uint8_t resumes_max = 16;          // of one request, as in the pipeline
constexpr std::int64_t look_up_ns = 100'000'000;  // how often a quiet loop looks at `stopped_`
constexpr std::int64_t abandon_after_ns = 5'000'000'000;  // after a stop

// The first bytes of every sector: which write it is of and where the sector lies. Both words look
// random, so that stamps cannot be compressed either.
struct Stamp {
    std::uint64_t use;    // generation and write buffer, hidden under the place
    std::uint64_t check;  // of use and place
};
static_assert(sizeof(Stamp) == 16);

std::int64_t clock_ns(clockid_t clock) noexcept {
    timespec time{};
    ::clock_gettime(clock, &time);
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::int64_t now_ns() noexcept { return clock_ns(CLOCK_MONOTONIC); }

// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t value) noexcept {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9ULL;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBULL;
    return value ^ (value >> 31);
}

constexpr std::uint64_t golden = 0x9E3779B97F4A7C15ULL;

// What stands for a seed and a sector's offset.
std::uint64_t place_of(std::uint64_t seed, std::uint64_t offset) noexcept {
    return mix(mix(seed + golden) + offset * golden);
}

Stamp make_stamp(std::uint32_t generation, std::uint32_t buffer, std::uint64_t place) noexcept {
    const std::uint64_t use = (std::uint64_t{generation} << 32) | buffer;
    return {.use = use ^ place, .check = mix(use + place)};
}

void fill_random(std::span<std::byte> bytes, std::uint64_t seed) noexcept {
    std::uint64_t state = mix(seed + golden);
    for (std::size_t i = 0; i + sizeof state <= bytes.size(); i += sizeof state) {
        state += golden;
        const std::uint64_t value = mix(state);
        std::memcpy(bytes.data() + i, &value, sizeof value);
    }
}

void check(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

RawJobOptions checked(const RawJobOptions& options) {
    check(options.file >= 0, "the file is not open");
    check(options.block_bytes >= sector_bytes && options.block_bytes % sector_bytes == 0,
          "the block size must be a multiple of 512 bytes");
    check(options.block_bytes <= area_bytes_max / 2, "the block size must be 512 MiB at most");
    check(options.size_bytes % options.block_bytes == 0 && options.offset % sector_bytes == 0,
          "the size must be a multiple of the block size");
    check(options.depth >= 1 && options.depth <= 4096, "the depth must be 1 to 4096");
    check(options.size_bytes / options.block_bytes >= options.depth,
          "the size must hold at least as many blocks as there are in flight");
    check(options.read_percent <= 100, "read_percent must be 0 to 100");
    return options;
}

std::uint32_t write_buffers_for(const RawJobOptions& options) noexcept {
    const std::uint64_t for_variety = write_buffers_bytes_min / options.block_bytes;
    return static_cast<std::uint32_t>(std::max<std::uint64_t>(options.depth, for_variety));
}

}  // namespace

// ---------------------------------------------------------------- construction

RawJob::RawJob(const RawJobOptions& options)
    : options_(checked(options)),
      block_count_(options.size_bytes / options.block_bytes),
      write_buffer_count_(write_buffers_for(options)),
      slots_(options.depth),
      free_slots_(options.depth),
      free_buffers_(write_buffer_count_),
      generations_(block_count_),
      writing_(block_count_),
      random_state_(mix(options.seed ^ options.offset)) {
    const std::uint64_t buffers = std::uint64_t{options_.depth} + write_buffer_count_;
    // Whole pages, so that O_DIRECT takes them.
    memory_bytes_ = (buffers * options_.block_bytes + 4095) / 4096 * 4096;
    void* const mapped = map_large(memory_bytes_);
    if (mapped == nullptr) {
        throw std::system_error(errno, std::generic_category(), "cannot map memory for buffers");
    }
    memory_ = static_cast<std::byte*>(mapped);
    for (std::uint32_t i = 0; i < options_.depth; ++i) free_slots_.push(i);
    for (std::uint32_t i = 0; i < write_buffer_count_; ++i) {
        free_buffers_.push(i);
        fill_random({write_buffer(i), options_.block_bytes}, mix(options_.seed) + i);
    }
    BackendOptions backend;
    backend.files = {options_.file};
    backend.depth = options_.depth;
    const std::uint64_t area_bytes = buffers_per_area() * options_.block_bytes;
    for (std::uint64_t first = 0; first < memory_bytes_; first += area_bytes) {
        backend.areas.emplace_back(memory_ + first, std::min(area_bytes, memory_bytes_ - first));
    }
    try {
        ChosenBackend chosen = options_.make_backend
                                   ? ChosenBackend{options_.make_backend(backend), {}}
                                   : choose_backend(backend, options_.backend);
        backend_ = std::move(chosen.backend);
        backend_reason_ = std::move(chosen.reason);
    } catch (...) {
        ::munmap(memory_, memory_bytes_);
        throw;
    }
}

RawJob::~RawJob() {
    if (abandoned_) backend_->abandon();
    backend_.reset();
    if (!abandoned_) ::munmap(memory_, memory_bytes_);
}

// Whole pages for every block size that is a multiple of 512.
std::uint64_t RawJob::buffers_per_area() const noexcept {
    return area_bytes_max / options_.block_bytes / 8 * 8;
}

// ---------------------------------------------------------------- phases

RawResult RawJob::fill() { return pump(Phase::fill, -1); }

RawResult RawJob::run(std::int64_t duration_ns) { return pump(Phase::run, duration_ns); }

RawVerdict RawJob::verify() {
    RawVerdict verdict;
    verdict_ = &verdict;
    const RawResult result = pump(Phase::verify, -1);
    verdict_ = nullptr;
    verdict.error = result.error;
    if (result.error != 0) verdict.first_wrong_offset = result.error_offset;
    return verdict;
}

void RawJob::forget() noexcept { std::ranges::fill(generations_, 0); }

void RawJob::stop() noexcept {
    stopped_ = true;
    backend_->wake();
}

// The loop. Requests begin until the phase is over, then what is in flight ends.
RawResult RawJob::pump(Phase phase, std::int64_t duration_ns) {
    require(!abandoned_, "a job whose requests were abandoned does not run again");
    if (!attached_) backend_->attach();
    attached_ = true;
    if (phase != Phase::run) position_ = 0;
    blocks_left_ = phase == Phase::run ? UINT64_MAX : block_count_;
    progress_bytes_ = 0;

    RawResult result;
    std::array<Completion, 256> completions;
    const std::int64_t cpu_before_ns = clock_ns(CLOCK_THREAD_CPUTIME_ID);
    const std::int64_t started_ns = now_ns();
    std::int64_t now = started_ns;
    std::int64_t give_up_ns = INT64_MAX;
    for (bool beginning = true;;) {
        const bool stopped = stopped_.load(std::memory_order_relaxed);
        beginning = beginning && !stopped && result.error == 0 && blocks_left_ > 0 &&
                    (duration_ns < 0 || now - started_ns < duration_ns);
        while (beginning && blocks_left_ > 0 && !free_slots_.empty() && begin(phase, now)) {
        }
        if (backend_->in_flight() == 0) break;
        if (stopped && give_up_ns == INT64_MAX) give_up_ns = now + abandon_after_ns;
        if (now >= give_up_ns) {
            result.abandoned = backend_->in_flight();
            abandoned_ = true;
            break;
        }
        backend_->wait(now + look_up_ns);
        const std::uint32_t in_flight = backend_->in_flight();
        const std::size_t count = backend_->reap(completions);
        const std::int64_t later = now_ns();
        result.in_flight_ns += static_cast<std::uint64_t>(later - now) * in_flight;
        now = later;
        for (std::size_t i = 0; i < count; ++i) handle(phase, completions[i], now, result);
        progress_bytes_.store(result.bytes[0] + result.bytes[1], std::memory_order_relaxed);
    }
    const bool sync = options_.sync_after_writes && result.ios[1] > 0 && !abandoned_;
    if (sync && ::fdatasync(options_.file) != 0 && result.error == 0) result.error = errno;
    result.elapsed_ns = static_cast<std::uint64_t>(now_ns() - started_ns);
    result.thread_cpu_ns =
        static_cast<std::uint64_t>(clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_before_ns);
    return result;
}

// Begins the next request of the phase. False: nothing can begin before something has ended.
bool RawJob::begin(Phase phase, std::int64_t now) {
    const bool write =
        phase == Phase::fill || (phase == Phase::run && random_below(100) >= options_.read_percent);
    if (phase == Phase::verify) {
        while (blocks_left_ > 0 && generations_[position_] == 0) advance();
        if (blocks_left_ == 0) return false;
    }
    std::uint64_t block =
        options_.random && phase == Phase::run ? random_below(block_count_) : position_;
    if (write) {
        // At most depth - 1 others are being written, and there are at least depth blocks.
        while (writing_[block]) block = block + 1 == block_count_ ? 0 : block + 1;
    }
    position_ = block;
    advance();

    const std::uint32_t index = free_slots_.pop();
    Slot& slot = slots_[index];
    slot = {.op = write ? Op::write : Op::read, .block = block, .started_ns = now};
    if (write) {
        slot.buffer = free_buffers_.pop();
        slot.data = write_buffer(slot.buffer);
        writing_[block] = true;
        if (++generation_ == 0) generation_ = 1;
        generations_[block] = generation_;
        stamp(slot);
    } else {
        slot.data = buffer(index);
    }
    push(index);
    return true;
}

void RawJob::advance() noexcept {
    if (++position_ == block_count_) position_ = 0;
    --blocks_left_;
}

void RawJob::push(std::uint32_t index) {
    const Slot& slot = slots_[index];
    const std::uint32_t buffer_index = slot.op == Op::read ? index : options_.depth + slot.buffer;
    backend_->push({.id = (++requests_ << slot_bits) | index,
                    .offset = offset_of(slot.block) + slot.done_bytes,
                    .data = slot.data + slot.done_bytes,
                    .length = options_.block_bytes - slot.done_bytes,
                    .area = static_cast<std::uint16_t>(buffer_index / buffers_per_area()),
                    .op = slot.op});
}

void RawJob::handle(Phase phase, const Completion& completion, std::int64_t now,
                    RawResult& result) {
    const auto index = static_cast<std::uint32_t>(completion.id & ((1U << slot_bits) - 1));
    Slot& slot = slots_[index];
    const auto direction = static_cast<std::size_t>(slot.op);
    const std::uint32_t left_bytes = options_.block_bytes - slot.done_bytes;
    const bool is_short = completion.result > 0 && completion.result < left_bytes;
    if (is_short && slot.resumes < resumes_max) {
        ++result.short_ios[direction];
        ++slot.resumes;
        // From the last whole sector, as O_DIRECT wants it.
        slot.done_bytes +=
            static_cast<std::uint32_t>(completion.result) / sector_bytes * sector_bytes;
        push(index);
        return;
    }
    if (completion.result != left_bytes) {
        if (result.error == 0) {
            result.error = completion.result < 0 ? static_cast<int>(-completion.result) : EIO;
            result.error_offset = offset_of(slot.block) + slot.done_bytes;
        }
        generations_[slot.block] = 0;
    } else {
        result.bytes[direction] += options_.block_bytes;
        ++result.ios[direction];
        result.latency_ns[direction].record(static_cast<std::uint64_t>(now - slot.started_ns));
        if (phase == Phase::run && slot.op == Op::read && !first_stamp_is_ours(slot)) {
            ++result.wrong_reads;
        }
        if (phase == Phase::verify) judge(slot);
    }
    if (slot.op == Op::write) {
        writing_[slot.block] = false;
        free_buffers_.push(slot.buffer);
    }
    free_slots_.push(index);
}

// xorshift64* (Vigna 2016), reduced by multiplication.
std::uint64_t RawJob::random_below(std::uint64_t bound) noexcept {
    random_state_ ^= random_state_ >> 12;
    random_state_ ^= random_state_ << 25;
    random_state_ ^= random_state_ >> 27;
    const std::uint64_t value = random_state_ * 0x2545F4914F6CDD1DULL;
    return (value >> 32) * bound >> 32;
}

// ---------------------------------------------------------------- what the disk must hold

std::uint64_t RawJob::offset_of(std::uint64_t block) const noexcept {
    return options_.offset + block * options_.block_bytes;
}

std::byte* RawJob::buffer(std::uint64_t index) const noexcept {
    return memory_ + index * options_.block_bytes;
}

std::byte* RawJob::write_buffer(std::uint64_t index) const noexcept {
    return buffer(options_.depth + index);
}

void RawJob::stamp(const Slot& slot) const noexcept {
    const std::uint64_t offset = offset_of(slot.block);
    for (std::uint32_t at = 0; at < options_.block_bytes; at += sector_bytes) {
        const Stamp stamp =
            make_stamp(generations_[slot.block], slot.buffer, place_of(options_.seed, offset + at));
        std::memcpy(slot.data + at, &stamp, sizeof stamp);
    }
}

// Cheap enough for the timed part: that the right block came, and not an older file's. Which
// generation it is cannot be said while writes are in flight.
bool RawJob::first_stamp_is_ours(const Slot& slot) const noexcept {
    if (generations_[slot.block] == 0) return true;
    Stamp stamp;
    std::memcpy(&stamp, slot.data, sizeof stamp);
    const std::uint64_t place = place_of(options_.seed, offset_of(slot.block));
    return stamp.check == mix((stamp.use ^ place) + place);
}

void RawJob::judge(const Slot& slot) noexcept {
    ++verdict_->blocks_checked;
    const std::uint64_t offset = offset_of(slot.block);
    Stamp found;
    std::memcpy(&found, slot.data, sizeof found);
    // Which write buffer it says it came from: then that one's random bytes must follow.
    const auto buffer = static_cast<std::uint32_t>(found.use ^ place_of(options_.seed, offset));
    bool right = buffer < write_buffer_count_;
    for (std::uint32_t at = 0; right && at < options_.block_bytes; at += sector_bytes) {
        const Stamp expected =
            make_stamp(generations_[slot.block], buffer, place_of(options_.seed, offset + at));
        right = std::memcmp(slot.data + at, &expected, sizeof expected) == 0 &&
                std::memcmp(slot.data + at + sizeof expected,
                            write_buffer(buffer) + at + sizeof expected,
                            sector_bytes - sizeof expected) == 0;
    }
    if (right) return;
    if (verdict_->blocks_wrong++ == 0) verdict_->first_wrong_offset = offset;
}

}  // namespace kvdisk::io

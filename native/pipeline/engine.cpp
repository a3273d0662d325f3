// What callers reach: checks at the edge, the split of a transfer over shards, and closing.
#include "pipeline/engine.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>

#include "pipeline/cuda_driver.hpp"
#include "pipeline/memory.hpp"
#include "pipeline/shard.hpp"

namespace kvdisk {

namespace {

constexpr std::uint64_t restore_piece_bytes = 4 << 20;
constexpr std::uint64_t lost_pages_max = 16;

// Neighbouring slots that stay on one shard: long enough for merged I/O, and whole record pages.
constexpr std::uint64_t shard_span_slots = 64;
static_assert(shard_span_slots % records_per_page == 0);

// How long a caller waits for figures before it takes the last known ones.
constexpr auto stats_wait = std::chrono::milliseconds(200);

std::int64_t after(std::int64_t now_ns, std::int64_t duration_ns) {
    if (duration_ns < 0 || duration_ns > time_never - now_ns) return time_never;
    return now_ns + duration_ns;
}

void require(bool condition, const char* what) {
    if (!condition) throw std::invalid_argument(what);
}

void check_options(const EngineOptions& options) {
    const Layout& layout = options.layout;
    std::uint64_t block_bytes = 0;
    for (const Region& region : layout.regions) {
        require(region.base != nullptr && region.segment_bytes > 0, "a region has no memory");
        block_bytes += region.segment_bytes;
    }
    require(layout.block_count > 0 && block_bytes > 0, "the layout has no blocks");
    require(block_bytes == layout.block_bytes, "block_bytes is not the sum of the segments");
    require(options.alignment >= 512 && options.alignment <= 65536 &&
                (options.alignment & (options.alignment - 1)) == 0,
            "alignment must be a power of two from 512 to 65536");
    require(options.slot_bytes >= block_bytes && options.slot_bytes % 4096 == 0 &&
                options.slot_bytes % options.alignment == 0,
            "slot_bytes must hold a block and be a multiple of 4096 and of the alignment");
    require(options.slot_count > 0, "slot_count must be at least 1");
    require(options.shards >= 1 && options.shards <= 64, "shards must be 1 to 64");
    require(options.iodepth >= 1 && options.iodepth <= 1024, "iodepth must be 1 to 1024");
    require(options.rows_per_buffer >= 1 && options.rows_per_buffer <= 32,
            "rows_per_buffer must be 1 to 32");
    require(options.buffers >= 2 && options.buffers <= 65535, "buffers must be 2 to 65535");
    require(options.load_reserve < options.buffers, "load_reserve must leave buffers for stores");
    require(options.store_depth_beside_loads >= 1, "store_depth_beside_loads must be at least 1");
    require(options.slot_bytes * options.rows_per_buffer <= io::area_bytes_max,
            "a buffer may not exceed 1 GiB");
    require(::fcntl(options.data_fd, F_GETFD) >= 0, "data_fd is not open");
    require(options.record_fd < 0 || ::fcntl(options.record_fd, F_GETFD) >= 0,
            "record_fd is not open");
    require(options.epoch >= 1, "epoch must be at least 1");
    require(options.record_offset % 4096 == 0, "record_offset must be a multiple of 4096");
    if (options.direct_stores || options.direct_loads) {
        const Region& region = layout.regions.front();
        require(options.device == "cpu", "the direct path is for blocks in host memory");
        require(layout.regions.size() == 1 && block_bytes == options.slot_bytes &&
                    reinterpret_cast<std::uintptr_t>(region.base) % options.alignment == 0 &&
                    region.block_stride_bytes % options.alignment == 0,
                "the direct path needs one region of aligned blocks that fill their slots");
    }
}

// With the device by its index, found on the caller's thread: "cuda" means what is current there.
EngineOptions resolved(EngineOptions options) {
    if (options.device != "cpu") {
        options.device = "cuda:" + std::to_string(cuda::resolve_device(options.device));
    }
    return options;
}

RestoredRecords columns_of(const SlotRecords& records, std::uint64_t count) {
    RestoredRecords columns;
    columns.slots.reserve(count);
    columns.sequences.reserve(count);
    columns.valid_bytes.reserve(count);
    columns.key_lengths.reserve(count);
    columns.keys.reserve(count * key_bytes_max);
    for (const SlotRecord& record : records.all()) {
        if (record.magic == 0) continue;
        columns.slots.push_back(record.slot);
        columns.sequences.push_back(record.sequence);
        columns.valid_bytes.push_back(record.valid_bytes);
        columns.key_lengths.push_back(record.key_length);
        const auto* const key = reinterpret_cast<const std::uint8_t*>(record.key.data());
        columns.keys.insert(columns.keys.end(), key, key + key_bytes_max);
    }
    return columns;
}

// A sector that is lost, as disks and file systems say it; all else is of the machine or a mistake.
// The same as _LOST_ON_DISK in kvdisk/rank_pages.py, for opens that make a cache smaller.
bool is_lost_on_disk(int error) noexcept {
    return error == EIO || error == ENODATA || error == EREMOTEIO || error == EILSEQ ||
           error == EBADMSG || error == EUCLEAN;
}

// The record file as it is, piece by piece, in whole pages. What lies beyond its end is empty, and
// so is a page that the disk has lost: it would otherwise be in the way of every start. Each takes
// a disk its time, so after many of them the rest counts as lost too.
RestoredRecords restore(SlotRecords& records, const EngineOptions& options) {
    if (options.record_fd < 0) return {};
    const std::uint64_t bytes = records.page_count() * record_page_bytes;
    AlignedMemory memory(std::min<std::uint64_t>(bytes, restore_piece_bytes));
    std::uint64_t kept = 0;
    std::uint64_t read_bytes = 0;
    std::uint64_t by_page_until = 0;
    std::uint64_t lost_pages = 0;
    while (read_bytes < bytes && lost_pages < lost_pages_max) {
        const std::size_t piece_bytes = read_bytes < by_page_until
                                            ? record_page_bytes
                                            : std::min(bytes - read_bytes, memory.span().size());
        const ssize_t count = ::pread(options.record_fd, memory.data(), piece_bytes,
                                      static_cast<off_t>(options.record_offset + read_bytes));
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && !is_lost_on_disk(errno)) {
            throw std::system_error(errno, std::generic_category(), "cannot read the record file");
        }
        if (count < 0 && piece_bytes > record_page_bytes) {
            by_page_until = read_bytes + piece_bytes;
            continue;
        }
        if (count < 0) {
            ++lost_pages;
            read_bytes += record_page_bytes;
            continue;
        }
        // Short by less than a page is the end of the file: a record cut there fails its checksum.
        const auto moved_bytes = static_cast<std::uint64_t>(count);
        kept += records.restore(memory.span().first(moved_bytes), read_bytes / sizeof(SlotRecord));
        if (moved_bytes < record_page_bytes) break;
        read_bytes += moved_bytes / record_page_bytes * record_page_bytes;
    }
    if (lost_pages == lost_pages_max) lost_pages += (bytes - read_bytes) / record_page_bytes;
    RestoredRecords columns = columns_of(records, kept);
    columns.lost_pages = lost_pages;
    return columns;
}

}  // namespace

Engine::Engine(const EngineOptions& options)
    : options_(resolved(options)), process_id_(::getpid()) {
    check_options(options_);
    auto records = std::make_shared<SlotRecords>(options.slot_count, options.epoch);
    restored_ = restore(*records, options);
    const std::uint64_t sequence_next = records->sequence_max() + 1;
    outbox_ = std::make_shared<Outbox>();
    for (std::uint32_t index = 0; index < options.shards; ++index) {
        shards_.push_back(
            std::make_shared<Shard>(options_, index, records, outbox_, sequence_next));
    }
    parts_.resize(shards_.size());
    try {
        for (const auto& shard : shards_) shard->start();
    } catch (...) {
        close(0);
        throw;
    }
}

Engine::~Engine() {
    if (process_id_ == ::getpid()) {
        close(5'000'000'000);
    } else {
        // A forked child has none of the threads, so nothing may be torn down: keep it for ever.
        new std::vector<std::shared_ptr<Shard>>(std::move(shards_));
    }
}

std::uint32_t Engine::shard_of(std::uint64_t slot) const noexcept {
    return static_cast<std::uint32_t>(slot / shard_span_slots % options_.shards);
}

void Engine::check_rows(const std::vector<Row>& rows) const {
    require(!rows.empty(), "a transfer has at least one row");
    for (const Row& row : rows) {
        require(row.block_id < options_.layout.block_count, "a block id is out of range");
        require(row.slot < options_.slot_count, "a slot is out of range");
        require(row.key.length >= 1 && row.key.length <= key_bytes_max, "a key has 1 to 64 bytes");
    }
}

std::uint64_t Engine::submit(Direction direction, std::vector<Row> rows, std::int64_t timeout_ns,
                             std::int64_t start_within_ns, std::uint64_t event) {
    check_rows(rows);
    require_own_process();
    require(direction == Direction::store || event == 0 || options_.device != "cpu",
            "a load into host memory waits for no event");
    const std::lock_guard lock(submit_mutex_);
    if (closed_) throw std::logic_error("the engine is closed");
    std::vector<RowResult> results(rows.size());
    if (direction == Direction::store) {
        const std::uint64_t fitting = std::min<std::uint64_t>(rows.size(), store_rows_fitting());
        if (fitting < rows.size()) ++stores_refused_;
        if (fitting == 0) return 0;
        rows.resize(fitting);
        std::fill(results.begin() + static_cast<std::ptrdiff_t>(fitting), results.end(),
                  RowResult{.status = RowStatus::refused});
    }
    const std::uint64_t id = ++id_last_;
    const std::int64_t now_ns = MonotonicClock().now_ns();
    const std::int64_t deadline_ns = after(now_ns, timeout_ns);
    for (std::unique_ptr<Part>& part : parts_) part.reset();
    for (std::uint32_t position = 0; position < rows.size(); ++position) {
        const std::uint32_t index = shard_of(rows[position].slot);
        if (!parts_[index]) parts_[index] = shards_[index]->take_spare();
        parts_[index]->rows.push_back(rows[position]);
        parts_[index]->positions.push_back(position);
    }
    const auto part_count = static_cast<std::uint32_t>(
        std::ranges::count_if(parts_, [](const auto& part) { return part != nullptr; }));
    {
        const std::lock_guard outbox_lock(outbox_->mutex);
        outbox_->open(id, {direction, part_count, part_count, deadline_ns, std::move(results)});
    }
    for (std::size_t index = 0; index < parts_.size(); ++index) {
        if (!parts_[index]) continue;
        Part& part = *parts_[index];
        part.id = id;
        part.direction = direction;
        part.event = event;
        part.deadline_ns = deadline_ns;
        part.start_by_ns = after(now_ns, start_within_ns);
        shards_[index]->submit(std::move(parts_[index]));
    }
    return id;
}

// An empty queue takes a block of any size.
std::uint64_t Engine::store_rows_fitting() const noexcept {
    std::uint64_t waiting_bytes = 0;
    for (const auto& shard : shards_) waiting_bytes += shard->waiting_bytes();
    if (waiting_bytes >= options_.store_queue_bytes) return 0;
    const std::uint64_t rows =
        (options_.store_queue_bytes - waiting_bytes) / options_.layout.block_bytes;
    return waiting_bytes == 0 ? std::max<std::uint64_t>(1, rows) : rows;
}

std::vector<Progress> Engine::progress(Direction direction) const {
    std::vector<Progress> each;
    for (const auto& shard : shards_) each.push_back(shard->progress(direction));
    return each;
}

// A forked child has none of the threads, and a mutex may have been held when it was made.
void Engine::require_own_process() const {
    if (process_id_ != ::getpid()) {
        throw std::logic_error("the engine belongs to the process that opened it");
    }
}

void Engine::cancel_waiting(std::uint64_t transfer_id) {
    require_own_process();
    for (const auto& shard : shards_) shard->cancel_waiting(transfer_id);
}

Events Engine::poll() {
    require_own_process();
    std::unique_lock lock(outbox_->mutex);
    if (outbox_->overdue(MonotonicClock().now_ns())) {
        lock.unlock();
        stand_in();
        lock.lock();
    }
    if (outbox_->told) {
        std::uint64_t count = 0;
        [[maybe_unused]] const auto read = ::read(outbox_->event_fd, &count, sizeof(count));
        outbox_->told = false;
    }
    return std::exchange(outbox_->events, {});
}

bool Engine::wait(std::int64_t timeout_ns) {
    require_own_process();
    const std::int64_t until_ns = after(MonotonicClock().now_ns(), timeout_ns);
    std::unique_lock lock(outbox_->mutex);
    while (outbox_->empty() && !closed_) {
        const std::int64_t now_ns = MonotonicClock().now_ns();
        if (now_ns >= until_ns) break;
        if (outbox_->overdue(now_ns)) {
            lock.unlock();
            stand_in();
            lock.lock();
            continue;
        }
        const std::int64_t wake_ns = std::min(until_ns, outbox_->overdue_ns);
        if (wake_ns == time_never) {
            outbox_->ready.wait(lock);
        } else {  // the steady clock is CLOCK_MONOTONIC in every C++ library for Linux
            outbox_->ready.wait_until(
                lock, std::chrono::steady_clock::time_point(std::chrono::nanoseconds(wake_ns)));
        }
    }
    return !outbox_->empty();
}

void Engine::stand_in() {
    for (const auto& shard : shards_) shard->stand_in();
}

int Engine::event_fd() const noexcept { return outbox_->event_fd; }

EngineStats Engine::stats() {
    require_own_process();
    EngineStats total;
    total.backend_reason = shards_.front()->backend_reason();
    for (const auto& shard : shards_) shard->ask_stats();
    const auto until = std::chrono::steady_clock::now() + stats_wait;
    for (const auto& shard : shards_) {
        if (!shard->add_stats(total, until)) total.fresh = false;
        total.store_queue_bytes += shard->waiting_bytes();
    }
    {
        const std::lock_guard lock(outbox_->mutex);
        total.transfers_open = outbox_->jobs.size();
    }
    const std::lock_guard lock(submit_mutex_);
    total.stores_refused = stores_refused_;
    return total;
}

void Engine::reset_stats() {
    require_own_process();
    for (const auto& shard : shards_) shard->reset_stats();
}

void Engine::end_within(std::int64_t timeout_ns) {
    require_own_process();
    const std::int64_t until_ns = after(MonotonicClock().now_ns(), timeout_ns);
    if (until_ns == time_never) return;
    for (const auto& shard : shards_) shard->end_by(until_ns);
    const std::lock_guard lock(outbox_->mutex);
    outbox_->end_by(until_ns);
}

std::uint64_t Engine::close(std::int64_t timeout_ns) {
    if (process_id_ != ::getpid()) return 0;  // nothing here is this process's to end
    const std::lock_guard close_lock(close_mutex_);
    {
        const std::lock_guard lock(submit_mutex_);
        if (closed_.exchange(true)) return abandoned_;
    }
    const std::int64_t until_ns = after(MonotonicClock().now_ns(), timeout_ns);
    for (const auto& shard : shards_) shard->begin_close(until_ns);
    for (const auto& shard : shards_) abandoned_ += shard->end_close(until_ns);
    end_remaining_jobs();
    return abandoned_;
}

// Transfers are left behind by a thread that hangs in the kernel, and by a copy that waits for an
// event in its stream. They end here; the copy is still made when the event happens, so whoever
// closes an engine and reuses a load's blocks has to see to the events first.
void Engine::end_remaining_jobs() {
    const std::lock_guard lock(outbox_->mutex);
    while (!outbox_->jobs.empty()) {
        auto& [id, job] = *outbox_->jobs.begin();
        if (job.direction == Direction::store && job.sources_open > 0) {
            outbox_->events.source_free.push_back(id);
        }
        for (RowResult& result : job.results) {
            if (result.status == RowStatus::pending) result = {RowStatus::timed_out, true, 0};
        }
        outbox_->finish(id);
    }
    if (!outbox_->empty()) outbox_->tell();
    outbox_->ready.notify_all();  // whoever waits sees that the engine is closed
}

}  // namespace kvdisk

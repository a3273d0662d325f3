// The thread's loop and the hand-over between it and its callers. A mutex guards each queue, and is
// held only to move entries: never while the disk or a copy is at work.
#include "pipeline/shard.hpp"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "io/choose.hpp"
#include "io/signals.hpp"
#include "pipeline/copy_cuda.hpp"
#include "pipeline/cuda_driver.hpp"

namespace kvdisk {

namespace {

// How long after the limit of `close` a thread may still take to end its rows and leave.
constexpr auto exit_slack = std::chrono::seconds(1);

// The shard's backend, which lets go of the shard's turn for each call that may hang in the kernel.
class TurnLeavingBackend final : public io::Backend {
  public:
    TurnLeavingBackend(std::unique_ptr<io::Backend> backend, std::mutex& turn)
        : backend_(std::move(backend)), turn_(turn) {}

    const char* name() const noexcept override { return backend_->name(); }
    void attach() override { backend_->attach(); }
    std::uint32_t depth() const noexcept override { return backend_->depth(); }
    std::uint32_t in_flight() const noexcept override { return backend_->in_flight(); }
    void push(const io::Request& request) override { backend_->push(request); }
    void submit() override {
        turn_.unlock();
        backend_->submit();
        turn_.lock();
    }
    std::size_t reap(std::span<io::Completion> completions) override {
        return backend_->reap(completions);
    }
    void wait(std::int64_t until_ns) override {
        turn_.unlock();
        backend_->wait(until_ns);
        turn_.lock();
    }
    void wake() noexcept override { backend_->wake(); }
    io::BackendStats stats() const override { return backend_->stats(); }
    void abandon() noexcept override { backend_->abandon(); }

  private:
    std::unique_ptr<io::Backend> backend_;
    std::mutex& turn_;
};

io::ChosenBackend choose(const EngineOptions& options, const io::BackendOptions& backend) {
    if (options.make_backend) return {options.make_backend(backend), {}};
    return io::choose_backend(backend, options.backend);
}

PipelineOptions pipeline_options(const EngineOptions& options, std::uint16_t area_count) {
    PipelineOptions result;
    result.block_bytes = options.layout.block_bytes;
    result.slot_bytes = options.slot_bytes;
    result.rows_per_buffer = options.rows_per_buffer;
    result.iodepth = options.iodepth;
    if (options.record_fd < 0) result.record_writes = 0;
    result.load_reserve = options.load_reserve;
    result.store_depth_beside_loads = options.store_depth_beside_loads;
    result.alignment = options.alignment;
    result.record_offset = options.record_offset;
    const auto wall = std::chrono::system_clock::now().time_since_epoch();
    result.wall_clock_ns = std::chrono::nanoseconds(wall).count() - MonotonicClock().now_ns();
    result.record_area = area_count;  // right after the ring's areas
    result.direct_stores = options.direct_stores;
    result.direct_loads = options.direct_loads;
    if (options.direct_stores || options.direct_loads) {
        result.direct_region = options.layout.regions.front();
        result.direct_area_first = static_cast<std::uint16_t>(area_count + 1);
    }
    return result;
}

// The blocks' own memory in pieces that can be registered, no block across two.
std::vector<std::span<std::byte>> direct_areas(const Layout& layout) {
    const Region& region = layout.regions.front();
    const std::uint64_t blocks_per_area = std::max<std::uint64_t>(
        1, io::area_bytes_max / std::max(region.block_stride_bytes, region.segment_bytes));
    std::vector<std::span<std::byte>> areas;
    for (std::uint64_t first = 0; first < layout.block_count; first += blocks_per_area) {
        const std::uint64_t last = std::min(first + blocks_per_area, layout.block_count) - 1;
        areas.emplace_back(region.base + first * region.block_stride_bytes,
                           (last - first) * region.block_stride_bytes + region.segment_bytes);
    }
    return areas;
}

std::unique_ptr<Copier> make_copier(const EngineOptions& options, const Ring& ring) {
    const std::uint32_t depth = options.buffers * options.rows_per_buffer;
    if (options.device == "cpu") return make_host_copier(options.layout, depth);
    return make_cuda_copier(
        options.layout,
        {.device = cuda::resolve_device(options.device), .buffers = ring.memory(), .depth = depth});
}

}  // namespace

// ---------------------------------------------------------------- construction

Shard::Shard(const EngineOptions& options, std::uint32_t index,
             std::shared_ptr<SlotRecords> records, std::shared_ptr<Outbox> outbox,
             std::uint64_t sequence_next)
    : block_bytes_(options.layout.block_bytes),
      records_(std::move(records)),
      outbox_(std::move(outbox)),
      ring_(std::make_unique<Ring>(options.buffers, options.slot_bytes * options.rows_per_buffer)) {
    io::BackendOptions backend_options;
    backend_options.areas = ring_->areas();
    PipelineOptions pipeline =
        pipeline_options(options, static_cast<std::uint16_t>(backend_options.areas.size()));
    record_staging_ =
        AlignedMemory(std::max<std::size_t>(1, Pipeline::record_staging_bytes(pipeline)));
    backend_options.files = {options.data_fd};
    if (options.record_fd >= 0) backend_options.files.push_back(options.record_fd);
    backend_options.areas.push_back(record_staging_.span());
    if (options.direct_stores || options.direct_loads) {
        pipeline.direct_areas = direct_areas(options.layout);
        backend_options.areas_dispensable = pipeline.direct_areas.size();
        backend_options.areas.insert(backend_options.areas.end(), pipeline.direct_areas.begin(),
                                     pipeline.direct_areas.end());
    }
    backend_options.depth = 2 * options.iodepth + pipeline.record_writes;
    backend_options.force_async = options.force_async;
    backend_options.force_async_reads = options.force_async_reads;
    io::ChosenBackend chosen = choose(options, backend_options);
    backend_ = std::make_unique<TurnLeavingBackend>(std::move(chosen.backend), turn_mutex_);
    backend_reason_ = std::move(chosen.reason);
    copier_ = make_copier(options, *ring_);
    pipeline_ =
        std::make_unique<Pipeline>(pipeline, *ring_, *records_, record_staging_.span(), *backend_,
                                   *copier_, clock_, sequence_next + index, options.shards);
    stats_.buffer_bytes = ring_->buffer_bytes();
    stats_.pinned_bytes =
        ring_->buffer_count() * ring_->buffer_bytes() + Pipeline::record_staging_bytes(pipeline);
}

Shard::~Shard() {
    // Reached with the thread gone: either it never started, or it has exited.
    if (thread_.joinable()) thread_.join();
    for (const Command& command : inbox_) delete command.part;
}

void Shard::start() {
    std::promise<void> attached;
    std::future<void> attaching = attached.get_future();
    {
        const io::AllSignalsBlocked blocked;
        thread_ = std::thread([self = shared_from_this()](
                                  std::promise<void> promise) { self->run(std::move(promise)); },
                              std::move(attached));
    }
    ::pthread_setname_np(thread_.native_handle(), "kvdisk-engine");
    attaching.get();  // throws what kept the thread from its backend
}

// ---------------------------------------------------------------- from any thread

std::unique_ptr<Part> Shard::take_spare() {
    const std::lock_guard lock(inbox_mutex_);
    if (spares_.empty()) return std::make_unique<Part>();
    std::unique_ptr<Part> part = std::move(spares_.back());
    spares_.pop_back();
    part->rows.clear();
    part->positions.clear();
    return part;
}

void Shard::submit(std::unique_ptr<Part> part) {
    if (part->direction == Direction::store) rows_submitted_ += part->rows.size();
    send({.kind = CommandKind::submit, .part = part.release()});
}

void Shard::cancel_waiting(std::uint64_t transfer_id) {
    send({.kind = CommandKind::cancel, .number = transfer_id});
}

void Shard::send(Command command) {
    const std::lock_guard lock(inbox_mutex_);
    inbox_.push_back(command);
    if (!gone_) backend_->wake();
}

void Shard::stand_in() {
    const std::unique_lock turn(turn_mutex_, std::try_to_lock);
    if (!turn.owns_lock() || pipeline_ == nullptr) return;
    take_commands();
    pipeline_->end_overdue();
    publish();
    backend_->wake();  // a thread that only slept goes on from here
}

void Shard::ask_stats() {
    const std::lock_guard lock(stats_mutex_);
    if (stats_final_) return;
    stats_wanted_ = true;
    backend_->wake();
}

bool Shard::add_stats(EngineStats& total, std::chrono::steady_clock::time_point until) {
    std::unique_lock lock(stats_mutex_);
    const bool fresh = stats_ready_.wait_until(lock, until, [this] { return !stats_wanted_; });
    total.merge(stats_);
    return fresh;
}

// ---------------------------------------------------------------- the thread

void Shard::run(std::promise<void> attached) {
    const std::lock_guard turn(turn_mutex_);
    try {
        backend_->attach();
        copier_->attach();
    } catch (...) {
        attached.set_exception(std::current_exception());
        leave();
        return;
    }
    attached.set_value();
    while (true) {
        const bool closing = take_commands();
        const std::int64_t next_ns = pipeline_->step();
        publish();
        answer_stats(/*final=*/false);
        if (closing && may_leave()) break;
        if (next_ns > clock_.now_ns()) backend_->wait(next_ns == time_never ? -1 : next_ns);
    }
    leave();
}

// While closing: whether everything is done, or its time is over and every transfer has ended.
bool Shard::may_leave() const {
    return pipeline_->idle() ||
           (clock_.now_ns() >= closing_until_ns_ && pipeline_->transfers_open() == 0);
}

// The thread's last act: it gives back what nobody uses any more, here where the ring's
// registrations can be undone, and keeps for ever what the kernel still may use.
void Shard::leave() {
    {
        const std::lock_guard lock(inbox_mutex_);
        gone_ = true;
    }
    answer_stats(/*final=*/true);
    const std::uint64_t abandoned = backend_->in_flight();
    if (abandoned > 0) {
        backend_->abandon();
        ring_->leak();
        record_staging_.leak();
    } else {
        pipeline_.reset();
        copier_.reset();
        backend_.reset();
        ring_.reset();
        record_staging_ = AlignedMemory();
    }
    const std::lock_guard lock(exit_mutex_);
    abandoned_ = abandoned;
    has_exited_ = true;
    exited_.notify_all();
}

// Returns whether the shard is closing.
bool Shard::take_commands() {
    bool closing = false;
    {
        const std::lock_guard lock(inbox_mutex_);
        std::swap(inbox_, commands_);
        closing = closing_;
    }
    for (const Command& command : commands_) obey(command);
    commands_.clear();
    return closing;
}

void Shard::obey(const Command& command) {
    switch (command.kind) {
        case CommandKind::submit:
            pipeline_->submit(command.part);
            break;
        case CommandKind::cancel:
            pipeline_->cancel_waiting(command.number);
            break;
        case CommandKind::reset_stats:
            pipeline_->reset_stats();
            break;
    }
}

// Tells the callers what the last step has brought about.
void Shard::publish() {
    rows_begun_ = pipeline_->store_rows_begun();
    for (const auto direction : {Direction::store, Direction::load}) {
        const Progress progress = pipeline_->progress(direction);
        SharedProgress& shared = progress_[static_cast<std::size_t>(direction)];
        shared.bytes = progress.bytes;
        shared.busy_ns = progress.busy_ns;
        shared.busy = progress.busy;
    }
    Transfer* source_free = pipeline_->take_source_free();
    Transfer* finished = pipeline_->take_finished();
    std::vector<std::uint64_t>& released = pipeline_->released_slots();
    if (source_free == nullptr && finished == nullptr && released.empty()) return;
    {
        const std::lock_guard lock(outbox_->mutex);
        for (; source_free != nullptr; source_free = pipeline_->take_source_free()) {
            const auto job = outbox_->jobs.find(source_free->id);
            if (job != outbox_->jobs.end() && --job->second.sources_open == 0) {
                outbox_->events.source_free.push_back(source_free->id);
            }
        }
        for (; finished != nullptr; finished = pipeline_->take_finished()) {
            end_part(static_cast<Part&>(*finished));
        }
        outbox_->release(released);
        if (!outbox_->empty()) outbox_->tell();
    }
    released.clear();
}

// With the outbox's mutex held.
void Shard::end_part(Part& part) {
    const auto found = outbox_->jobs.find(part.id);
    if (found != outbox_->jobs.end()) {
        Outbox::Job& job = found->second;
        for (std::size_t i = 0; i < part.rows.size(); ++i) {
            job.results[part.positions[i]] = part.results[i];
        }
        if (--job.parts_open == 0) outbox_->finish(part.id);
    }
    const std::lock_guard lock(inbox_mutex_);
    spares_.emplace_back(&part);
}

void Shard::answer_stats(bool final) {
    const std::lock_guard lock(stats_mutex_);
    if (!stats_wanted_ && !final) return;
    stats_final_ = final;
    stats_.pipeline = pipeline_->stats();
    stats_.backend = backend_->stats();
    stats_.backend_name = backend_->name();
    stats_.copier_name = copier_->name();
    stats_.copier_note = copier_->note();
    stats_.ring = ring_->counts();
    stats_wanted_ = false;
    stats_ready_.notify_all();
}

// ---------------------------------------------------------------- closing

void Shard::end_by(std::int64_t time_ns) {
    const std::lock_guard lock(inbox_mutex_);
    if (gone_) return;
    pipeline_->end_by(time_ns);
    backend_->wake();
}

void Shard::begin_close(std::int64_t until_ns) {
    const std::lock_guard lock(inbox_mutex_);
    closing_ = true;
    closing_until_ns_ = until_ns;
    if (gone_) return;
    pipeline_->end_by(until_ns);
    backend_->wake();
}

std::uint64_t Shard::end_close(std::int64_t until_ns) {
    if (!thread_.joinable()) return 0;  // it never started
    std::unique_lock lock(exit_mutex_);
    const auto exited = [this] { return has_exited_; };
    if (until_ns == time_never) {
        exited_.wait(lock, exited);
    } else {
        const std::int64_t left_ns = std::max<std::int64_t>(0, until_ns - clock_.now_ns());
        exited_.wait_for(lock, std::chrono::nanoseconds(left_ns) + exit_slack, exited);
    }
    const bool has_exited = has_exited_;
    const std::uint64_t abandoned = has_exited ? abandoned_ : 1;
    lock.unlock();
    // A thread that hangs in the kernel keeps this shard alive by itself. One that has left I/O
    // behind may not be joined either: the kernel lets it end only when its io_uring requests have
    // (seen on a frozen ext4).
    if (abandoned == 0) {
        thread_.join();
    } else {
        thread_.detach();
    }
    return abandoned;
}

}  // namespace kvdisk

// How a world of the soak runs: what it asks of the pipeline, what it does to the disk meanwhile,
// how it takes the answers, and the three ways in which an episode ends.
#include "soak_world.hpp"

#include <array>
#include <cerrno>

namespace kvdisk::test {

namespace {

// A row may outlive its deadline by a copy that cannot be stopped, and the step that ends it.
constexpr std::int64_t copy_ns_max = 5'000'000;
constexpr std::int64_t deadline_slack_ns = copy_ns_max + 200'000;
// The pipeline's: how often it looks whether a device is done, and the least that a load then has.
constexpr std::int64_t device_look_ns = 10'000'000;
constexpr std::int64_t timeout_min_ns = 1'000'000;
constexpr std::int64_t device_busy_ns_max = 100'000'000;
constexpr std::int64_t settle_ns_max = 60'000'000'000;
constexpr std::uint64_t steps_without_time_max = 100'000;
constexpr std::uint64_t block_count = 512;
constexpr std::uint32_t disk_depth = 64;
constexpr std::uint64_t task_rows_max = 40;

constexpr std::array<Geometry, 5> geometries = {{
    {.regions = 1, .segment_bytes = 4096, .stride_bytes = 4096, .slot_bytes = 4096},
    {.regions = 4, .segment_bytes = 1024, .stride_bytes = 1536, .slot_bytes = 4096},
    {.regions = 3, .segment_bytes = 1216, .stride_bytes = 1216, .slot_bytes = 4096},
    {.regions = 2, .segment_bytes = 4096, .stride_bytes = 8192, .slot_bytes = 8192},
    {.regions = 1, .segment_bytes = 8192, .stride_bytes = 8192, .slot_bytes = 8192},
}};

}  // namespace

World::World(std::uint64_t seed, bool faults, const Noise& noise, Verdict& verdict)
    : random_(seed),
      faults_(faults),
      noise_(noise),
      verdict_(verdict),
      geometry_(geometries[random_.below(geometries.size())]),
      slot_count_(static_cast<std::uint64_t>(random_.between(300, 4000))),
      record_offset_(random_.below(2) * record_page_bytes),
      device_(std::make_unique<DeviceMemory>(block_count, geometry_.regions,
                                             geometry_.segment_bytes, geometry_.stride_bytes)),
      blocks_(std::make_unique<Blocks>(*device_, noise, verdict)),
      model_(std::make_unique<SlotModel>(slot_count_, verdict)),
      scratch_(Noise::block_bytes_max) {
    const std::uint64_t pages = (slot_count_ + records_per_page - 1) / records_per_page;
    disk_ = std::make_unique<io::SimDisk>(
        io::SimDiskOptions{.seed = random_.next(),
                           .file_bytes = {slot_count_ * geometry_.slot_bytes,
                                          record_offset_ + pages * record_page_bytes},
                           .depth = disk_depth,
                           .alignment_bytes = 512,
                           .journal_bytes = 1 << 20});
    clock_ = std::make_unique<SimClock>(*disk_);
}

void World::add_to(Totals& totals) const {
    totals.rows += rows_ended_;
    totals.trace_hash = (totals.trace_hash ^ trace_hash_) * 0x100000001B3ULL;
    totals.trace_hash = (totals.trace_hash ^ disk_->trace_hash()) * 0x100000001B3ULL;
    for (std::size_t i = 0; i < statuses_.size(); ++i) totals.statuses[i] += statuses_[i];
    for (std::size_t i = 0; i < io::sim_fault_count; ++i) {
        totals.struck[i] += disk_->struck(static_cast<io::SimFault>(i));
    }
}

void Totals::print() const {
    static constexpr const char* names[] = {"pending",   "ok",      "miss", "corrupt",    "failed",
                                            "timed_out", "refused", "busy", "copy_failed"};
    static_assert(std::size(names) == row_status_count);
    std::fputs("rows:", stdout);
    for (std::size_t i = 1; i < statuses.size(); ++i) {
        std::printf(" %s=%llu", names[i], static_cast<unsigned long long>(statuses[i]));
    }
    std::fputs("\nfaults:", stdout);
    for (std::size_t i = 1; i < struck.size(); ++i) {
        std::printf(" %s=%llu", io::sim_fault_name(static_cast<io::SimFault>(i)),
                    static_cast<unsigned long long>(struck[i]));
    }
    std::fputs("\n", stdout);
}

// ---------------------------------------------------------------- an episode

void World::run_episode(std::uint64_t rows) {
    ++verdict_.episode;
    choose_options();
    open();
    const std::uint64_t rows_end = rows_ended_ + rows;
    const std::uint64_t iterations_end = iterations_ + 1'000 * rows + 1'000'000;
    while (rows_ended_ < rows_end && !verdict_.hopeless()) {
        iterate(true);
        if (iterations_ > iterations_end) {
            verdict_.break_of("an episode makes no progress");
            break;
        }
    }
    bool clean = true;
    switch (random_.below(faults_ ? 3 : 2)) {
        case 0:
            end_in_peace();
            break;
        case 1:
            end_by_closing();
            break;
        default:
            disk_->crash({.lost = random_.fraction() / 2, .torn = random_.fraction() / 2});
            clean = false;
            break;
    }
    forget_everything();
    const bool kept = random_.below(8) != 0;
    if (!kept) ++epoch_;
    model_->restarted(clean, kept);
}

// Some pairs of slots have changed places, and so have the checksums in their records: only whose
// payload a checksum is of tells now.
void World::exchange_payloads() {
    std::vector<std::byte> first(geometry_.slot_bytes), second(geometry_.slot_bytes);
    for (int tries = 0; tries < 16; ++tries) {
        const std::uint64_t a = random_.below(slot_count_), b = random_.below(slot_count_);
        if (a == b || !records_->occupied(a) || !records_->occupied(b)) continue;
        SlotRecord record_a = records_->at(a), record_b = records_->at(b);
        std::swap(record_a.payload_checksum, record_b.payload_checksum);
        records_->set(record_a);
        records_->set(record_b);
        disk_->file(0).read(a * geometry_.slot_bytes, first);
        disk_->file(0).read(b * geometry_.slot_bytes, second);
        disk_->file(0).write(a * geometry_.slot_bytes, second);
        disk_->file(0).write(b * geometry_.slot_bytes, first);
    }
}

void World::choose_options() {
    harm_ = !faults_ || random_.below(8) == 0 ? Harm::none
            : random_.below(2) == 0           ? Harm::open
                                              : Harm::silent;
    model_->begin_episode(harm_);
    buffers_ = static_cast<std::uint32_t>(random_.between(2, 24));
    options_ = PipelineOptions{};
    options_.block_bytes = geometry_.block_bytes();
    options_.slot_bytes = geometry_.slot_bytes;
    options_.rows_per_buffer = static_cast<std::uint32_t>(1 + random_.below(8));
    options_.iodepth = static_cast<std::uint32_t>(random_.between(1, 24));
    options_.record_writes = static_cast<std::uint32_t>(random_.between(1, 8));
    options_.load_reserve = static_cast<std::uint32_t>(random_.below(buffers_));
    options_.store_depth_beside_loads = static_cast<std::uint32_t>(random_.between(1, 4));
    options_.loads_linger_ns = random_.below(2) == 0 ? 5'000'000 : 1'000'000'000;
    options_.loads_get_on_ns = random_.below(2) == 0 ? 0 : 20'000'000;  // 0: stores need no credit
    options_.alignment = random_.below(3) == 0 ? 4096 : 512;
    options_.record_offset = record_offset_;
    if (geometry_.fits_direct()) {
        options_.direct_region = device_->layout().regions[0];
        options_.direct_stores = random_.below(3) == 0;
        options_.direct_loads = random_.below(4) == 0;
    }
    rows_open_max_ = static_cast<std::uint64_t>(random_.between(1, 200));
    pause_ns_max_ = std::int64_t{1} << random_.between(8, 20);
}

io::SimFaults World::choose_faults() {
    if (harm_ == Harm::none) return {};
    io::SimFaults faults = io::SimFaults::all(random_.fraction() * 2);
    faults.late_ns_min = 20'000'000;
    faults.late_ns_max = 400'000'000;
    if (harm_ == Harm::open) {
        faults.torn_write = faults.lost_write = 0;
        faults.misdirect_write = faults.misdirect_read = 0;
        faults.flip_on_read = faults.flip_at_rest = 0;
    }
    return faults;
}

// A new process: everything from the files.
void World::open() {
    const std::uint64_t row_bytes = geometry_.slot_bytes * options_.rows_per_buffer;
    ring_ = std::make_unique<Ring>(buffers_, row_bytes);
    staging_ = std::make_unique<AlignedMemory>(
        std::max<std::uint64_t>(record_page_bytes, Pipeline::record_staging_bytes(options_)));
    records_ = std::make_unique<SlotRecords>(slot_count_, epoch_);
    std::vector<std::byte> bytes(records_->page_count() * record_page_bytes);
    disk_->file(1).read(record_offset_, bytes);
    records_->restore(bytes);
    if (harm_ == Harm::silent) exchange_payloads();

    std::vector<std::span<std::byte>> areas = ring_->areas();
    options_.record_area = static_cast<std::uint16_t>(areas.size());
    areas.push_back(staging_->span());
    disk_->set_areas(std::move(areas));
    disk_->set_faults(choose_faults());
    disk_->set_service({.base_ns = random_.between(1'000, 100'000),
                        .jitter_ns = random_.between(0, 100'000),
                        .bytes_per_second = std::uint64_t{1} << random_.between(28, 33)});
    disk_->attach();

    const bool hashes = random_.below(2) == 0;
    copier_ = std::make_unique<SimCopier>(
        device_->layout(), buffers_ * options_.rows_per_buffer, random_.next(),
        [this] { return now(); }, hashes,
        harm_ == Harm::none ? SimCopierFaults{} : SimCopierFaults::all());
    copier_->attach();
    disk_->set_neighbour([this] { return copier_->next_event_ns(); });
    pipeline_ =
        std::make_unique<Pipeline>(options_, *ring_, *records_, staging_->span(), *disk_, *copier_,
                                   *clock_, records_->sequence_max() + 1, 1 + random_.below(3));
    submit_at_ns_ = now();
    thaw_at_ns_ = now();
    closing_ns_ = time_never;
}

void World::iterate(bool submitting) {
    ++iterations_;
    const bool room = submitting && rows_open_ < rows_open_max_;
    if (room && now() >= submit_at_ns_) submit_one();
    if (submitting) disturb();
    const std::int64_t next_ns = step();
    if ((iterations_ & 15) == 0) check_deadlines();
    if (next_ns <= now()) {
        if (++steps_without_time_ == steps_without_time_max) {
            verdict_.break_of("the pipeline asks for step after step");
        }
        return;
    }
    steps_without_time_ = 0;
    const std::int64_t until_ns =
        std::min({next_ns, thaw_at_ns_, room ? submit_at_ns_ : time_never});
    if (until_ns > now()) disk_->wait(until_ns);
}

std::int64_t World::step() {
    const std::int64_t next_ns = pipeline_->step();
    verdict_.now_ns = now();
    take_answers();
    const RingCounts counts = ring_->counts();
    if (counts.free + counts.used + counts.quarantined != buffers_) {
        verdict_.break_of("free + used + quarantined buffers are not all buffers");
    }
    if ((iterations_ & 255) == 0) {
        verdict_.expect(pipeline_->recount(), "a recount finds other numbers");
    }
    return next_ns;
}

// What the world does to the pipeline and the disk while rows are under way.
void World::disturb() {
    if (now() >= thaw_at_ns_) {
        disk_->thaw();
        thaw_at_ns_ = now() + random_.between(20'000'000, 300'000'000);
    }
    if (harm_ != Harm::none && random_.below(50'000) == 0) disk_->freeze();
    if (random_.below(300) == 0 && transfer_last_ > 0) {
        const std::uint64_t back = random_.below(std::min<std::uint64_t>(transfer_last_, 8));
        pipeline_->cancel_waiting(transfer_last_ - back);
    }
}

void World::check_deadlines() {
    for (const std::unique_ptr<Task>& task : tasks_) {
        if (!task->open || task->late || deadline_of(*task) == time_never) continue;
        if (task->transfer.direction == Direction::load && options_.direct_loads) continue;
        // A copy that cannot be stopped waits for its device, also when all is to end.
        const bool closing = closing_ns_ < task->due_ns;
        const std::int64_t copying_ns = closing ? device_busy_ns_max : 0;
        if (now() <= deadline_of(*task) + task->slack_ns + copying_ns) continue;
        task->late = true;
        verdict_.break_of("a row outlives its deadline", task->transfer.rows[0].slot);
    }
}

// ---------------------------------------------------------------- what is asked

void World::submit_one() {
    const auto unused = std::ranges::find_if(tasks_, [](const auto& task) { return !task->open; });
    Task& task = unused != tasks_.end() ? **unused : *tasks_.emplace_back(std::make_unique<Task>());
    task.open = true;
    task.late = false;
    task.source_free = false;
    task.notes.clear();
    Transfer& transfer = task.transfer;
    transfer.id = ++transfer_last_;
    transfer.event = 0;
    transfer.rows.clear();
    const std::uint64_t rows_max = random_.below(8) == 0 ? task_rows_max : 6;
    choose_slots(1 + random_.below(rows_max));
    blocks_->take(random_, chosen_slots_.size(), chosen_blocks_);
    rows_open_ += chosen_slots_.size();
    choose_times(transfer);
    task.due_ns = transfer.deadline_ns;
    task.slack_ns = deadline_slack_ns;
    if (random_.below(2) == 0) {
        submit_store(task);
    } else {
        submit_load(task);
    }
    submit_at_ns_ = now() + (random_.below(3) != 0 ? 0 : random_.between(0, pause_ns_max_));
    task.rows_unseen = static_cast<std::uint32_t>(transfer.rows.size());
    task.seen.assign(transfer.rows.size(), RowResult{});
    pipeline_->submit(&transfer);
}

void World::choose_slots(std::size_t count) {
    chosen_slots_.clear();
    // Often a slot that has just been used: it may be busy or in quarantine.
    std::uint64_t slot = random_.below(8) == 0 ? slot_before_ : random_.below(slot_count_);
    const bool run = random_.below(4) != 0;
    while (chosen_slots_.size() < count) {
        chosen_slots_.push_back(slot);
        slot = run ? (slot + 1) % slot_count_ : random_.below(slot_count_);
    }
    if (random_.below(3) == 0) slot_before_ = chosen_slots_[random_.below(count)];
}

void World::choose_times(Transfer& transfer) {
    const std::uint64_t kind = random_.below(20);
    transfer.deadline_ns = kind == 0   ? time_never
                           : kind <= 2 ? now() + random_.between(1, 300'000)
                                       : now() + random_.between(5'000'000, 100'000'000);
    transfer.start_by_ns =
        random_.below(3) == 0 ? now() + random_.between(1, 5'000'000) : time_never;
}

std::uint64_t World::some_key(std::uint64_t slot) {
    const std::uint64_t key = model_->key_of(slot);
    if (key == 0 || random_.below(16) == 0) return 1 + random_.below(key_last_ + 1);
    return key;
}

void World::submit_store(Task& task) {
    task.transfer.direction = Direction::store;
    for (std::size_t row = 0; row < chosen_slots_.size(); ++row) {
        const std::uint64_t slot = chosen_slots_[row];
        const std::uint64_t key = random_.below(2) == 0 ? some_key(slot) : ++key_last_;
        task.transfer.rows.push_back({chosen_blocks_[row], slot, make_key(key)});
        task.notes.push_back(model_->store_submitted(slot, key));
    }
    if (random_.below(6) != 0) {
        fill_sources(task);
        return;
    }
    // The source is written only when its event happens; until then its blocks hold rubbish.
    const std::int64_t at_ns =
        random_.below(16) == 0 ? SimCopier::never : now() + random_.between(0, 3'000'000);
    const bool fails = harm_ != Harm::none && random_.below(16) == 0;
    task.transfer.event = copier_->make_event(at_ns, fails, [this, &task] { fill_sources(task); });
    if (at_ns == SimCopier::never && task.transfer.deadline_ns == time_never) {
        task.due_ns = task.transfer.deadline_ns = now() + 50'000'000;
    }
}

void World::fill_sources(Task& task) {
    const std::span<std::byte> block = std::span(scratch_).first(geometry_.block_bytes());
    for (std::size_t row = 0; row < task.notes.size(); ++row) {
        const Row& wanted = task.transfer.rows[row];
        noise_.fill({wanted.slot, task.notes[row].key, task.notes[row].generation, 0}, block);
        device_->put(wanted.block_id, block);
    }
}

void World::submit_load(Task& task) {
    task.transfer.direction = Direction::load;
    for (std::size_t row = 0; row < chosen_slots_.size(); ++row) {
        const std::uint64_t slot = chosen_slots_[row];
        const std::uint64_t key = some_key(slot);
        task.transfer.rows.push_back({chosen_blocks_[row], slot, make_key(key)});
        task.notes.push_back(model_->load_submitted(slot, key));
    }
    if (options_.direct_loads || random_.below(6) != 0) return;
    // A device that goes on using the blocks for a while, often beyond the deadline or up to it.
    const std::int64_t timeout_ns = task.transfer.deadline_ns - now();
    std::int64_t busy_ns =
        random_.between(0, random_.below(4) == 0 ? device_busy_ns_max : 3'000'000);
    if (random_.below(4) == 0 && task.due_ns != time_never) {
        busy_ns = std::max<std::int64_t>(0, timeout_ns + random_.between(-1, 1));
    }
    const bool fails = random_.below(16) == 0;
    task.transfer.event = copier_->make_event(now() + busy_ns, fails, nullptr);
    if (task.due_ns != time_never) {
        task.due_ns = now() + busy_ns + std::max(timeout_min_ns, timeout_ns);
        task.slack_ns += device_look_ns;
    }
}

// ---------------------------------------------------------------- what is answered

void World::take_answers() {
    // Row by row as they end, not transfer by transfer: the model must see the true order.
    for (const std::unique_ptr<Task>& task : tasks_) {
        if (task->open && task->transfer.rows_open != task->rows_unseen) take_rows(*task);
    }
    for (const std::uint64_t slot : pipeline_->released_slots()) {
        trace(slot);
        model_->released(slot);
    }
    pipeline_->released_slots().clear();
    while (Transfer* const transfer = pipeline_->take_source_free()) {
        source_freed(task_of(*transfer));
    }
    while (Transfer* const transfer = pipeline_->take_finished()) finished(task_of(*transfer));
}

World::Task& World::task_of(const Transfer& transfer) {
    const auto task = std::ranges::find_if(
        tasks_, [&](const auto& candidate) { return &candidate->transfer == &transfer; });
    return **task;
}

std::int64_t World::deadline_of(const Task& task) const noexcept {
    return std::min(task.due_ns, closing_ns_);
}

// The engine reuses a source at once.
void World::source_freed(Task& task) {
    verdict_.expect(task.open && !task.source_free && task.transfer.direction == Direction::store,
                    "a source is freed twice, or none was held");
    if (task.source_free) return;
    task.source_free = true;
    for (const Row& row : task.transfer.rows) blocks_->free(row.block_id);
}

void World::take_rows(Task& task) {
    const Transfer& transfer = task.transfer;
    for (std::size_t row = 0; row < transfer.rows.size(); ++row) {
        const RowResult result = transfer.results[row];
        if (task.seen[row].status != RowStatus::pending) {
            verdict_.expect(task.seen[row].status == result.status, "a row changes its result");
        } else if (result.status != RowStatus::pending) {
            task.seen[row] = result;
            --task.rows_unseen;
            row_ended(task, row);
        }
    }
    verdict_.expect(task.rows_unseen == transfer.rows_open, "as many rows are open as say so");
}

void World::row_ended(Task& task, std::size_t row) {
    const Row& wanted = task.transfer.rows[row];
    const RowResult result = task.transfer.results[row];
    trace(static_cast<std::uint64_t>(result.status) << 32 | wanted.slot);
    ++statuses_[static_cast<std::size_t>(result.status)];
    ++rows_ended_;
    --rows_open_;
    verdict_.expect(result.status != RowStatus::timed_out || now() >= deadline_of(task),
                    "a row times out before its deadline", wanted.slot);
    if (task.transfer.direction == Direction::store) {
        model_->store_ended(wanted.slot, task.notes[row], result);
        return;
    }
    Stamp found;
    bool whole = false;
    if (result.status == RowStatus::ok) {
        const std::span<std::byte> block = std::span(scratch_).first(geometry_.block_bytes());
        device_->get(wanted.block_id, block);
        whole = noise_.read(block, found);
    }
    model_->load_ended(wanted.slot, task.notes[row], result, whole, found);
    blocks_->free(wanted.block_id);
}

void World::finished(Task& task) {
    const Transfer& transfer = task.transfer;
    verdict_.expect(task.open, "a transfer ends twice");
    if (!task.open) return;
    verdict_.expect(transfer.direction == Direction::load || task.source_free,
                    "a store ends and its source is still held");
    verdict_.expect(task.rows_unseen == 0, "a transfer ends before its rows");
    if (transfer.event != 0) copier_->forget_event(transfer.event);
    task.open = false;
}

// ---------------------------------------------------------------- ends

// Goes on without new rows until the pipeline is idle (or only has no rows), or the limit.
bool World::settle(std::int64_t limit_ns, bool idle) {
    const std::int64_t give_up_ns = now() + limit_ns;
    const auto settled = [&] { return idle ? pipeline_->idle() : rows_open_ == 0; };
    while (!settled() && now() < give_up_ns) {
        thaw_at_ns_ = give_up_ns;
        iterate(false);
    }
    return settled();
}

void World::end_in_peace() {
    disk_->heal();
    verdict_.expect(settle(settle_ns_max, true), "the pipeline does not come to rest");
    step();
    verdict_.expect(pipeline_->recount(), "a recount at rest finds other numbers");
    verdict_.expect(ring_->counts().free == buffers_, "a buffer is lost");
    verdict_.expect(rows_open_ == 0, "a row never ended");
    verdict_.expect(disk_->in_flight() == 0, "I/O is in flight at rest");
    verdict_.expect(copier_->active() == 0, "a copy is under way at rest");
    verdict_.expect(model_->quarantined_count() == 0, "a slot stays in quarantine");
    verdict_.expect(blocks_->used_count() == 0, "a block is never given back");
    blocks_->check_unused();
    disk_->restart();
}

// As the engine closes over a disk that does not answer: all rows end now, I/O is given up.
void World::end_by_closing() {
    if (options_.direct_loads) disk_->heal();  // such a load waits for its disk
    closing_ns_ = now();
    pipeline_->end_by(0);
    // A copy that cannot be stopped waits for its device.
    const std::int64_t limit_ns =
        options_.direct_loads ? settle_ns_max : device_busy_ns_max + deadline_slack_ns;
    verdict_.expect(settle(limit_ns, false), "rows do not end at closing");
    verdict_.expect(pipeline_->transfers_open() == 0, "a transfer never ended, at closing");
    disk_->abandon();
    disk_->thaw();
    disk_->advance(1'000'000'000);
    blocks_->check_unused();
    disk_->restart();
}

void World::forget_everything() {
    pipeline_.reset();
    disk_->set_neighbour(nullptr);
    copier_.reset();
    for (const std::unique_ptr<Task>& task : tasks_) task->open = false;
    rows_open_ = 0;
    blocks_->free_all();
}

}  // namespace kvdisk::test

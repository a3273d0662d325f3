// One world of the soak: a simulated disk with a geometry of its own, and a pipeline that lives,
// ends or is cut down over it, episode after episode, under random load and random misfortune.
// Every answer is put to the model; every device block that nobody uses is watched.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "io/sim.hpp"
#include "pipeline/clock.hpp"
#include "pipeline/pipeline.hpp"
#include "sim_copier.hpp"
#include "soak_content.hpp"
#include "soak_model.hpp"

namespace kvdisk::test {

class SimClock final : public Clock {
  public:
    explicit SimClock(const io::SimDisk& disk) : disk_(disk) {}
    std::int64_t now_ns() const noexcept override { return disk_.now_ns(); }

  private:
    const io::SimDisk& disk_;
};

// Device blocks, each used by one row or by nobody. Whoever frees a block leaves a pattern in it;
// whoever takes it finds that pattern, or somebody wrote where he had no right to.
class Blocks {
  public:
    Blocks(DeviceMemory& device, const Noise& noise, Verdict& verdict)
        : device_(device),
          noise_(noise),
          verdict_(verdict),
          patterns_(device.layout().block_count),
          used_(device.layout().block_count) {
        for (std::uint64_t block = 0; block < patterns_.size(); ++block) leave_pattern(block);
    }

    // Neighbouring blocks where there are such.
    void take(io::SimRandom& random, std::size_t count, std::vector<std::uint64_t>& taken) {
        taken.clear();
        std::uint64_t block = random.below(patterns_.size());
        while (taken.size() < count) {
            block = (block + 1) % patterns_.size();
            if (used_[block]) continue;
            check(block);
            used_[block] = true;
            taken.push_back(block);
        }
    }
    void free(std::uint64_t block) {
        used_[block] = false;
        leave_pattern(block);
    }
    void check_unused() {
        for (std::uint64_t block = 0; block < patterns_.size(); ++block) {
            if (!used_[block]) check(block);
        }
    }
    std::uint64_t used_count() const {
        return static_cast<std::uint64_t>(std::ranges::count(used_, true));
    }
    void free_all() {
        for (std::uint64_t block = 0; block < patterns_.size(); ++block) free(block);
    }

  private:
    void leave_pattern(std::uint64_t block) {
        patterns_[block] = ++pattern_last_;
        device_.put(block, {noise_.piece(patterns_[block]), device_.layout().block_bytes});
    }
    void check(std::uint64_t block) {
        verdict_.expect(device_.equals(block, noise_.piece(patterns_[block])),
                        "a block is written after its row has ended");
    }

    DeviceMemory& device_;
    const Noise& noise_;
    Verdict& verdict_;
    std::vector<std::uint64_t> patterns_;
    std::vector<bool> used_;
    std::uint64_t pattern_last_ = 0;
};

struct Geometry {
    std::uint64_t regions = 1;
    std::uint64_t segment_bytes = 4096;
    std::uint64_t stride_bytes = 4096;
    std::uint64_t slot_bytes = 4096;

    std::uint64_t block_bytes() const noexcept { return regions * segment_bytes; }
    bool fits_direct() const noexcept {
        return regions == 1 && segment_bytes == slot_bytes && stride_bytes % 4096 == 0;
    }
};

// What many worlds have seen, to be printed: a soak in which something never happened proves
// nothing.
struct Totals {
    std::uint64_t rows = 0;
    std::uint64_t trace_hash = 0xCBF29CE484222325ULL;
    std::array<std::uint64_t, row_status_count> statuses{};   // by RowStatus
    std::array<std::uint64_t, io::sim_fault_count> struck{};  // by SimFault

    void print() const;
};

class World {
  public:
    World(std::uint64_t seed, bool faults, const Noise& noise, Verdict& verdict);

    // Runs until about `rows` more rows have ended, then ends the pipeline in one way or another.
    void run_episode(std::uint64_t rows);

    std::uint64_t rows_ended() const noexcept { return rows_ended_; }
    void add_to(Totals& totals) const;

  private:
    struct Task {
        Transfer transfer;
        std::vector<RowNote> notes;
        std::vector<RowResult> seen;    // of the rows that have ended
        std::uint32_t rows_unseen = 0;  // those that have not
        // When it should end, without looking at the pipeline's notes, and how much later it may.
        std::int64_t due_ns = time_never;
        std::int64_t slack_ns = 0;
        bool open = false;
        bool source_free = false;
        bool late = false;
    };

    // --- an episode
    void choose_options();
    void open();
    io::SimFaults choose_faults();
    void exchange_payloads();
    void iterate(bool submitting);
    std::int64_t step();
    void disturb();
    void check_deadlines();

    // --- what is asked
    void submit_store(Task& task);
    void submit_load(Task& task);
    void submit_one();
    void choose_slots(std::size_t count);
    void choose_times(Transfer& transfer);
    void fill_sources(Task& task);
    std::uint64_t some_key(std::uint64_t slot);

    // --- what is answered
    Task& task_of(const Transfer& transfer);
    std::int64_t deadline_of(const Task& task) const noexcept;
    void take_answers();
    void source_freed(Task& task);
    void finished(Task& task);
    void take_rows(Task& task);
    void row_ended(Task& task, std::size_t row);

    // --- ends
    bool settle(std::int64_t limit_ns, bool idle);
    void end_in_peace();
    void end_by_closing();
    void forget_everything();

    std::int64_t now() const noexcept { return disk_->now_ns(); }
    void trace(std::uint64_t word) noexcept {
        trace_hash_ = (trace_hash_ ^ word) * 0x100000001B3ULL;
    }

    io::SimRandom random_;
    bool faults_;
    const Noise& noise_;
    Verdict& verdict_;
    Geometry geometry_;
    std::uint64_t slot_count_;
    std::uint64_t epoch_ = 1;
    std::uint64_t record_offset_;
    std::unique_ptr<io::SimDisk> disk_;
    std::unique_ptr<DeviceMemory> device_;
    std::unique_ptr<Blocks> blocks_;
    std::unique_ptr<SlotModel> model_;
    std::unique_ptr<SimClock> clock_;

    Harm harm_ = Harm::none;
    PipelineOptions options_;
    std::uint32_t buffers_ = 8;
    std::uint64_t rows_open_max_ = 32;
    std::int64_t pause_ns_max_ = 100'000;
    std::unique_ptr<Ring> ring_;
    std::unique_ptr<AlignedMemory> staging_;
    std::unique_ptr<SlotRecords> records_;
    std::unique_ptr<SimCopier> copier_;
    std::unique_ptr<Pipeline> pipeline_;

    std::vector<std::unique_ptr<Task>> tasks_;
    std::vector<std::uint64_t> chosen_slots_;
    std::vector<std::uint64_t> chosen_blocks_;
    std::vector<std::byte> scratch_;
    std::uint64_t transfer_last_ = 0;
    std::uint64_t key_last_ = 0;
    std::uint64_t rows_open_ = 0;
    std::uint64_t rows_ended_ = 0;
    std::uint64_t slot_before_ = 0;
    std::array<std::uint64_t, row_status_count> statuses_{};  // by RowStatus
    std::int64_t closing_ns_ = time_never;  // when the pipeline was told to end all rows
    std::int64_t submit_at_ns_ = 0;
    std::int64_t thaw_at_ns_ = 0;
    std::uint64_t iterations_ = 0;
    std::uint64_t steps_without_time_ = 0;
    std::uint64_t trace_hash_ = 0;
};

}  // namespace kvdisk::test

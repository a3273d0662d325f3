// What the shards of an engine tell its callers: transfers in progress and events not yet polled.
// One mutex guards it, held only to move entries.
//
// What always holds: a transfer's results are told once, when its last part has ended; and a slot's
// release from quarantine after the results of every transfer that may have put it there.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "pipeline/engine.hpp"

namespace kvdisk {

// Kept alive by shards and callers.
struct Outbox {
    struct Job {
        Direction direction = Direction::store;
        std::uint32_t parts_open = 0;
        std::uint32_t sources_open = 0;
        std::int64_t deadline_ns = time_never;
        std::vector<RowResult> results;
    };

    Outbox();
    ~Outbox();

    // All of these with the mutex held.
    bool empty() const noexcept;
    void tell();
    void open(std::uint64_t id, Job job);  // ids grow
    void finish(std::uint64_t id);         // its results are complete
    void release(std::span<const std::uint64_t> slots);
    void end_by(std::int64_t time_ns);  // no job is expected to take longer
    bool overdue(std::int64_t now_ns);  // a job should have ended a while ago

    std::mutex mutex;
    std::condition_variable ready;
    std::unordered_map<std::uint64_t, Job> jobs;
    Events events;
    int event_fd = -1;
    bool told = false;
    std::int64_t overdue_ns = time_never;  // no job is overdue before it

  private:
    // Slots out of quarantine wait until every transfer has ended that was open when they came: one
    // of its rows may have put them there, and its result has to come first.
    struct HeldRelease {
        std::uint64_t slot = 0;
        std::uint64_t after_id = 0;
    };
    void tell_released();

    std::deque<HeldRelease> held_;
    std::uint64_t id_last_ = 0;
};

}  // namespace kvdisk

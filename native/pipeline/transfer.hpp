// A transfer: a batch of rows in one direction, one row per block. It ends once, with a status per
// row.
#pragma once

#include <cstdint>
#include <vector>

#include "pipeline/slot_record.hpp"

namespace kvdisk {

enum class Direction : std::uint8_t { store, load };

enum class RowStatus : std::uint8_t {
    pending,
    ok,
    miss,         // load: the slot does not hold this key
    corrupt,      // load: the slot's bytes are not those that were stored; the slot is dropped
    failed,       // the disk failed; `error` has the errno
    timed_out,    // the deadline passed; the slot may be quarantined (RowResult::quarantined)
    refused,      // store: no room in time, or cancelled before it began
    busy,         // the slot has another transfer in flight, or is quarantined
    copy_failed,  // a copy to or from the block failed, or the event it waits for; `error` as above
};
inline constexpr std::size_t row_status_count = 9;

struct Row {
    std::uint64_t block_id = 0;
    std::uint64_t slot = 0;
    Key key;
};

struct RowResult {
    RowStatus status = RowStatus::pending;
    bool quarantined =
        false;  // I/O on the slot is still in the kernel: do not reuse it until released
    std::int32_t error = 0;  // errno of a failed row
};

inline constexpr std::int64_t time_never = INT64_MAX;

// Owned by whoever submits it; the pipeline borrows it until it is taken back with `take_finished`.
struct Transfer {
    std::uint64_t id = 0;
    Direction direction = Direction::store;
    // What must have happened before a store reads its blocks, or a load writes them (on a device);
    // 0: nothing.
    std::uint64_t event = 0;
    // Every row has ended by then. A load's counts anew from when its event is seen to have
    // happened: until then it is the device that keeps it waiting, and it is 30 s later.
    std::int64_t deadline_ns = time_never;
    // Store: a row that has no buffer by then is refused. The time until the event does not count.
    std::int64_t start_by_ns = time_never;
    std::vector<Row> rows;
    std::vector<RowResult> results;  // sized like rows by the pipeline

    // The pipeline's own notes.
    std::int64_t submitted_ns = 0;
    std::int64_t timeout_ns = 0;  // from then to the deadline
    bool device_busy = false;     // a load's event has not been seen to have happened
    std::uint32_t next_row = 0;   // rows before it have been started (or ended)
    std::uint32_t rows_open = 0;
    std::uint32_t sources_open = 0;  // store: rows whose block may still be read
    Transfer* next = nullptr;
    Transfer* next_free = nullptr;  // in the list of those whose sources became free
    Transfer* next_busy = nullptr;  // in the list of those whose device is busy
};

// A first-in-first-out list of transfers, linked through `Link`.
template <Transfer* Transfer::*Link>
class TransferList {
  public:
    bool empty() const noexcept { return head_ == nullptr; }
    Transfer* front() const noexcept { return head_; }

    void push(Transfer* transfer) noexcept {
        transfer->*Link = nullptr;
        (tail_ == nullptr ? head_ : tail_->*Link) = transfer;
        tail_ = transfer;
    }

    Transfer* pop() noexcept {
        Transfer* const first = head_;
        if (first != nullptr) remove_after(nullptr);
        return first;
    }

    // Removes the one behind `before` (null: the first).
    void remove_after(Transfer* before) noexcept {
        Transfer* const gone = before == nullptr ? head_ : before->*Link;
        (before == nullptr ? head_ : before->*Link) = gone->*Link;
        if (tail_ == gone) tail_ = before;
        gone->*Link = nullptr;
    }

    // `gone` is in the list.
    void remove(const Transfer* gone) noexcept {
        Transfer* before = nullptr;
        for (Transfer* at = head_; at != gone; at = at->*Link) before = at;
        remove_after(before);
    }

  private:
    Transfer* head_ = nullptr;
    Transfer* tail_ = nullptr;
};

}  // namespace kvdisk

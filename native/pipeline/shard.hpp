// One pipeline on a thread of its own: everything that thread uses lives here and is kept alive by
// it, so that a thread which hangs in the kernel can be left behind without pulling memory from
// under it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "pipeline/engine.hpp"
#include "pipeline/outbox.hpp"

namespace kvdisk {

// A shard's share of a transfer, and where its rows belong in the whole.
struct Part : Transfer {
    std::vector<std::uint32_t> positions;
};

class Shard : public std::enable_shared_from_this<Shard> {
  public:
    Shard(const EngineOptions& options, std::uint32_t index, std::shared_ptr<SlotRecords> records,
          std::shared_ptr<Outbox> outbox, std::uint64_t sequence_next);
    ~Shard();

    void start();

    // From any thread; none of them waits for the disk.
    std::unique_ptr<Part> take_spare();
    void submit(std::unique_ptr<Part> part);
    void cancel_waiting(std::uint64_t transfer_id);

    // For a thread that hangs in the kernel (a submission may, on some file systems): does on the
    // calling thread what must not wait for it, which is to end rows whose time has passed. Does
    // nothing while the thread runs.
    void stand_in();

    // Store bytes that wait for a buffer.
    std::uint64_t waiting_bytes() const noexcept {
        const std::uint64_t begun = rows_begun_;  // first: it never passes what was submitted
        return (rows_submitted_ - begun) * block_bytes_;
    }

    // Up to date within a step of the thread.
    Progress progress(Direction direction) const noexcept {
        const SharedProgress& shared = progress_[static_cast<std::size_t>(direction)];
        return {shared.bytes, shared.busy_ns, shared.busy};
    }

    // Figures in two calls, so that several shards can be asked at once. `add_stats` is false when
    // the thread did not answer in time; then the last known ones were added.
    void ask_stats();
    bool add_stats(EngineStats& total, std::chrono::steady_clock::time_point until);
    void reset_stats() { send({.kind = CommandKind::reset_stats}); }

    // From then on the deadline of every transfer counts as passed.
    void end_by(std::int64_t time_ns);

    // Closing in two calls, so that several shards close at once. The thread drains until the
    // limit, then times out what is left; one that hangs in the kernel is left behind. `end_close`
    // returns the I/Os (or 1 for a hanging thread) that had to be abandoned.
    void begin_close(std::int64_t until_ns);
    std::uint64_t end_close(std::int64_t until_ns);

    const std::string& backend_reason() const noexcept { return backend_reason_; }

  private:
    enum class CommandKind : std::uint8_t { submit, cancel, reset_stats };
    struct Command {
        CommandKind kind;
        std::uint64_t number = 0;
        Part* part = nullptr;
    };
    struct SharedProgress {
        std::atomic<std::uint64_t> bytes = 0;
        std::atomic<std::uint64_t> busy_ns = 0;
        std::atomic<bool> busy = false;
    };

    void run(std::promise<void> attached);
    bool take_commands();
    void obey(const Command& command);
    void publish();
    void end_part(Part& part);
    bool may_leave() const;
    void leave();
    void send(Command command);
    void answer_stats(bool final);

    // Held by the thread, but not while it is in a call that may hang in the kernel. Guards all
    // that the thread uses except the backend, which is the thread's own throughout.
    std::mutex turn_mutex_;

    MonotonicClock clock_;
    std::uint64_t block_bytes_;
    std::shared_ptr<SlotRecords> records_;
    std::shared_ptr<Outbox> outbox_;
    std::unique_ptr<Ring> ring_;
    AlignedMemory record_staging_;
    std::string backend_reason_;
    std::unique_ptr<io::Backend> backend_;
    std::unique_ptr<Copier> copier_;
    std::unique_ptr<Pipeline> pipeline_;

    std::mutex inbox_mutex_;
    std::vector<Command> inbox_;
    std::vector<Command> commands_;              // the thread's own: swapped with the inbox
    std::vector<std::unique_ptr<Part>> spares_;  // ended parts, to be used again
    bool closing_ = false;
    bool gone_ = false;  // the thread takes no more commands
    std::atomic<std::int64_t> closing_until_ns_ = time_never;

    std::atomic<std::uint64_t> rows_submitted_ = 0;
    std::atomic<std::uint64_t> rows_begun_ = 0;
    SharedProgress progress_[2];  // per direction

    std::mutex stats_mutex_;
    std::condition_variable stats_ready_;
    bool stats_wanted_ = false;
    bool stats_final_ = false;  // the thread has gone
    EngineStats stats_;

    std::mutex exit_mutex_;
    std::condition_variable exited_;
    bool has_exited_ = false;
    std::uint64_t abandoned_ = 0;
    std::thread thread_;
};

}  // namespace kvdisk

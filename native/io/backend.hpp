// The one interface through which kvdisk touches a disk. A backend knows file descriptors, offsets
// and lengths; it knows no slots, no keys and no checksums. Three implementations pass one contract
// suite (tests/contract): `uring`, `threads` and the seeded simulator `sim`.
//
// What always holds, for every backend:
//   * Each pushed request yields exactly one completion carrying its id, in any order. Nothing else
//     yields one.
//   * `result` is the count of bytes moved, which may be short, or -errno. A backend never resumes
//   a
//     short transfer: the pipeline does. Transient answers of the *submission* (EINTR, EAGAIN,
//     EBUSY) are the backend's own and never reach the caller unless retrying them was in vain.
//   * All calls come from the one thread that called `attach`, except `wake`.
//   * `push` and `reap` make no I/O system call that can wait for the disk; only `wait` blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvdisk::io {

enum class Op : std::uint8_t { read, write };

// How urgent a request is, where the kernel has I/O priorities (ioprio_set(2)): loads go first.
enum class Priority : std::uint8_t { normal, high, low };

inline constexpr std::uint16_t area_none = 0xFFFF;
inline constexpr std::uint64_t area_bytes_max = std::uint64_t{1} << 30;  // io_uring_register(2)

struct Request {
    std::uint64_t id = 0;            // unique for the backend's life; never 0
    std::uint64_t offset = 0;        // bytes from the start of the file
    std::byte* data = nullptr;       // stays valid and untouched until the completion was reaped
    std::uint32_t length = 0;        // bytes, > 0
    std::uint16_t file = 0;          // index into BackendOptions::files
    std::uint16_t area = area_none;  // index into BackendOptions::areas when `data` lies inside one
    Op op = Op::read;
    Priority priority = Priority::normal;
};

struct Completion {
    std::uint64_t id = 0;
    std::int64_t result = 0;  // bytes moved, or -errno
};

struct BackendOptions {
    std::vector<int> files;  // borrowed: open until the backend is destroyed
    std::vector<std::span<std::byte>>
        areas;  // memory to register; each at most area_bytes_max, page-aligned
    // So many of the last areas are left unregistered rather than all of them.
    std::size_t areas_dispensable = 0;
    std::uint32_t depth = 32;        // most requests in flight, 1..4096
    bool force_async = false;        // never let a submission run the I/O inline (FUSE, NFS)
    bool force_async_reads = false;  // nor queue reads behind one another (tmpfs)
};

struct BackendStats {
    std::uint64_t submitted = 0;
    std::uint64_t completed = 0;
    std::uint64_t submit_calls = 0;    // system calls (or queue hand-overs) that submitted work
    std::uint64_t submit_retries = 0;  // EINTR, EAGAIN, EBUSY answered by another try
    std::uint64_t overflows = 0;       // completion-queue overflows seen and flushed
    std::uint64_t unknown_completions = 0;
    bool areas_registered = false;  // apart from dispensable ones
    bool files_registered = false;
    std::string note;  // one sentence: what could not be had, why, how to allow it
};

class Backend {
  public:
    virtual ~Backend() = default;

    virtual const char* name() const noexcept = 0;

    // Binds the backend to the calling thread; called once, before anything else.
    virtual void attach() = 0;

    // The caller keeps what is in flight within this.
    virtual std::uint32_t depth() const noexcept = 0;

    // Requests pushed and not yet reaped.
    virtual std::uint32_t in_flight() const noexcept = 0;

    // Takes a request; requires in_flight() < depth().
    virtual void push(const Request& request) = 0;

    // Hands what was pushed to the disk. Does not wait for it.
    virtual void submit() = 0;

    // Takes up to completions.size() finished requests; returns how many.
    virtual std::size_t reap(std::span<Completion> completions) = 0;

    // Returns when something can be reaped, when `wake` was called (also just before), or when the
    // monotonic clock passes `until_ns`; may return early. `until_ns` < 0: no limit.
    virtual void wait(std::int64_t until_ns) = 0;

    // Ends a current or the next `wait`. The only call allowed from any thread.
    virtual void wake() noexcept = 0;

    virtual BackendStats stats() const = 0;

    // Gives up what is still in flight: the backend keeps (leaks) every resource that the kernel
    // may still use, so that the destructor returns at once. The areas must stay mapped for ever.
    virtual void abandon() noexcept = 0;
};

// Each throws std::system_error when the kernel does not allow it (the errno says why).
std::unique_ptr<Backend> make_uring(const BackendOptions& options);
std::unique_ptr<Backend> make_threads(const BackendOptions& options);

}  // namespace kvdisk::io

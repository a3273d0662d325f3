// Bugs planted on purpose, to prove that the soak would find such a bug (tests/run_canaries.sh).
// The build switch KVDISK_CANARY chooses one; with -1 the soak chooses when it starts, so that one
// build serves for all. In every other build `canary` is the constant 0 and the planted code is
// gone.
#pragma once

#ifndef KVDISK_CANARY
#define KVDISK_CANARY 0
#endif

namespace kvdisk {

#if KVDISK_CANARY == -1
inline int canary = 0;
#else
inline constexpr int canary = KVDISK_CANARY;
#endif

// What each one does; the first is the healthy pipeline.
inline constexpr const char* canary_names[] = {
    "none",
    "a short I/O counts as whole",
    "the rest of a short I/O counts as whole, however short",
    "a buffer is reused at the deadline though its I/O is in flight",
    "the checksum is not compared",
    "completions are matched by position",
    "a record is published before its payload is written",
    "a source is freed when its gather begins",
    "a slot in quarantine is written again",
    "the key of a record is not compared",
    "a row is ended twice",
    "the old record stays while its slot is overwritten",
    "a completion of the past is taken for its buffer's present one",
    "two writes of one record page are in flight",
    "a row ends while a copy that cannot be stopped still runs",
    "a resumed I/O begins at the start of its buffer",
    "a failed write counts as a good one",
    "loads in I/O have no deadline",
    "a failed I/O loses its buffer",
    "a source is read before its event",
    "a record page is never written",
    "the checksum of a payload does not say whose it is",
};
inline constexpr int canary_last = static_cast<int>(sizeof canary_names / sizeof *canary_names) - 1;

}  // namespace kvdisk

// A CUDA driver that has no device: what the `cuda` copier calls, on host memory and late. It is
// built as a library of the driver's name, so that loading "libcuda.so.1" finds it where it is
// already there; programs without a GPU can then be tested up to the last call.
//
// What always holds:
//   * A stream does its work on a thread of its own, in order, after a random while, and a copy in
//   two
//     halves: who reads too early sees it.
//   * A call that needs a context fails on a thread where none is current, as with the driver.
//   * Two devices are there. Handles count: what was not given back shows in `fake_cuda_live`.
#pragma once

#include <cstdint>

extern "C" {

// Everything anew: no plans, no calls, delays of at most `delay_us_max` drawn from `seed`.
void fake_cuda_reset(std::uint64_t seed, unsigned delay_us_max);

// The call of this name after `skipped` more ones answers `error`, and so do later ones if
// `always`.
void fake_cuda_fail(const char* name, unsigned skipped, int error, int always);

// From now on every call answers `error` and no work is done: what a broken context is like.
void fake_cuda_break(int error);

// While frozen, no stream goes on.
void fake_cuda_freeze(int frozen);

// An event of somebody else, and what asking for it answers from now on (600: not ready).
void* fake_cuda_make_event(int answer);
void fake_cuda_set_event(void* event, int answer);

// How often a call was made, "" for any; and how often by threads whose first call was not choosing
// their context.
std::uint64_t fake_cuda_calls(const char* name);
std::uint64_t fake_cuda_unprepared_threads();

// Things of a kind that are not given back: "context" (of `device`), "stream", "event",
// "registration", "memory", "module".
std::int64_t fake_cuda_live(const char* kind, int device);
}

// Time as the pipeline sees it: nanoseconds of a monotonic clock that is passed in, so that tests
// can run under virtual time.
#pragma once

#include <cstdint>
#include <ctime>

namespace kvdisk {

class Clock {
  public:
    virtual ~Clock() = default;
    virtual std::int64_t now_ns() const noexcept = 0;
};

class MonotonicClock final : public Clock {
  public:
    std::int64_t now_ns() const noexcept override {
        timespec time{};
        ::clock_gettime(CLOCK_MONOTONIC, &time);
        return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
    }
};

}  // namespace kvdisk

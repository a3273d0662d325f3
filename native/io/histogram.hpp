// Latency histograms in fio's manner: buckets of constant relative width (64 a power of two, so
// within 1.6 % of the true value), fixed memory, no allocation when recording.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace kvdisk {

class Histogram {
  public:
    static constexpr unsigned sub_bits = 6;
    static constexpr std::size_t bucket_count = (64 - sub_bits + 1) << sub_bits;

    static constexpr std::size_t bucket_of(std::uint64_t value) noexcept {
        if (value < (std::uint64_t{1} << sub_bits)) return static_cast<std::size_t>(value);
        const unsigned shift = static_cast<unsigned>(std::bit_width(value)) - 1 - sub_bits;
        return (static_cast<std::size_t>(shift) << sub_bits) +
               static_cast<std::size_t>(value >> shift);
    }

    // The middle of a bucket, as fio reports it.
    static constexpr std::uint64_t value_of(std::size_t bucket) noexcept {
        if (bucket < (std::size_t{2} << sub_bits)) return bucket;
        const unsigned shift = static_cast<unsigned>(bucket >> sub_bits) - 1;
        const std::uint64_t mantissa =
            (bucket & ((std::size_t{1} << sub_bits) - 1)) + (std::uint64_t{1} << sub_bits);
        return (mantissa << shift) + ((std::uint64_t{1} << shift) >> 1);
    }

    void record(std::uint64_t value) noexcept {
        ++counts_[bucket_of(value)];
        ++count_;
        sum_ += value;
        if (value < min_) min_ = value;
        if (value > max_) max_ = value;
    }

    void merge(const Histogram& other) noexcept {
        for (std::size_t i = 0; i < bucket_count; ++i) counts_[i] += other.counts_[i];
        count_ += other.count_;
        sum_ += other.sum_;
        if (other.min_ < min_) min_ = other.min_;
        if (other.max_ > max_) max_ = other.max_;
    }

    // The smallest recorded value that `share` (0..1] of all values do not exceed; 0 when empty.
    std::uint64_t percentile(double share) const noexcept {
        if (count_ == 0) return 0;
        const auto wanted = static_cast<std::uint64_t>(share * static_cast<double>(count_) + 0.5);
        std::uint64_t seen = 0;
        for (std::size_t i = 0; i < bucket_count; ++i) {
            seen += counts_[i];
            if (seen >= wanted && seen > 0) return value_of(i) < max_ ? value_of(i) : max_;
        }
        return max_;
    }

    // The standard deviation, from the middles of the buckets.
    double deviation() const noexcept {
        if (count_ == 0) return 0;
        const double mean = static_cast<double>(sum_) / static_cast<double>(count_);
        double squares = 0;
        for (std::size_t i = 0; i < bucket_count; ++i) {
            if (counts_[i] == 0) continue;
            const double distance = static_cast<double>(value_of(i)) - mean;
            squares += static_cast<double>(counts_[i]) * distance * distance;
        }
        return std::sqrt(squares / static_cast<double>(count_));
    }

    std::uint64_t count() const noexcept { return count_; }
    std::uint64_t sum() const noexcept { return sum_; }
    std::uint64_t min() const noexcept { return count_ == 0 ? 0 : min_; }
    std::uint64_t max() const noexcept { return max_; }
    const std::array<std::uint64_t, bucket_count>& counts() const noexcept { return counts_; }

  private:
    std::array<std::uint64_t, bucket_count> counts_{};
    std::uint64_t count_ = 0;
    std::uint64_t sum_ = 0;
    std::uint64_t min_ = ~std::uint64_t{0};
    std::uint64_t max_ = 0;
};

}  // namespace kvdisk

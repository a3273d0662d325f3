// The simulator's own source of randomness: xoshiro256** seeded through splitmix64. Written out
// here because the distributions of <random> differ between standard libraries, and a seed must
// replay the same run everywhere.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

namespace kvdisk::io {

class SimRandom {
  public:
    explicit SimRandom(std::uint64_t seed) noexcept { reseed(seed); }

    void reseed(std::uint64_t seed) noexcept {
        for (std::uint64_t& word : state_) {
            seed += 0x9E3779B97F4A7C15ULL;
            std::uint64_t mixed = seed;
            mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9ULL;
            mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBULL;
            word = mixed ^ (mixed >> 31);
        }
    }

    std::uint64_t next() noexcept {
        const std::uint64_t result = std::rotl(state_[1] * 5, 7) * 9;
        const std::uint64_t shifted = state_[1] << 17;
        state_[2] ^= state_[0];
        state_[3] ^= state_[1];
        state_[1] ^= state_[2];
        state_[0] ^= state_[3];
        state_[2] ^= shifted;
        state_[3] = std::rotl(state_[3], 45);
        return result;
    }

    // 0 .. bound-1; bound > 0. The bias of the modulo does not matter here.
    std::uint64_t below(std::uint64_t bound) noexcept { return next() % bound; }

    // first .. last, both included.
    std::int64_t between(std::int64_t first, std::int64_t last) noexcept {
        const auto count = static_cast<std::uint64_t>(last - first) + 1;
        return first + static_cast<std::int64_t>(below(count));
    }

    // 0 <= result < 1, with 53 bits.
    double fraction() noexcept { return static_cast<double>(next() >> 11) * 0x1.0p-53; }

    bool chance(double probability) noexcept {
        return probability > 0.0 && fraction() < probability;
    }

  private:
    std::array<std::uint64_t, 4> state_{};
};

}  // namespace kvdisk::io

// XXH3-64, in one go or in steps, so that the engine thread can look at the disk between steps; and
// together with a copy, so that both take one trip through memory.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>
#include <cstdint>
#include <span>

namespace kvdisk {

inline std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed) noexcept {
    return XXH3_64bits_withSeed(bytes.data(), bytes.size(), seed);
}

class Checksum {
  public:
    void reset(std::uint64_t seed) noexcept { XXH3_64bits_reset_withSeed(&state_, seed); }
    void update(std::span<const std::byte> bytes) noexcept;

    // Takes the bytes in and copies them to `target`, which they must not overlap. What is copied
    // is what was hashed as long as nobody writes to `bytes` meanwhile.
    void update_copying(std::span<const std::byte> bytes, std::byte* target) noexcept;

    std::uint64_t digest() const noexcept { return XXH3_64bits_digest(&state_); }

  private:
    XXH3_state_t state_{};
};

}  // namespace kvdisk

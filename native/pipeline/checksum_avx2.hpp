// The checksum's inner loop for processors that have AVX2, a third faster than what every x86-64
// has. Ask the processor before calling it.
#pragma once

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstddef>

namespace kvdisk {

void checksum_update_avx2(XXH3_state_t* state, const void* data, std::size_t bytes) noexcept;

}  // namespace kvdisk

// Compiled for AVX2 (CMakeLists.txt), so it includes nothing whose inline functions other files
// share: the linker might keep this file's.
#include "pipeline/checksum_avx2.hpp"

#if defined(__x86_64__)
#if !defined(__AVX2__)
#error "this file is to be compiled with -mavx2"
#endif

namespace kvdisk {

void checksum_update_avx2(XXH3_state_t* state, const void* data, std::size_t bytes) noexcept {
    XXH3_64bits_update(state, data, bytes);
}

}  // namespace kvdisk
#endif

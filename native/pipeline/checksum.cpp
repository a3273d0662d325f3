#include "pipeline/checksum.hpp"

#include <algorithm>
#include <cstring>

#include "pipeline/checksum_avx2.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace kvdisk {

namespace {

// Hashed, a piece is still in the first cache when it is copied. While it is copied the next piece
// is fetched: the processor's own prefetching ends at each page. Measured in turns on Zen 3,
// seconds of a core for each GB: checksum, then memcpy 0.29; in one pass with memcpy 0.21; past the
// caches in pieces of 4 to 64 KiB 0.13 to 0.15; with the next 4 KiB fetched 0.11 (docs/adr/0005).
constexpr std::size_t piece_bytes_max = 4096;

using Update = void (*)(XXH3_state_t* state, const void* data, std::size_t bytes) noexcept;

void update_baseline(XXH3_state_t* state, const void* data, std::size_t bytes) noexcept {
    XXH3_64bits_update(state, data, bytes);
}

Update best_update() noexcept {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") != 0) return checksum_update_avx2;
#endif
    return update_baseline;
}

const Update update_state = best_update();

// Copies past the caches: nobody reads the target soon, and a cache line that is written whole need
// not be read first.
void copy_past_cache(std::byte* target, const std::byte* source, std::size_t bytes) noexcept {
#if defined(__SSE2__)
    constexpr std::size_t line_bytes = 64;
    const std::size_t ahead_bytes = std::min(
        bytes, (line_bytes - reinterpret_cast<std::uintptr_t>(target) % line_bytes) % line_bytes);
    std::memcpy(target, source, ahead_bytes);
    std::size_t at = ahead_bytes;
    for (; at + line_bytes <= bytes; at += line_bytes) {
        const auto* const from = reinterpret_cast<const __m128i*>(source + at);
        auto* const to = reinterpret_cast<__m128i*>(target + at);
        __builtin_prefetch(source + at + piece_bytes_max);  // faults nowhere
        const __m128i first = _mm_loadu_si128(from);
        const __m128i second = _mm_loadu_si128(from + 1);
        const __m128i third = _mm_loadu_si128(from + 2);
        const __m128i fourth = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, first);
        _mm_stream_si128(to + 1, second);
        _mm_stream_si128(to + 2, third);
        _mm_stream_si128(to + 3, fourth);
    }
    std::memcpy(target + at, source + at, bytes - at);
    _mm_sfence();  // such stores are ordered by nothing else, and the disk may read next
#else
    std::memcpy(target, source, bytes);
#endif
}

}  // namespace

void Checksum::update(std::span<const std::byte> bytes) noexcept {
    update_state(&state_, bytes.data(), bytes.size());
}

void Checksum::update_copying(std::span<const std::byte> bytes, std::byte* target) noexcept {
    for (std::size_t at = 0; at < bytes.size(); at += piece_bytes_max) {
        const auto piece = bytes.subspan(at, std::min(piece_bytes_max, bytes.size() - at));
        update(piece);
        copy_past_cache(target + at, piece.data(), piece.size());
    }
}

}  // namespace kvdisk

// The kernels that move blocks in small segments, straight between device memory and pinned host
// memory: a copy engine needs a command for each segment, and giving those costs more than the
// bytes. gather.ptx is made from this file by tools/make-ptx and kept beside it, so that building
// kvdisk needs no CUDA; the driver compiles it for the device at open.
//
// A warp takes one piece of one block at a time. All its reads of a round are under way before the
// first write, since a read over PCIe takes microseconds. Host memory is read past the caches (it
// is used once, and the host changes it between launches).
#include "gather.hpp"

namespace {

constexpr unsigned lanes = 32;
constexpr unsigned reads_ahead = 4;

// Whole words, each lane its own; the rest of fewer than a word stays.
template <typename Word>
__device__ void copy_words(char* target, const char* source, unsigned bytes, unsigned lane) {
    const unsigned words = bytes / sizeof(Word);
    const Word* const from = reinterpret_cast<const Word*>(source);
    Word* const to = reinterpret_cast<Word*>(target);
    unsigned at = lane;
#pragma unroll 1
    for (; at + (reads_ahead - 1) * lanes < words; at += reads_ahead * lanes) {
        Word held[reads_ahead];
#pragma unroll
        for (unsigned i = 0; i < reads_ahead; ++i) held[i] = __ldcs(from + at + i * lanes);
#pragma unroll
        for (unsigned i = 0; i < reads_ahead; ++i) __stcs(to + at + i * lanes, held[i]);
    }
#pragma unroll 1
    for (; at < words; at += lanes) __stcs(to + at, __ldcs(from + at));
}

// In the widest words that both addresses allow, then byte by byte what is left.
__device__ void copy(char* target, const char* source, unsigned bytes, unsigned lane) {
    const auto addresses =
        reinterpret_cast<unsigned long long>(target) | reinterpret_cast<unsigned long long>(source);
    unsigned done = 0;
    if (addresses % sizeof(uint4) == 0) {
        copy_words<uint4>(target, source, bytes, lane);
        done = bytes / sizeof(uint4) * sizeof(uint4);
    } else if (addresses % sizeof(unsigned) == 0) {
        copy_words<unsigned>(target, source, bytes, lane);
        done = bytes / sizeof(unsigned) * sizeof(unsigned);
    }
    copy_words<char>(target + done, source + done, bytes - done, lane);
}

template <bool gather>
__device__ void move(const GatherPiece* pieces, unsigned piece_count, unsigned row_count,
                     const GatherRows& rows) {
    const unsigned lane = threadIdx.x % lanes;
    const unsigned warps = gridDim.x * (blockDim.x / lanes);
    unsigned piece = blockIdx.x * (blockDim.x / lanes) + threadIdx.x / lanes;
#pragma unroll 1
    for (unsigned row = 0; row < row_count; ++row) {
#pragma unroll 1
        for (; piece < piece_count; piece += warps) {
            const GatherPiece at = pieces[piece];
            char* const block = reinterpret_cast<char*>(at.block0 + rows.block[row] * at.stride);
            char* const buffer = reinterpret_cast<char*>(rows.buffer[row] + at.offset);
            copy(gather ? buffer : block, gather ? block : buffer, at.bytes, lane);
        }
        piece -= piece_count;  // the next row goes on with the warp whose turn it is
    }
}

}  // namespace

extern "C" __global__ void __launch_bounds__(512)
    kvdisk_gather(const GatherPiece* pieces, unsigned piece_count, unsigned row_count,
                  const __grid_constant__ GatherRows rows) {
    move<true>(pieces, piece_count, row_count, rows);
}

extern "C" __global__ void __launch_bounds__(512)
    kvdisk_scatter(const GatherPiece* pieces, unsigned piece_count, unsigned row_count,
                   const __grid_constant__ GatherRows rows) {
    move<false>(pieces, piece_count, row_count, rows);
}

// What the host and the gather kernel agree on: plain structs, for copy_cuda.cpp and gather.cu
// both.
#pragma once

// A stretch of every block: `bytes` at `block0 + block * stride` in device memory, and at `offset`
// in a bounce buffer.
struct GatherPiece {
    unsigned long long block0;
    unsigned long long stride;
    unsigned long long offset;
    unsigned bytes;
    unsigned unused;
};

// The blocks that one launch moves. It is passed by value, so that it needs no memory of its own
// that would have to outlive the launch; a kernel's parameters are 4 KiB at most.
constexpr unsigned gather_rows_max = 64;
struct GatherRows {
    unsigned long long block[gather_rows_max];
    unsigned long long buffer[gather_rows_max];  // the bounce buffer as the device sees it
};

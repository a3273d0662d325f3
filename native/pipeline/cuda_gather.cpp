#include "pipeline/cuda_gather.hpp"

#include <algorithm>

#include "pipeline/gather_ptx.hpp"  // made from gather.ptx by CMake

namespace kvdisk {

namespace {

constexpr unsigned threads_per_cta = 512;
constexpr unsigned warps_per_cta = threads_per_cta / 32;

// What a warp copies at a time: long enough to hide the latency of its first read, short enough
// that a block is spread over all warps.
constexpr std::uint64_t piece_bytes_max = 4096;

std::vector<GatherPiece> pieces_of(const std::vector<Segment>& segments) {
    std::vector<GatherPiece> pieces;
    for (const Segment& segment : segments) {
        const std::uint64_t bytes = segment.region.segment_bytes;
        for (std::uint64_t done = 0; done < bytes; done += piece_bytes_max) {
            GatherPiece piece{};
            piece.block0 = reinterpret_cast<std::uintptr_t>(segment.region.base) + done;
            piece.stride = segment.region.block_stride_bytes;
            piece.offset = segment.buffer_offset + done;
            piece.bytes = static_cast<unsigned>(std::min(bytes - done, piece_bytes_max));
            pieces.push_back(piece);
        }
    }
    return pieces;
}

}  // namespace

void GatherKernel::load(const std::vector<Segment>& segments) {
    if (segments.empty()) return;
    const cuda::Driver& cuda = cuda::driver();
    cuda::require(cuda.module_load_data(&module_, gather_ptx), "cuModuleLoadData");
    cuda::require(cuda.module_get_function(&gather_, module_, "kvdisk_gather"),
                  "cuModuleGetFunction");
    cuda::require(cuda.module_get_function(&scatter_, module_, "kvdisk_scatter"),
                  "cuModuleGetFunction");
    const std::vector<GatherPiece> pieces = pieces_of(segments);
    const std::size_t bytes = pieces.size() * sizeof(GatherPiece);
    cuda::require(cuda.mem_alloc(&pieces_, bytes), "cuMemAlloc");
    cuda::require(cuda.memcpy_host_to_device(pieces_, pieces.data(), bytes), "cuMemcpyHtoD");
    piece_count_ = static_cast<unsigned>(pieces.size());
}

void GatherKernel::unload() noexcept {
    if (pieces_ != 0) cuda::driver().mem_free(pieces_);
    if (module_ != nullptr) cuda::driver().module_unload(module_);
    pieces_ = 0;
    module_ = nullptr;
}

cuda::Result GatherKernel::launch(CopyDirection direction, const GatherBatch& batch,
                                  unsigned ctas_max, cuda::Stream stream) const {
    if (piece_count_ == 0) return cuda::success;
    unsigned piece_count = piece_count_;
    unsigned row_count = batch.count();
    cuda::DeviceAddress pieces = pieces_;
    GatherRows rows = batch.rows();
    void* parameters[] = {&pieces, &piece_count, &row_count, &rows};
    const std::uint64_t ctas_useful =
        (std::uint64_t{piece_count} * row_count + warps_per_cta - 1) / warps_per_cta;
    const auto ctas = static_cast<unsigned>(std::min<std::uint64_t>(ctas_max, ctas_useful));
    return cuda::driver().launch_kernel(direction == CopyDirection::gather ? gather_ : scatter_,
                                        ctas, 1, 1, threads_per_cta, 1, 1, 0, stream, parameters,
                                        nullptr);
}

}  // namespace kvdisk

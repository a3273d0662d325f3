// Copies alone, without disk or checksum: how fast blocks move between a device and a bounce ring,
// and what that costs. For benchmarks; it waits as the engine's thread does.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "io/backend.hpp"
#include "pipeline/copy_cuda.hpp"
#include "pipeline/layout.hpp"
#include "pipeline/ring.hpp"

namespace kvdisk {

struct CopyJobOptions {
    Layout layout;
    std::string device = "cpu";
    std::uint32_t buffers = 64;  // so many copies are in flight
    std::optional<std::uint64_t> kernel_below_bytes;
    unsigned kernel_ctas_max = CudaCopierOptions{}.kernel_ctas_max;
    bool batched = true;
};

struct CopyJobResult {
    std::uint64_t bytes = 0;
    std::uint64_t copies = 0;
    std::uint64_t errors = 0;
    std::int64_t elapsed_ns = 0;
    std::int64_t thread_cpu_ns = 0;
};

class CopyJob {
  public:
    // Throws as the engine does.
    explicit CopyJob(const CopyJobOptions& options);
    ~CopyJob();

    // Copies blocks round and round, one way or both in turn, and waits for the last ones.
    CopyJobResult run(bool gathers, bool scatters, std::int64_t duration_ns);

    std::string note() const { return copier_->note(); }

  private:
    Layout layout_;
    Ring ring_;
    std::unique_ptr<io::Backend> backend_;  // to sleep with
    std::unique_ptr<Copier> copier_;
};

}  // namespace kvdisk

// Adding up the figures of several shards.
#include "pipeline/shard.hpp"

namespace kvdisk {

void PipelineStats::merge(const PipelineStats& other) noexcept {
    for (const auto member : {&PipelineStats::rows_stored,
                              &PipelineStats::rows_loaded,
                              &PipelineStats::bytes_stored,
                              &PipelineStats::bytes_loaded,
                              &PipelineStats::rows_missed,
                              &PipelineStats::rows_corrupt,
                              &PipelineStats::rows_failed,
                              &PipelineStats::rows_timed_out,
                              &PipelineStats::rows_refused,
                              &PipelineStats::rows_busy,
                              &PipelineStats::ios,
                              &PipelineStats::ios_merged,
                              &PipelineStats::record_ios,
                              &PipelineStats::load_ios_short,
                              &PipelineStats::store_ios_short,
                              &PipelineStats::ios_retried,
                              &PipelineStats::ios_split,
                              &PipelineStats::unknown_completions,
                              &PipelineStats::late_completions,
                              &PipelineStats::ring_used_ns}) {
        this->*member += other.*member;
    }
    load_io_ns.merge(other.load_io_ns);
    store_io_ns.merge(other.store_io_ns);
    load_row_ns.merge(other.load_row_ns);
    store_row_ns.merge(other.store_row_ns);
}

void EngineStats::merge(const EngineStats& shard) {
    pipeline.merge(shard.pipeline);
    backend.submitted += shard.backend.submitted;
    backend.completed += shard.backend.completed;
    backend.submit_calls += shard.backend.submit_calls;
    backend.submit_retries += shard.backend.submit_retries;
    backend.overflows += shard.backend.overflows;
    backend.unknown_completions += shard.backend.unknown_completions;
    backend.areas_registered = shard.backend.areas_registered;
    backend.files_registered = shard.backend.files_registered;
    backend.note = shard.backend.note;
    ring.free += shard.ring.free;
    ring.used += shard.ring.used;
    ring.quarantined += shard.ring.quarantined;
    buffer_bytes = shard.buffer_bytes;
    pinned_bytes += shard.pinned_bytes;
    backend_name = shard.backend_name;
    copier_name = shard.copier_name;
    copier_note = shard.copier_note;
}

}  // namespace kvdisk

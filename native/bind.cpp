// The whole boundary between Python and C++. It converts arguments and results and holds no logic;
// what the calls mean is said in kvdisk/transfer.py and, for records, in kvdisk/slot_records.py.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "io/workload.hpp"
#include "pipeline/copy_job.hpp"
#include "pipeline/engine.hpp"
#include "pipeline/scrub.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <typename T>
using Vector = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Keys = nb::ndarray<const std::uint8_t, nb::shape<-1, kvdisk::key_bytes_max>, nb::c_contig,
                         nb::device::cpu>;

// A numpy array that owns what was moved into it.
template <typename T>
nb::object array_of(std::vector<T> values, std::initializer_list<std::size_t> shape) {
    auto* const held = new std::vector<T>(std::move(values));
    const nb::capsule owner(held, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T>(held->data(), shape, owner));
}

template <typename T>
nb::object array_of(std::vector<T> values) {
    const std::size_t size = values.size();
    return array_of(std::move(values), {size});
}

std::vector<kvdisk::Row> rows_of(const Vector<std::uint64_t>& block_ids,
                                 const Vector<std::uint64_t>& slots, const Keys& keys,
                                 const Vector<std::uint8_t>& key_lengths) {
    const std::size_t count = block_ids.shape(0);
    if (slots.shape(0) != count || keys.shape(0) != count || key_lengths.shape(0) != count) {
        throw nb::value_error("block_ids, slots, keys and key_lengths differ in length");
    }
    std::vector<kvdisk::Row> rows(count);
    for (std::size_t i = 0; i < count; ++i) {
        rows[i].block_id = block_ids(i);
        rows[i].slot = slots(i);
        rows[i].key.length = key_lengths(i);
        std::memcpy(rows[i].key.bytes.data(), keys.data() + i * kvdisk::key_bytes_max,
                    kvdisk::key_bytes_max);
    }
    return rows;
}

nb::tuple finished_tuple(const kvdisk::FinishedTransfer& finished) {
    const std::size_t count = finished.results.size();
    std::vector<std::uint8_t> statuses(count), quarantined(count);
    std::vector<std::int32_t> errors(count);
    for (std::size_t i = 0; i < count; ++i) {
        statuses[i] = static_cast<std::uint8_t>(finished.results[i].status);
        errors[i] = finished.results[i].error;
        quarantined[i] = finished.results[i].quarantined ? 1 : 0;
    }
    return nb::make_tuple(finished.id, static_cast<int>(finished.direction),
                          array_of(std::move(statuses)), array_of(std::move(errors)),
                          array_of(std::move(quarantined)));
}

nb::tuple events_tuple(kvdisk::Events events) {
    nb::list finished;
    for (const auto& transfer : events.finished) finished.append(finished_tuple(transfer));
    return nb::make_tuple(events.source_free, finished, events.released_slots);
}

// Its buckets that are not empty, so that histograms can be joined: [(middle, count)].
nb::list histogram_bins(const kvdisk::Histogram& histogram) {
    nb::list bins;
    for (std::size_t i = 0; i < kvdisk::Histogram::bucket_count; ++i) {
        const std::uint64_t count = histogram.counts()[i];
        if (count > 0) bins.append(nb::make_tuple(kvdisk::Histogram::value_of(i), count));
    }
    return bins;
}

nb::dict histogram_dict(const kvdisk::Histogram& histogram) {
    nb::dict percentiles;
    for (const double percent : {1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0,
                                 95.0, 99.0, 99.5, 99.9, 99.95, 99.99}) {
        percentiles[nb::cast(percent)] = histogram.percentile(percent / 100);
    }
    nb::dict result;
    result["count"] = histogram.count();
    result["sum"] = histogram.sum();
    result["min"] = histogram.min();
    result["max"] = histogram.max();
    result["deviation"] = histogram.deviation();
    result["percentiles"] = percentiles;
    result["bins"] = histogram_bins(histogram);
    return result;
}

nb::dict raw_result_dict(const kvdisk::io::RawResult& raw) {
    nb::dict result;
    for (std::size_t i = 0; i < 2; ++i) {
        nb::dict direction;
        direction["bytes"] = raw.bytes[i];
        direction["ios"] = raw.ios[i];
        direction["short_ios"] = raw.short_ios[i];
        direction["latency_ns"] = histogram_dict(raw.latency_ns[i]);
        result[i == 0 ? "read" : "write"] = direction;
    }
    result["elapsed_ns"] = raw.elapsed_ns;
    result["thread_cpu_ns"] = raw.thread_cpu_ns;
    result["in_flight_ns"] = raw.in_flight_ns;
    result["wrong_reads"] = raw.wrong_reads;
    result["error"] = raw.error;
    result["error_offset"] = raw.error_offset;
    result["abandoned"] = raw.abandoned;
    return result;
}

nb::dict stats_dict(const kvdisk::EngineStats& stats) {
    const kvdisk::PipelineStats& pipeline = stats.pipeline;
    nb::dict result;
    result["rows_stored"] = pipeline.rows_stored;
    result["rows_loaded"] = pipeline.rows_loaded;
    result["bytes_stored"] = pipeline.bytes_stored;
    result["bytes_loaded"] = pipeline.bytes_loaded;
    result["rows_missed"] = pipeline.rows_missed;
    result["rows_corrupt"] = pipeline.rows_corrupt;
    result["rows_failed"] = pipeline.rows_failed;
    result["rows_timed_out"] = pipeline.rows_timed_out;
    result["rows_refused"] = pipeline.rows_refused;
    result["rows_busy"] = pipeline.rows_busy;
    result["ios"] = pipeline.ios;
    result["ios_merged"] = pipeline.ios_merged;
    result["record_ios"] = pipeline.record_ios;
    result["load_ios_short"] = pipeline.load_ios_short;
    result["store_ios_short"] = pipeline.store_ios_short;
    result["ios_retried"] = pipeline.ios_retried;
    result["ios_split"] = pipeline.ios_split;
    result["unknown_completions"] =
        pipeline.unknown_completions + stats.backend.unknown_completions;
    result["late_completions"] = pipeline.late_completions;
    result["ring_used_ns"] = pipeline.ring_used_ns;
    result["load_io_ns"] = histogram_dict(pipeline.load_io_ns);
    result["store_io_ns"] = histogram_dict(pipeline.store_io_ns);
    result["load_row_ns"] = histogram_dict(pipeline.load_row_ns);
    result["store_row_ns"] = histogram_dict(pipeline.store_row_ns);
    result["ring_free"] = stats.ring.free;
    result["ring_used"] = stats.ring.used;
    result["ring_quarantined"] = stats.ring.quarantined;
    result["buffer_bytes"] = stats.buffer_bytes;
    result["pinned_bytes"] = stats.pinned_bytes;
    result["transfers_open"] = stats.transfers_open;
    result["stores_refused"] = stats.stores_refused;
    result["store_queue_bytes"] = stats.store_queue_bytes;
    result["backend"] = stats.backend_name;
    result["backend_reason"] = stats.backend_reason;
    result["backend_note"] = stats.backend.note;
    result["areas_registered"] = stats.backend.areas_registered;
    result["files_registered"] = stats.backend.files_registered;
    result["submit_calls"] = stats.backend.submit_calls;
    result["submit_retries"] = stats.backend.submit_retries;
    result["completion_overflows"] = stats.backend.overflows;
    result["copier"] = stats.copier_name;
    result["copier_note"] = stats.copier_note;
    result["fresh"] = stats.fresh;
    return result;
}

nb::tuple restored_tuple(kvdisk::Engine& engine) {
    kvdisk::RestoredRecords records = engine.take_restored();
    const std::size_t count = records.size();
    return nb::make_tuple(array_of(std::move(records.slots)),
                          array_of(std::move(records.sequences)),
                          array_of(std::move(records.valid_bytes)),
                          array_of(std::move(records.keys), {count, kvdisk::key_bytes_max}),
                          array_of(std::move(records.key_lengths)));
}

nb::object record_states(const Vector<std::uint8_t>& records, std::uint64_t first_slot,
                         std::uint64_t epoch) {
    std::vector<std::uint8_t> states(records.shape(0) / sizeof(kvdisk::SlotRecord));
    {
        const nb::gil_scoped_release release;
        kvdisk::record_states(std::as_bytes(std::span{records.data(), records.shape(0)}),
                              first_slot, epoch, states);
    }
    return array_of(std::move(states));
}

bool payload_matches(const Vector<std::uint8_t>& record_bytes,
                     const Vector<std::uint8_t>& payload) {
    kvdisk::SlotRecord record;
    if (record_bytes.shape(0) != sizeof(record)) throw nb::value_error("a record has 128 bytes");
    std::memcpy(&record, record_bytes.data(), sizeof(record));
    const nb::gil_scoped_release release;
    return kvdisk::payload_matches(record,
                                   std::as_bytes(std::span{payload.data(), payload.shape(0)}));
}

kvdisk::Layout layout_of(
    const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>& regions,
    std::uint64_t block_count) {
    kvdisk::Layout layout;
    layout.block_count = block_count;
    for (const auto& [address, stride, segment] : regions) {
        layout.regions.push_back({reinterpret_cast<std::byte*>(address), stride, segment});
        layout.block_bytes += segment;
    }
    return layout;
}

}  // namespace

NB_MODULE(_native, module) {
    // A daemon thread that waits in an engine when the interpreter ends keeps that engine. Nothing
    // is lost, and the user of a serving engine can do nothing about the lines that nanobind would
    // print.
    nb::set_leak_warnings(false);

    module.attr("key_bytes_max") = kvdisk::key_bytes_max;
    module.attr("record_bytes") = sizeof(kvdisk::SlotRecord);
    module.attr("record_page_bytes") = kvdisk::record_page_bytes;

    module.def("record_states", &record_states, "records"_a, "first_slot"_a, "epoch"_a);
    module.def("payload_matches", &payload_matches, "record"_a, "payload"_a);

    nb::class_<kvdisk::EngineOptions>(module, "EngineOptions")
        .def(nb::init<>())
        .def("set_layout",
             [](kvdisk::EngineOptions& options,
                const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>& regions,
                std::uint64_t block_count) { options.layout = layout_of(regions, block_count); })
        .def_rw("device", &kvdisk::EngineOptions::device)
        .def_rw("slot_bytes", &kvdisk::EngineOptions::slot_bytes)
        .def_rw("slot_count", &kvdisk::EngineOptions::slot_count)
        .def_rw("data_fd", &kvdisk::EngineOptions::data_fd)
        .def_rw("record_fd", &kvdisk::EngineOptions::record_fd)
        .def_rw("record_offset", &kvdisk::EngineOptions::record_offset)
        .def_rw("epoch", &kvdisk::EngineOptions::epoch)
        .def_rw("backend", &kvdisk::EngineOptions::backend)
        .def_rw("force_async", &kvdisk::EngineOptions::force_async)
        .def_rw("force_async_reads", &kvdisk::EngineOptions::force_async_reads)
        .def_rw("shards", &kvdisk::EngineOptions::shards)
        .def_rw("iodepth", &kvdisk::EngineOptions::iodepth)
        .def_rw("buffers", &kvdisk::EngineOptions::buffers)
        .def_rw("rows_per_buffer", &kvdisk::EngineOptions::rows_per_buffer)
        .def_rw("load_reserve", &kvdisk::EngineOptions::load_reserve)
        .def_rw("store_depth_beside_loads", &kvdisk::EngineOptions::store_depth_beside_loads)
        .def_rw("alignment", &kvdisk::EngineOptions::alignment)
        .def_rw("store_queue_bytes", &kvdisk::EngineOptions::store_queue_bytes)
        .def_rw("direct_stores", &kvdisk::EngineOptions::direct_stores)
        .def_rw("direct_loads", &kvdisk::EngineOptions::direct_loads);

    using Engine = kvdisk::Engine;
    nb::class_<Engine>(module, "Engine")
        .def(nb::init<const kvdisk::EngineOptions&>(), nb::call_guard<nb::gil_scoped_release>())
        .def(
            "submit",
            [](Engine& engine, int direction, const Vector<std::uint64_t>& block_ids,
               const Vector<std::uint64_t>& slots, const Keys& keys,
               const Vector<std::uint8_t>& key_lengths, std::int64_t timeout_ns,
               std::int64_t start_within_ns, std::uint64_t event) {
                return engine.submit(static_cast<kvdisk::Direction>(direction),
                                     rows_of(block_ids, slots, keys, key_lengths), timeout_ns,
                                     start_within_ns, event);
            },
            "direction"_a, "block_ids"_a, "slots"_a, "keys"_a, "key_lengths"_a, "timeout_ns"_a,
            "start_within_ns"_a, "event"_a)
        .def("cancel_waiting", &Engine::cancel_waiting, "transfer_id"_a)
        .def("end_within", &Engine::end_within, "timeout_ns"_a)
        .def("poll", [](Engine& engine) { return events_tuple(engine.poll()); })
        .def("wait", &Engine::wait, "timeout_ns"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("event_fd", &Engine::event_fd)
        .def(
            "progress",
            [](const Engine& engine, int direction) {
                if (direction != 0 && direction != 1) throw nb::value_error("no such direction");
                nb::list shards;
                for (const kvdisk::Progress& each :
                     engine.progress(static_cast<kvdisk::Direction>(direction))) {
                    shards.append(nb::make_tuple(each.bytes, each.busy_ns, each.busy));
                }
                return shards;
            },
            "direction"_a)
        .def("stats",
             [](Engine& engine) {
                 kvdisk::EngineStats stats;
                 {
                     const nb::gil_scoped_release release;
                     stats = engine.stats();
                 }
                 return stats_dict(stats);
             })
        .def("reset_stats", &Engine::reset_stats)
        .def("take_restored", &restored_tuple)
        .def("lost_record_pages", &Engine::lost_record_pages)
        .def("close", &Engine::close, "timeout_ns"_a, nb::call_guard<nb::gil_scoped_release>());

    using RawJobOptions = kvdisk::io::RawJobOptions;
    nb::class_<RawJobOptions>(module, "RawJobOptions")
        .def(nb::init<>())
        .def_rw("file", &RawJobOptions::file)
        .def_rw("offset", &RawJobOptions::offset)
        .def_rw("size_bytes", &RawJobOptions::size_bytes)
        .def_rw("block_bytes", &RawJobOptions::block_bytes)
        .def_rw("depth", &RawJobOptions::depth)
        .def_rw("read_percent", &RawJobOptions::read_percent)
        .def_rw("random", &RawJobOptions::random)
        .def_rw("sync_after_writes", &RawJobOptions::sync_after_writes)
        .def_rw("seed", &RawJobOptions::seed)
        .def_rw("backend", &RawJobOptions::backend);

    using RawJob = kvdisk::io::RawJob;
    nb::class_<RawJob>(module, "RawJob")
        .def(nb::init<const RawJobOptions&>(), nb::call_guard<nb::gil_scoped_release>())
        .def("fill",
             [](RawJob& job) {
                 const auto result = [&] {
                     const nb::gil_scoped_release release;
                     return job.fill();
                 }();
                 return raw_result_dict(result);
             })
        .def(
            "run",
            [](RawJob& job, std::int64_t duration_ns) {
                const auto result = [&] {
                    const nb::gil_scoped_release release;
                    return job.run(duration_ns);
                }();
                return raw_result_dict(result);
            },
            "duration_ns"_a)
        .def("verify",
             [](RawJob& job) {
                 const auto verdict = [&] {
                     const nb::gil_scoped_release release;
                     return job.verify();
                 }();
                 return nb::make_tuple(verdict.blocks_checked, verdict.blocks_wrong,
                                       verdict.first_wrong_offset, verdict.error);
             })
        .def("forget", &RawJob::forget)
        .def("stop", &RawJob::stop)
        .def_prop_ro("progress_bytes", &RawJob::progress_bytes)
        .def_prop_ro("buffer_bytes", &RawJob::buffer_bytes)
        .def_prop_ro("backend", &RawJob::backend_name)
        .def_prop_ro("backend_reason", &RawJob::backend_reason)
        .def("backend_stats", [](RawJob& job) {
            const kvdisk::io::BackendStats stats = job.stats();
            nb::dict result;
            result["submit_calls"] = stats.submit_calls;
            result["areas_registered"] = stats.areas_registered;
            result["files_registered"] = stats.files_registered;
            result["note"] = stats.note;
            return result;
        });

    using CopyJobOptions = kvdisk::CopyJobOptions;
    nb::class_<CopyJobOptions>(module, "CopyJobOptions")
        .def(nb::init<>())
        .def("set_layout",
             [](CopyJobOptions& options,
                const std::vector<std::tuple<std::uint64_t, std::uint64_t, std::uint64_t>>& regions,
                std::uint64_t block_count) { options.layout = layout_of(regions, block_count); })
        .def_rw("device", &CopyJobOptions::device)
        .def_rw("buffers", &CopyJobOptions::buffers)
        .def_rw("kernel_below_bytes", &CopyJobOptions::kernel_below_bytes)
        .def_rw("kernel_ctas_max", &CopyJobOptions::kernel_ctas_max)
        .def_rw("batched", &CopyJobOptions::batched);

    using CopyJob = kvdisk::CopyJob;
    nb::class_<CopyJob>(module, "CopyJob")
        .def(nb::init<const CopyJobOptions&>())
        .def(
            "run",
            [](CopyJob& job, bool gathers, bool scatters, std::int64_t duration_ns) {
                const auto done = [&] {
                    const nb::gil_scoped_release release;
                    return job.run(gathers, scatters, duration_ns);
                }();
                nb::dict result;
                result["bytes"] = done.bytes;
                result["copies"] = done.copies;
                result["errors"] = done.errors;
                result["elapsed_ns"] = done.elapsed_ns;
                result["thread_cpu_ns"] = done.thread_cpu_ns;
                return result;
            },
            "gathers"_a, "scatters"_a, "duration_ns"_a)
        .def_prop_ro("note", &CopyJob::note);
}

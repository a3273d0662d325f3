// The simulated disk as a Backend: requests, virtual time, completions, crashes. What a fault does
// to a request is in sim_faults.cpp.
#include "io/sim.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "io/require.hpp"

namespace kvdisk::io {

namespace {

constexpr std::int64_t thaw_spread_ns = 2'000'000;    // late completions come within this
constexpr std::int64_t stray_spread_ns = 50'000'000;  // strays come within this
constexpr double stray_repeats_result = 0.5;          // that a stray says what a success would

// Makes the heap of events put the earliest first.
constexpr auto later = [](const auto& left, const auto& right) {
    return left.at_ns != right.at_ns ? left.at_ns > right.at_ns : left.order > right.order;
};

}  // namespace

SimDisk::SimDisk(const SimDiskOptions& options)
    : depth_(options.depth),
      alignment_bytes_(options.alignment_bytes),
      areas_(options.areas),
      service_(options.service),
      random_(options.seed),
      flights_(options.depth),
      ids_(options.depth),
      now_ns_(options.start_ns) {
    require(depth_ >= 1 && depth_ <= 4096, "a depth of 1..4096");
    require(alignment_bytes_ >= 1, "an alignment of at least one byte");
    files_.reserve(options.file_bytes.size());
    for (const std::uint64_t bytes : options.file_bytes) {
        files_.emplace_back(bytes, options.journal_bytes);
    }
    free_flights_.reserve(depth_);
    pushed_.reserve(depth_);
    events_.reserve(3 * std::size_t{depth_});
    done_.reserve(2 * std::size_t{depth_});
    for (std::uint32_t index = depth_; index-- > 0;) free_flights_.push_back(index);
    stats_.files_registered = true;
    stats_.areas_registered = !areas_.empty();
    set_faults(options.faults);
}

void SimDisk::attach() {
    require(!attached_, "attached once (or again after a crash)");
    attached_ = true;
}

BackendStats SimDisk::stats() const { return stats_; }

void SimDisk::set_areas(std::vector<std::span<std::byte>> areas) {
    require(in_flight_ == 0, "areas change only while nothing is in flight");
    areas_ = std::move(areas);
    stats_.areas_registered = !areas_.empty();
}

// ---------------------------------------------------------------- taking requests

void SimDisk::push(const Request& request) {
    require(attached_ && !abandoned_, "a push follows attach, and no abandon");
    require(in_flight_ < depth_, "no more in flight than the depth");
    require(request.id != 0 && !id_in_flight(request.id), "an id that is unique and not 0");
    require(request.length > 0 && request.data != nullptr, "a buffer of at least one byte");
    require(request.file < files_.size(), "a file that exists");
    if (request.area != area_none) {
        require(request.area < areas_.size(), "an area that exists");
        const std::span<std::byte> area = areas_[request.area];
        require(request.data >= area.data() &&
                    request.data + request.length <= area.data() + area.size(),
                "a buffer inside its area");
    }
    const std::uint32_t index = free_flights_.back();
    free_flights_.pop_back();
    flights_[index] = Flight{.request = request, .state = State::pushed, .use = ++use_last_};
    ids_[index] = request.id;
    pushed_.push_back(index);
    ++in_flight_;
    trace(request.id);
    trace(request.offset);
    trace(std::uint64_t{request.length} << 32 | std::uint64_t{request.file} << 8 |
          static_cast<std::uint64_t>(request.op));
}

bool SimDisk::id_in_flight(std::uint64_t id) const noexcept {
    return id != 0 && std::find(ids_.begin(), ids_.end(), id) != ids_.end();
}

void SimDisk::submit() {
    require(attached_, "a submit follows attach");
    if (pushed_.empty()) return;
    advance(service_.call_ns);
    for (const std::uint32_t index : pushed_) start(index);
    stats_.submitted += pushed_.size();
    ++stats_.submit_calls;
    pushed_.clear();
}

void SimDisk::start(std::uint32_t index) {
    Flight& flight = flights_[index];
    decide(flight);
    const std::int64_t done_ns = service_ns(flight.request.length);
    if (flight.fault == SimFault::hang) {
        flight.state = State::hung;
        // Some hung writes have taken their bytes long before they complete.
        if (!frozen_ && random_.chance(0.5)) {
            schedule(random_.between(now_ns_, done_ns), Kind::take, index, flight.use);
        }
        return;
    }
    flight.state = State::running;
    schedule_flight(index,
                    flight.fault != SimFault::late
                        ? done_ns
                        : done_ns + random_.between(faults_.late_ns_min, faults_.late_ns_max));
}

// When a request that begins now is done: its turn at the bandwidth, then a latency of its own.
std::int64_t SimDisk::service_ns(std::uint64_t bytes) {
    const std::uint64_t transfer_ns = bytes * 1'000'000'000 / service_.bytes_per_second;
    channel_free_ns_ = std::max(channel_free_ns_, now_ns_) + static_cast<std::int64_t>(transfer_ns);
    std::int64_t latency_ns = service_.base_ns + random_.between(0, service_.jitter_ns);
    if (random_.chance(service_.tail_chance)) {
        do {
            latency_ns *= 2;
        } while (latency_ns < service_.tail_ns_max && (random_.next() & 1) != 0);
    }
    return channel_free_ns_ + std::min(latency_ns, std::max(service_.tail_ns_max,
                                                            service_.base_ns + service_.jitter_ns));
}

// ---------------------------------------------------------------- time

void SimDisk::schedule(std::int64_t at_ns, Kind kind, std::uint32_t flight, std::uint64_t use) {
    events_.push_back(
        {.at_ns = at_ns, .order = ++order_last_, .use = use, .flight = flight, .kind = kind});
    std::push_heap(events_.begin(), events_.end(), later);
}

void SimDisk::schedule_flight(std::uint32_t index, std::int64_t done_ns) {
    Flight& flight = flights_[index];
    if (flight.request.op == Op::write && !flight.taken) {
        schedule(random_.between(now_ns_, done_ns), Kind::take, index, flight.use);
    }
    schedule(done_ns, Kind::complete, index, flight.use);
}

void SimDisk::schedule_stray(std::uint64_t id) {
    if (strays_ >= depth_) return;  // keeps the memory fixed
    ++strays_;
    schedule(now_ns_ + random_.between(1, stray_spread_ns), Kind::stray, 0, id);
}

void SimDisk::advance_to(std::int64_t time_ns) {
    while (!events_.empty() && events_[0].at_ns <= time_ns) {
        std::pop_heap(events_.begin(), events_.end(), later);
        const Event event = events_.back();
        events_.pop_back();
        now_ns_ = std::max(now_ns_, event.at_ns);
        happen(event);
    }
    now_ns_ = std::max(now_ns_, time_ns);
}

void SimDisk::happen(const Event& event) {
    if (event.kind == Kind::stray) {
        // The id may be in flight again only if the caller broke its promise of unique ids.
        if (abandoned_ || id_in_flight(event.use)) {
            --strays_;
            return;
        }
        const std::int64_t result = random_.chance(stray_repeats_result)
                                        ? 4096
                                        : -static_cast<std::int64_t>(random_.below(32));
        done_.push_back({.completion = {.id = event.use, .result = result}, .stray = true});
        trace(event.use);
        return;
    }
    Flight& flight = flights_[event.flight];
    if (flight.state == State::free || flight.use != event.use) return;
    trace(static_cast<std::uint64_t>(event.at_ns));
    if (event.kind == Kind::take) {
        take(flight);
    } else {
        complete(event.flight);
    }
}

void SimDisk::complete(std::uint32_t index) {
    Flight& flight = flights_[index];
    if (flight.request.op == Op::read) {
        deliver(flight);
    } else {
        require(flight.taken, "a write that is done has taken its bytes");
    }
    trace(flight.request.id);
    trace(static_cast<std::uint64_t>(flight.result));
    if (!abandoned_) {
        done_.push_back({.completion = {.id = flight.request.id, .result = flight.result},
                         .duplicate = flight.fault == SimFault::duplicate});
        if (flight.fault == SimFault::unknown) schedule_stray(unknown_id());
    }
    past_ids_[past_next_++ % past_ids_.size()] = flight.request.id;
    release(index);
}

void SimDisk::release(std::uint32_t index) noexcept {
    flights_[index].state = State::free;
    ids_[index] = 0;
    free_flights_.push_back(index);
}

// Of the past, of nobody, or one that differs from a likely one by a high bit.
std::uint64_t SimDisk::unknown_id() {
    const std::uint64_t past = past_ids_[random_.below(past_ids_.size())];
    switch (random_.below(4)) {
        case 0:
            return random_.next() | std::uint64_t{1} << 63;
        case 1:
            return past | std::uint64_t{1} << 63;
        default:
            return past;  // may be 0
    }
}

std::size_t SimDisk::reap(std::span<Completion> completions) {
    require(attached_, "a reap follows attach");
    advance(service_.call_ns);
    const std::size_t count = std::min(completions.size(), done_.size());
    if (count > 0 && random_.chance(faults_.reorder)) {
        for (std::size_t left = done_.size(); left > 1; --left) {
            std::swap(done_[left - 1], done_[random_.below(left)]);
        }
    }
    for (std::size_t i = 0; i < count; ++i) {
        const Done& done = done_[i];
        completions[i] = done.completion;
        if (done.stray) {
            --strays_;
            continue;
        }
        --in_flight_;
        ++stats_.completed;
        if (done.duplicate) schedule_stray(done.completion.id);
    }
    done_.erase(done_.begin(), done_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
}

void SimDisk::wait(std::int64_t until_ns) {
    require(attached_, "a wait follows attach");
    if (woken_.exchange(false, std::memory_order_acq_rel) || !done_.empty()) return;
    if (random_.chance(faults_.early_wait_end)) return;
    std::int64_t stop_ns = until_ns < 0 ? never : until_ns;
    if (neighbour_next_ns_) stop_ns = std::min(stop_ns, neighbour_next_ns_());
    while (next_event_ns() <= stop_ns) {
        if (events_.empty()) {
            ++endless_waits_;
            return;
        }
        advance_to(events_[0].at_ns);
        if (!done_.empty()) return;
    }
    advance_to(stop_ns);
}

// ---------------------------------------------------------------- freezing and crashing

void SimDisk::freeze() noexcept {
    frozen_ = true;
    std::erase_if(events_, [](const Event& event) { return event.kind != Kind::stray; });
    std::make_heap(events_.begin(), events_.end(), later);
    for (Flight& flight : flights_) {
        if (flight.state != State::running) continue;
        flight.state = State::hung;
        strike(SimFault::hang);
    }
}

void SimDisk::thaw() {
    frozen_ = false;
    for (std::uint32_t index = 0; index < depth_; ++index) {
        Flight& flight = flights_[index];
        if (flight.state != State::hung) continue;
        flight.state = State::running;
        flight.use = ++use_last_;  // an earlier take is void
        schedule_flight(index, now_ns_ + random_.between(1, thaw_spread_ns));
    }
}

void SimDisk::heal() {
    set_faults({});
    clear_plans();
    thaw();
}

std::uint32_t SimDisk::hung() const noexcept {
    return static_cast<std::uint32_t>(
        std::count_if(flights_.begin(), flights_.end(),
                      [](const Flight& flight) { return flight.state == State::hung; }));
}

void SimDisk::crash(const SimCrash& crash) {
    for (Flight& flight : flights_) {
        const bool writing = flight.state == State::running || flight.state == State::hung;
        if (writing && flight.request.op == Op::write && !flight.taken &&
            random_.chance(crash.torn_in_flight)) {
            const Request& request = flight.request;
            SimFile& target = files_[request.file];
            write_torn(target, request.offset,
                       {request.data, target.clip(request.offset, request.length)});
        }
        flight.state = State::free;
    }
    for (SimFile& crashed : files_) crashed.crash(random_, crash.lost, crash.torn);
    free_flights_.clear();
    for (std::uint32_t index = depth_; index-- > 0;) free_flights_.push_back(index);
    std::fill(ids_.begin(), ids_.end(), 0);
    past_ids_.fill(0);
    resumptions_.fill({});
    pushed_.clear();
    events_.clear();
    done_.clear();
    in_flight_ = 0;
    strays_ = 0;
    attached_ = abandoned_ = frozen_ = false;
    woken_.store(false, std::memory_order_release);
    channel_free_ns_ = now_ns_;
    trace(static_cast<std::uint64_t>(now_ns_));
}

}  // namespace kvdisk::io

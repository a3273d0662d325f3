#include "pipeline/outbox.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace kvdisk {

namespace {

// How long after its deadline a transfer is overdue, and how often somebody stands in then.
constexpr std::int64_t overdue_slack_ns = 100'000'000;

}  // namespace

Outbox::Outbox() : event_fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (event_fd < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
}

Outbox::~Outbox() { ::close(event_fd); }

bool Outbox::empty() const noexcept {
    return events.source_free.empty() && events.finished.empty() && events.released_slots.empty();
}

void Outbox::tell() {
    if (!told) {
        const std::uint64_t one = 1;
        [[maybe_unused]] const auto written = ::write(event_fd, &one, sizeof(one));
        told = true;
    }
    ready.notify_all();
}

void Outbox::open(std::uint64_t id, Job job) {
    if (job.deadline_ns < time_never - overdue_slack_ns) {
        overdue_ns = std::min(overdue_ns, job.deadline_ns + overdue_slack_ns);
        ready.notify_all();  // whoever waits may have to wait less long
    }
    jobs.emplace(id, std::move(job));
    id_last_ = id;
}

void Outbox::finish(std::uint64_t id) {
    const auto found = jobs.find(id);
    events.finished.push_back({id, found->second.direction, std::move(found->second.results)});
    jobs.erase(found);
    tell_released();
}

void Outbox::release(std::span<const std::uint64_t> slots) {
    for (const std::uint64_t slot : slots) held_.push_back({slot, id_last_});
    tell_released();
}

void Outbox::tell_released() {
    if (held_.empty()) return;
    std::uint64_t oldest = UINT64_MAX;
    for (const auto& [id, job] : jobs) oldest = std::min(oldest, id);
    for (; !held_.empty() && held_.front().after_id < oldest; held_.pop_front()) {
        events.released_slots.push_back(held_.front().slot);
    }
}

void Outbox::end_by(std::int64_t time_ns) {
    for (auto& [id, job] : jobs) job.deadline_ns = std::min(job.deadline_ns, time_ns);
    overdue_ns = std::min(overdue_ns, time_ns + overdue_slack_ns);
    ready.notify_all();
}

bool Outbox::overdue(std::int64_t now_ns) {
    if (now_ns < overdue_ns) return false;
    std::int64_t earliest_ns = time_never;
    for (const auto& [id, job] : jobs) earliest_ns = std::min(earliest_ns, job.deadline_ns);
    if (earliest_ns >= time_never - overdue_slack_ns) {
        overdue_ns = time_never;
        return false;
    }
    // One that stays open (a copy or a direct load that cannot be stopped) is looked at again.
    overdue_ns = std::max(earliest_ns, now_ns) + overdue_slack_ns;
    return earliest_ns + overdue_slack_ns <= now_ns;
}

}  // namespace kvdisk

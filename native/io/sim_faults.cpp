// What befalls a request at the simulated disk, and what that does to bytes.
#include "io/sim_faults.hpp"

#include <algorithm>
#include <cerrno>

#include "io/require.hpp"
#include "io/sim.hpp"

namespace kvdisk::io {

namespace {

constexpr std::uint64_t rubbish_bytes = 16;  // enough to spoil whoever trusts them

bool for_writes(SimFault fault) noexcept {
    return fault != SimFault::misdirect_read && fault != SimFault::flip_on_read;
}

bool for_reads(SimFault fault) noexcept {
    return fault != SimFault::enospc && fault != SimFault::torn_write &&
           fault != SimFault::lost_write && fault != SimFault::misdirect_write;
}

bool suits(SimFault fault, Op op) noexcept {
    return op == Op::read ? for_reads(fault) : for_writes(fault);
}

std::int64_t errno_of(SimFault fault) noexcept {
    switch (fault) {
        case SimFault::eio:
            return EIO;
        case SimFault::enospc:
            return ENOSPC;
        case SimFault::eagain:
            return EAGAIN;
        case SimFault::eintr:
            return EINTR;
        case SimFault::enomem:
            return ENOMEM;
        default:
            return 0;
    }
}

}  // namespace

const char* sim_fault_name(SimFault fault) noexcept {
    static constexpr const char* names[sim_fault_count] = {
        "none",           "short_io",     "eio",          "enospc",
        "eagain",         "eintr",        "enomem",       "hang",
        "late",           "torn_write",   "lost_write",   "misdirect_write",
        "misdirect_read", "flip_on_read", "flip_at_rest", "duplicate",
        "unknown"};
    return names[static_cast<std::size_t>(fault)];
}

SimFaults SimFaults::all(double scale) {
    SimFaults faults;
    faults.short_io = 0.02 * scale;
    faults.short_again = 0.5;
    faults.short_unaligned = 0.2;
    faults.eio = faults.enospc = 0.003 * scale;
    faults.eagain = faults.eintr = faults.enomem = 0.003 * scale;
    faults.hang = 0.0005 * scale;
    faults.late = 0.001 * scale;
    faults.torn_write = faults.lost_write = 0.002 * scale;
    faults.misdirect_write = faults.misdirect_read = 0.002 * scale;
    faults.flip_on_read = faults.flip_at_rest = 0.002 * scale;
    faults.duplicate = faults.unknown = 0.005 * scale;
    faults.reorder = 0.5;
    faults.early_wait_end = 0.02;
    return faults;
}

void SimDisk::set_faults(const SimFaults& faults) {
    faults_ = faults;
    const std::pair<SimFault, double> chances[] = {
        {SimFault::short_io, faults.short_io},
        {SimFault::eio, faults.eio},
        {SimFault::enospc, faults.enospc},
        {SimFault::eagain, faults.eagain},
        {SimFault::eintr, faults.eintr},
        {SimFault::enomem, faults.enomem},
        {SimFault::hang, faults.hang},
        {SimFault::late, faults.late},
        {SimFault::torn_write, faults.torn_write},
        {SimFault::lost_write, faults.lost_write},
        {SimFault::misdirect_write, faults.misdirect_write},
        {SimFault::misdirect_read, faults.misdirect_read},
        {SimFault::flip_on_read, faults.flip_on_read},
        {SimFault::flip_at_rest, faults.flip_at_rest},
        {SimFault::duplicate, faults.duplicate},
        {SimFault::unknown, faults.unknown},
    };
    for (const Op op : {Op::read, Op::write}) {
        std::vector<Threshold>& thresholds = thresholds_[static_cast<std::size_t>(op)];
        thresholds.clear();
        double sum = 0;
        for (const auto& [fault, chance] : chances) {
            if (chance <= 0 || !suits(fault, op)) continue;
            sum += chance;
            thresholds.push_back({sum, fault});
        }
        require(sum <= 1.0, "the chances of all faults add up to at most 1");
    }
}

void SimDisk::plan(Op op, std::uint16_t file, std::uint64_t n, SimFault fault, bool persistent) {
    require(n > 0 && suits(fault, op), "the 1st or a later request, and a fault that suits it");
    plans_.push_back({op, file, persistent, fault, 0, n});
}

void SimDisk::fail_nth(Op op, std::uint16_t file, std::uint64_t n, std::int64_t result,
                       bool persistent) {
    require(n > 0, "the 1st or a later request");
    plans_.push_back({op, file, persistent, SimFault::none, result, n});
}

// ---------------------------------------------------------------- deciding

void SimDisk::decide(Flight& flight) {
    const Request& request = flight.request;
    flight.moved_bytes = files_[request.file].clip(request.offset, request.length);
    flight.result = static_cast<std::int64_t>(flight.moved_bytes);
    if (flight.moved_bytes == 0 && request.op == Op::write) flight.result = -ENOSPC;
    const auto address = reinterpret_cast<std::uintptr_t>(request.data);
    if ((address | request.offset | request.length) % alignment_bytes_ != 0) {
        flight.result = -EINVAL;
        flight.moved_bytes = 0;
    }
    if (decide_planned(flight)) return;
    if (frozen_) {
        meet(flight, SimFault::hang);
    } else if (flight.moved_bytes > 0) {
        meet(flight, draw(flight));
    }
}

SimFault SimDisk::draw(Flight& flight) {
    const Request& request = flight.request;
    if (request.file >= 64 || (faults_.files >> request.file & 1) == 0) return SimFault::none;
    if (faults_.short_again > 0) {
        Resumption& place = resumption_place(request);
        const Resumption wanted = resumption_at(request, request.offset);
        if (place.end == wanted.end && place.offset == wanted.offset &&
            place.file_and_op == wanted.file_and_op) {
            place = {};
            if (random_.chance(faults_.short_again)) return SimFault::short_io;
        }
    }
    const std::vector<Threshold>& thresholds = thresholds_[static_cast<std::size_t>(request.op)];
    if (thresholds.empty()) return SimFault::none;
    const double drawn = random_.fraction();
    if (drawn >= thresholds.back().below) return SimFault::none;
    return std::upper_bound(
               thresholds.begin(), thresholds.end(), drawn,
               [](double value, const Threshold& threshold) { return value < threshold.below; })
        ->fault;
}

bool SimDisk::decide_planned(Flight& flight) {
    const Plan* struck = nullptr;
    for (Plan& plan : plans_) {
        if (plan.op != flight.request.op || plan.file != flight.request.file) continue;
        if (plan.remaining > 0) --plan.remaining;
        if (plan.remaining == 0 && struck == nullptr) struck = &plan;
    }
    if (struck == nullptr) return false;
    const Plan plan = *struck;
    if (!plan.persistent) plans_.erase(plans_.begin() + (struck - plans_.data()));
    if (plan.fault != SimFault::none) {
        meet(flight, plan.fault);
    } else if (plan.result < 0) {
        flight.result = plan.result;
        flight.moved_bytes = 0;
    } else {
        come_short(flight, std::min(flight.moved_bytes, static_cast<std::uint64_t>(plan.result)));
    }
    return true;
}

void SimDisk::meet(Flight& flight, SimFault fault) {
    flight.fault = fault;
    if (fault == SimFault::none) return;
    strike(fault);
    if (fault == SimFault::short_io) {
        come_short(flight, short_count(flight.moved_bytes));
    } else if (const std::int64_t error = errno_of(fault); error != 0) {
        flight.result = -error;
    }
}

void SimDisk::come_short(Flight& flight, std::uint64_t moved_bytes) {
    flight.moved_bytes = moved_bytes;
    flight.result = static_cast<std::int64_t>(moved_bytes);
    const std::uint64_t aligned_bytes = moved_bytes - moved_bytes % alignment_bytes_;
    resumption_place(flight.request) =
        resumption_at(flight.request, flight.request.offset + aligned_bytes);
}

std::uint64_t SimDisk::short_count(std::uint64_t length) {
    const std::uint64_t sectors = (length + sim_sector_bytes - 1) / sim_sector_bytes;
    std::uint64_t moved = 0;
    switch (random_.below(5)) {
        case 0:
            moved = sectors - 1;  // all but the last
            break;
        case 1:
            moved = std::min<std::uint64_t>(1, sectors - 1);
            break;
        case 2:
            moved = sectors / 2;
            break;
        case 3:
            moved = random_.below(sectors);
            break;
        default:
            break;  // nothing at all
    }
    const std::uint64_t moved_bytes = moved * sim_sector_bytes;
    if (!random_.chance(faults_.short_unaligned)) return moved_bytes;
    return moved_bytes + random_.below(std::min(sim_sector_bytes, length - moved_bytes));
}

SimDisk::Resumption SimDisk::resumption_at(const Request& request,
                                           std::uint64_t offset) const noexcept {
    return {
        .offset = offset,
        .end = request.offset + request.length,
        .file_and_op = std::uint32_t{request.file} << 1 | static_cast<std::uint32_t>(request.op)};
}

SimDisk::Resumption& SimDisk::resumption_place(const Request& request) noexcept {
    const std::uint64_t end = request.offset + request.length;
    const std::uint64_t mixed = (end << 8 | request.file) * 0x9E3779B97F4A7C15ULL;
    return resumptions_[mixed >> 56];
}

// ---------------------------------------------------------------- what it does to bytes

// Another place of the file, at a sector, that holds `length` bytes: often a neighbour's.
std::uint64_t SimDisk::elsewhere(const SimFile& file, const Request& request,
                                 std::uint64_t length) {
    if (file.size_bytes() < length + sim_sector_bytes) return request.offset;
    if ((random_.next() & 1) != 0) {
        const std::uint64_t after = request.offset + length;
        if (file.clip(after, length) == length) return after;
    }
    const std::uint64_t places = (file.size_bytes() - length) / sim_sector_bytes + 1;
    const std::uint64_t offset = random_.below(places) * sim_sector_bytes;
    if (offset != request.offset) return offset;
    return offset >= sim_sector_bytes ? offset - sim_sector_bytes : offset + sim_sector_bytes;
}

// Each sector makes it or not, but never all and never none when there are two.
void SimDisk::write_torn(SimFile& file, std::uint64_t offset, std::span<const std::byte> bytes) {
    const std::uint64_t sectors = (bytes.size() + sim_sector_bytes - 1) / sim_sector_bytes;
    if (sectors == 0) return;
    const std::uint64_t missing = random_.below(sectors);
    const std::uint64_t written = (missing + 1) % sectors;
    for (std::uint64_t sector = 0; sector < sectors; ++sector) {
        if (sector == missing || (sector != written && (random_.next() & 1) != 0)) continue;
        const std::uint64_t at = sector * sim_sector_bytes;
        file.write_unsynced(
            offset + at,
            bytes.subspan(at, std::min<std::uint64_t>(sim_sector_bytes, bytes.size() - at)));
    }
}

// A write takes its bytes from the buffer, whatever lies there now.
void SimDisk::take(Flight& flight) {
    const Request& request = flight.request;
    if (request.op == Op::read) return;
    flight.taken = true;
    SimFile& file = files_[request.file];
    const std::span<const std::byte> bytes{request.data, flight.moved_bytes};
    if (bytes.empty()) return;
    switch (flight.fault) {
        case SimFault::lost_write:
        case SimFault::eagain:
        case SimFault::eintr:
        case SimFault::enomem:
            return;
        case SimFault::torn_write:
            write_torn(file, request.offset, bytes);
            return;
        case SimFault::eio:
        case SimFault::enospc:
            // A failed write says nothing about what has reached the disk.
            switch (random_.below(3)) {
                case 0:
                    return;
                case 1:
                    write_torn(file, request.offset, bytes);
                    return;
                default:
                    break;
            }
            break;
        case SimFault::misdirect_write:
            file.write_unsynced(elsewhere(file, request, bytes.size()), bytes);
            return;
        default:
            break;
    }
    file.write_unsynced(request.offset, bytes);
    if (flight.fault == SimFault::flip_at_rest) {
        file.flip_bit(random_offset(request, bytes.size()),
                      static_cast<unsigned>(random_.below(8)));
    }
}

// A read puts its bytes into the buffer, whoever owns it now.
void SimDisk::deliver(Flight& flight) {
    const Request& request = flight.request;
    SimFile& file = files_[request.file];
    std::uint64_t delivered_bytes = flight.moved_bytes;
    switch (flight.fault) {
        case SimFault::eagain:
        case SimFault::eintr:
        case SimFault::enomem:
            return;
        case SimFault::eio:
            delivered_bytes = 0;
            break;
        case SimFault::flip_at_rest:
            if (delivered_bytes == 0) return;
            file.flip_bit(random_offset(request, delivered_bytes),
                          static_cast<unsigned>(random_.below(8)));
            break;
        default:
            break;
    }
    const std::span<std::byte> buffer{request.data, request.length};
    const std::uint64_t offset = flight.fault == SimFault::misdirect_read
                                     ? elsewhere(file, request, delivered_bytes)
                                     : request.offset;
    file.read(offset, buffer.first(delivered_bytes));
    if (flight.fault == SimFault::flip_on_read && delivered_bytes > 0) {
        buffer[random_.below(delivered_bytes)] ^= std::byte{1} << random_.below(8);
    }
    const bool rubbish = flight.fault == SimFault::eio || flight.fault == SimFault::short_io;
    if (!rubbish) return;
    for (std::byte& byte : buffer.subspan(
             delivered_bytes, std::min(rubbish_bytes, buffer.size() - delivered_bytes))) {
        byte = static_cast<std::byte>(random_.next());
    }
}

}  // namespace kvdisk::io

// The subjects of the backend contract, and the random soak that all of them must pass. (Named like
// a test so that the build finds it.)
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "backend_contract.hpp"
#include "io/sim.hpp"
#include "io/uring.hpp"

namespace kvdisk::test {
namespace {

constexpr std::int64_t patience_ns = 10'000'000'000;

class RealSubject final : public Subject {
  public:
    RealSubject(const RealBackend& real, const SubjectOptions& options) {
        io::BackendOptions backend_options{.areas = options.areas, .depth = options.depth};
        for (const std::uint64_t bytes : options.file_bytes) {
            files_.push_back(std::make_unique<TemporaryFile>(bytes, options.direct ? O_DIRECT : 0));
            backend_options.files.push_back(files_.back()->descriptor());
        }
        backend_ = real.make(backend_options);
        backend_->attach();
    }
    io::Backend& backend() override { return *backend_; }
    std::int64_t now_ns() const override { return real_now_ns(); }

  private:
    std::vector<std::unique_ptr<TemporaryFile>> files_;
    std::unique_ptr<io::Backend> backend_;
};

class SimSubject final : public Subject {
  public:
    explicit SimSubject(const SubjectOptions& options)
        : disk_(
              {.file_bytes = options.file_bytes, .depth = options.depth, .areas = options.areas}) {
        disk_.attach();
    }
    io::Backend& backend() override { return disk_; }
    std::int64_t now_ns() const override { return disk_.now_ns(); }

  private:
    io::SimDisk disk_;
};

RealBackend uring_case(const char* name, io::UringTuning tuning, bool force_async = false,
                       bool force_async_reads = false) {
    return {name, [=](const io::BackendOptions& options) {
                io::BackendOptions changed = options;
                changed.force_async = force_async;
                changed.force_async_reads = force_async_reads;
                return io::make_uring_tuned(changed, tuning);
            }};
}

}  // namespace

const std::vector<RealBackend>& real_backends() {
    static const std::vector<RealBackend> backends = {
        uring_case("uring", {}),
        uring_case("uring, cooperative", {.task_run = io::TaskRun::cooperative}),
        uring_case("uring, immediate", {.task_run = io::TaskRun::immediate}),
        uring_case("uring, forced async", {}, true),
        uring_case("uring, forced reads", {}, false, true),
        uring_case("uring, tiny queues", {.submission_entries = 2, .completion_entries = 2}),
        {"threads", io::make_threads},
    };
    return backends;
}

ContractCase contract_case(const RealBackend& real) {
    return {real.name, true, [real](const SubjectOptions& options) {
                return std::make_unique<RealSubject>(real, options);
            }};
}

const std::vector<ContractCase>& contract_cases() {
    static const std::vector<ContractCase> cases = [] {
        std::vector<ContractCase> all;
        for (const RealBackend& real : real_backends()) all.push_back(contract_case(real));
        all.push_back({"sim", false, [](const SubjectOptions& options) {
                           return std::make_unique<SimSubject>(options);
                       }});
        return all;
    }();
    return cases;
}

std::int64_t real_now_ns() {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::vector<io::Completion> collect(io::Backend& backend, std::size_t count,
                                    const std::function<std::int64_t()>& now_ns) {
    std::vector<io::Completion> all;
    const std::int64_t give_up_ns = now_ns() + patience_ns;
    backend.submit();
    while (all.size() < count && now_ns() < give_up_ns) {
        backend.wait(give_up_ns);
        io::Completion some[7];  // an odd number, so that a reap often leaves something behind
        const std::size_t reaped = backend.reap(some);
        all.insert(all.end(), some, some + reaped);
        backend.submit();
    }
    return all;
}

std::vector<io::Completion> collect(Subject& subject, std::size_t count) {
    return collect(subject.backend(), count, [&] { return subject.now_ns(); });
}

std::vector<io::Completion> collect(io::Backend& backend, std::size_t count) {
    return collect(backend, count, real_now_ns);
}

std::int64_t perform(io::Backend& backend, const io::Request& request) {
    backend.push(request);
    const auto completions = collect(backend, 1);
    return completions.size() == 1 && completions[0].id == request.id ? completions[0].result
                                                                      : -ETIMEDOUT;
}

TemporaryFile::TemporaryFile(std::uint64_t bytes, int open_flags) {
    const char* const wanted = std::getenv("KVDISK_TEST_DIR");
    const std::filesystem::path directory =
        wanted != nullptr ? std::filesystem::path(wanted) : std::filesystem::temp_directory_path();
    std::string path = directory / "kvdisk-test-XXXXXX";
    const int made = ::mkstemp(path.data());
    if (made < 0) throw std::system_error(errno, std::system_category(), path);
    descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC | open_flags);
    if (descriptor_ < 0 && errno == EINVAL) descriptor_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    ::unlink(path.c_str());
    ::close(made);
    if (descriptor_ < 0 || ::ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
        throw std::system_error(errno, std::system_category(), path);
    }
}

TemporaryFile::~TemporaryFile() { ::close(descriptor_); }

// ---------------------------------------------------------------- the soak

namespace {

constexpr std::uint32_t block_bytes = 4096;
constexpr std::uint32_t blocks_per_request_max = 16;
constexpr std::uint32_t file_blocks = 1024;

class Soak {
  public:
    Soak(const ContractCase& contract_case, const SoakOptions& options)
        : options_(options),
          random_(options.seed),
          memory_(std::size_t{options.depth} * blocks_per_request_max * block_bytes),
          versions_(file_blocks),
          busy_(file_blocks),
          flights_(options.depth) {
        SubjectOptions subject_options{.file_bytes = {std::uint64_t{file_blocks} * block_bytes},
                                       .depth = options.depth,
                                       .direct = options.direct};
        if (options.areas) subject_options.areas = {memory_.span()};
        subject_ = contract_case.make(subject_options);
    }

    SoakResult run() {
        const std::int64_t give_up_ns = subject_->now_ns() + 12 * patience_ns;
        while (result_.completed < options_.operations && subject_->now_ns() < give_up_ns) {
            const std::uint32_t depth_now = 1 + below(options_.depth);
            while (begun_ < options_.operations && backend().in_flight() < depth_now) {
                if (!start_one()) break;
            }
            backend().submit();
            backend().wait(give_up_ns);
            io::Completion some[16];
            const std::size_t reaped = backend().reap(some);
            for (std::size_t i = 0; i < reaped; ++i) end_one(some[i]);
        }
        return result_;
    }

    io::Backend& backend() { return subject_->backend(); }

  private:
    struct Flight {
        io::Request request;
        std::uint32_t first_block = 0;
        std::uint32_t blocks = 0;
        bool busy = false;
    };

    std::uint32_t below(std::uint32_t limit) {
        return static_cast<std::uint32_t>(random_() % limit);
    }

    static std::uint64_t word(std::uint64_t block, std::uint64_t version, std::uint64_t at) {
        if (version == 0) return 0;  // never written
        return (block * 0x9E3779B97F4A7C15ULL) ^ (version * 0xC2B2AE3D27D4EB4FULL) ^ at;
    }

    std::uint64_t* words(const Flight& flight, std::uint32_t block) const {
        return reinterpret_cast<std::uint64_t*>(flight.request.data +
                                                std::size_t{block} * block_bytes);
    }

    bool start_one() {
        std::uint32_t index = 0;
        while (flights_[index].busy) ++index;
        Flight& flight = flights_[index];
        flight.blocks = 1 + below(blocks_per_request_max);
        flight.first_block = below(file_blocks - flight.blocks + 1);
        for (std::uint32_t i = 0; i < flight.blocks; ++i) {
            if (busy_[flight.first_block + i] != 0) return false;
        }
        std::fill_n(busy_.begin() + flight.first_block, flight.blocks, std::uint8_t{1});
        flight.busy = true;
        flight.request = {
            .id = 1 + begun_++ * options_.depth + index,
            .offset = std::uint64_t{flight.first_block} * block_bytes,
            .data = memory_.data() + std::size_t{index} * blocks_per_request_max * block_bytes,
            .length = flight.blocks * block_bytes,
            .area = options_.areas && below(2) == 0 ? std::uint16_t{0} : io::area_none,
            .op = below(2) == 0 ? io::Op::read : io::Op::write,
            .priority = options_.priority};
        for (std::uint32_t i = 0; i < flight.blocks; ++i) {
            const std::uint32_t block = flight.first_block + i;
            const bool writes = flight.request.op == io::Op::write;
            if (writes) ++versions_[block];
            for (std::uint32_t at = 0; at < block_bytes / 8; ++at) {
                words(flight, i)[at] = writes ? word(block, versions_[block], at) : ~0ULL;
            }
        }
        backend().push(flight.request);
        return true;
    }

    void end_one(const io::Completion& completion) {
        ++result_.completed;
        Flight& flight = flights_[(completion.id - 1) % options_.depth];
        if (!flight.busy || flight.request.id != completion.id) {
            ++result_.strange_ids;
            return;
        }
        if (completion.result != std::int64_t{flight.request.length}) ++result_.wrong_results;
        for (std::uint32_t i = 0; i < flight.blocks; ++i) {
            const std::uint32_t block = flight.first_block + i;
            busy_[block] = 0;
            if (flight.request.op == io::Op::write) continue;
            for (std::uint32_t at = 0; at < block_bytes / 8; ++at) {
                if (words(flight, i)[at] != word(block, versions_[block], at)) {
                    ++result_.wrong_bytes;
                    break;
                }
            }
        }
        flight.busy = false;
    }

    SoakOptions options_;
    std::mt19937_64 random_;
    Memory memory_;  // outlives the backend
    std::vector<std::uint64_t> versions_;
    std::vector<std::uint8_t> busy_;
    std::vector<Flight> flights_;
    std::uint64_t begun_ = 0;
    SoakResult result_;
    std::unique_ptr<Subject> subject_;
};

}  // namespace

SoakResult soak(const ContractCase& contract_case, const SoakOptions& options,
                io::BackendStats* stats) {
    Soak running(contract_case, options);
    const SoakResult result = running.run();
    if (stats != nullptr) *stats = running.backend().stats();
    return result;
}

}  // namespace kvdisk::test

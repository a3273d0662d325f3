// The raw layer's loop on a disk whose answers the test gives: what comes of short ones.
#include <doctest/doctest.h>

#include <cerrno>
#include <functional>
#include <vector>

#include "backend_contract.hpp"
#include "io/workload.hpp"

namespace {

using namespace kvdisk;
using kvdisk::test::TemporaryFile;

constexpr std::uint32_t block_bytes = 16384;
constexpr std::uint64_t block_count = 4;

// Moves nothing; each request is answered with what `answer` says.
class AnsweringDisk final : public io::Backend {
  public:
    using Answer = std::function<std::int64_t(const io::Request&)>;

    explicit AnsweringDisk(Answer answer) : answer_(std::move(answer)) {}

    const char* name() const noexcept override { return "answering"; }
    void attach() override {}
    std::uint32_t depth() const noexcept override { return 1; }
    std::uint32_t in_flight() const noexcept override {
        return static_cast<std::uint32_t>(completions_.size());
    }
    void push(const io::Request& request) override {
        completions_.push_back({.id = request.id, .result = answer_(request)});
    }
    void submit() override {}
    std::size_t reap(std::span<io::Completion> completions) override {
        const std::size_t count = std::min(completions.size(), completions_.size());
        std::copy_n(completions_.begin(), count, completions.begin());
        completions_.erase(completions_.begin(),
                           completions_.begin() + static_cast<std::ptrdiff_t>(count));
        return count;
    }
    void wait(std::int64_t) override {}
    void wake() noexcept override {}
    io::BackendStats stats() const override { return {}; }
    void abandon() noexcept override {}

  private:
    Answer answer_;
    std::vector<io::Completion> completions_;
};

io::RawResult fill(const AnsweringDisk::Answer& answer) {
    const TemporaryFile file(block_count * block_bytes);
    io::RawJobOptions options;
    options.file = file.descriptor();
    options.size_bytes = block_count * block_bytes;
    options.block_bytes = block_bytes;
    options.make_backend = [&](const io::BackendOptions&) {
        return std::make_unique<AnsweringDisk>(answer);
    };
    return io::RawJob(options).fill();
}

}  // namespace

TEST_CASE("raw: short answers are resumed from the last whole sector, and counted") {
    std::vector<std::uint64_t> offsets;
    const io::RawResult result = fill([&](const io::Request& request) -> std::int64_t {
        offsets.push_back(request.offset);
        return request.offset == 0 ? 1000 : request.length;
    });
    CHECK(result.error == 0);
    CHECK(offsets == std::vector<std::uint64_t>{0, 512, 16384, 32768, 49152});
    CHECK(result.short_ios[static_cast<std::size_t>(io::Op::write)] == 1);
    CHECK(result.short_ios[static_cast<std::size_t>(io::Op::read)] == 0);
    CHECK(result.bytes[static_cast<std::size_t>(io::Op::write)] == block_count * block_bytes);
}

TEST_CASE("raw: a disk whose answers stay short is an I/O error, not a loop without end") {
    const auto answer_bytes = {1, 511, 512};
    for (const std::int64_t bytes : answer_bytes) {
        CAPTURE(bytes);
        int answers = 0;
        const io::RawResult result = fill([&](const io::Request&) -> std::int64_t {
            REQUIRE(++answers < 1000);
            return bytes;
        });
        CHECK(result.error == EIO);
        CHECK(result.error_offset < block_bytes);
        CHECK(result.bytes[static_cast<std::size_t>(io::Op::write)] == 0);
    }
}

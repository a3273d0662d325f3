// What every backend is put to: the list of backends under test, and a subject, which is one
// backend over fresh files. A new backend joins the contract suite by one entry in
// contract_cases().
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "io/backend.hpp"

namespace kvdisk::test {

struct SubjectOptions {
    std::vector<std::uint64_t> file_bytes = {1 << 20};
    std::vector<std::span<std::byte>> areas;
    std::uint32_t depth = 16;
    bool direct = false;  // O_DIRECT, where the file system has it
};

// One backend, attached to the calling thread, over files of zeros that nobody else sees.
class Subject {
  public:
    virtual ~Subject() = default;
    virtual io::Backend& backend() = 0;
    virtual std::int64_t now_ns() const = 0;  // of the clock that `wait` follows
};

struct ContractCase {
    std::string name;
    bool real;  // descriptors, threads and real time; false: simulated
    std::function<std::unique_ptr<Subject>(const SubjectOptions&)> make;
};

struct RealBackend {
    std::string name;
    std::function<std::unique_ptr<io::Backend>(const io::BackendOptions&)> make;
};

ContractCase contract_case(const RealBackend& real);
const std::vector<ContractCase>& contract_cases();
const std::vector<RealBackend>& real_backends();

// The completions of `count` requests, or fewer when they do not come within ten seconds.
std::vector<io::Completion> collect(io::Backend& backend, std::size_t count,
                                    const std::function<std::int64_t()>& now_ns);
std::vector<io::Completion> collect(Subject& subject, std::size_t count);
std::vector<io::Completion> collect(io::Backend& backend, std::size_t count);  // in real time

// Pushes one request, waits for it and returns its result.
std::int64_t perform(io::Backend& backend, const io::Request& request);

std::int64_t real_now_ns();

// Page-aligned memory, zeroed.
class Memory {
  public:
    explicit Memory(std::size_t bytes)
        : bytes_(bytes), data_(static_cast<std::byte*>(std::aligned_alloc(4096, bytes))) {
        std::fill_n(data_, bytes, std::byte{0});
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { std::free(data_); }
    std::byte* data() const noexcept { return data_; }
    std::span<std::byte> span() const noexcept { return {data_, bytes_}; }

  private:
    std::size_t bytes_;
    std::byte* data_;
};

// An unlinked file in the test directory (KVDISK_TEST_DIR or the system's), closed at the end.
class TemporaryFile {
  public:
    explicit TemporaryFile(std::uint64_t bytes, int open_flags = 0);
    TemporaryFile(const TemporaryFile&) = delete;
    TemporaryFile& operator=(const TemporaryFile&) = delete;
    ~TemporaryFile();
    int descriptor() const noexcept { return descriptor_; }

  private:
    int descriptor_ = -1;
};

// Random reads and writes of 1 to 16 blocks, at a depth that changes at random, each block with its
// own pattern; every completion and every byte read is checked. Returns the number of what went
// wrong.
struct SoakOptions {
    std::uint64_t seed = 1;
    std::uint32_t operations = 10'000;
    std::uint32_t depth = 32;
    bool direct = false;
    bool areas = true;  // half of the requests from registered areas
    io::Priority priority = io::Priority::normal;
};
struct SoakResult {
    std::uint64_t completed = 0;
    std::uint64_t wrong_results = 0;
    std::uint64_t wrong_bytes = 0;
    std::uint64_t strange_ids = 0;  // unknown, or a second time
};
SoakResult soak(const ContractCase& contract_case, const SoakOptions& options,
                io::BackendStats* stats = nullptr);

}  // namespace kvdisk::test

// Runs the block that follows once for each backend, as a doctest subcase of the backend's name.
#define KVDISK_EACH_BACKEND(variable)                                                     \
    for (const ::kvdisk::test::ContractCase& variable : ::kvdisk::test::contract_cases()) \
    SUBCASE(variable.name.c_str())
#define KVDISK_EACH_REAL_BACKEND(variable)                                              \
    for (const ::kvdisk::test::RealBackend& variable : ::kvdisk::test::real_backends()) \
    SUBCASE(variable.name.c_str())

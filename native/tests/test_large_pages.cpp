// Memory for I/O buffers: where it lies, and that no more is taken than was asked for.
#include <doctest/doctest.h>
#include <sys/mman.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <string>

#include "io/large_pages.hpp"

namespace {

using namespace kvdisk;

// How many bytes of `name` the mapping that begins at `address` has (proc(5), smaps).
std::uint64_t bytes_of(const void* address, const std::string& name) {
    std::array<char, 32> wanted{};
    std::snprintf(wanted.data(), wanted.size(), "%lx-",
                  static_cast<unsigned long>(reinterpret_cast<std::uintptr_t>(address)));
    std::ifstream file("/proc/self/smaps");
    bool inside = false;
    for (std::string line; std::getline(file, line);) {
        if (line.starts_with(wanted.data())) inside = true;
        if (inside && line.starts_with(name + ":")) {
            return std::stoull(line.substr(name.size() + 1)) * 1024;
        }
    }
    return 0;
}

bool large_pages_on() {
    std::string modes;
    std::getline(std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"), modes);
    return modes.find("[always]") != std::string::npos ||
           modes.find("[madvise]") != std::string::npos;
}

bool is_mapped(void* address) {
    unsigned char resident = 0;
    return ::mincore(address, 4096, &resident) == 0;
}

}  // namespace

TEST_CASE("large pages: memory begins on one, is all there, and ends where it should") {
    constexpr std::size_t bytes = 3 * io::large_page_bytes + 5 * 4096;
    auto* const memory = static_cast<char*>(io::map_large(bytes));
    REQUIRE(memory != nullptr);
    CHECK(reinterpret_cast<std::uintptr_t>(memory) % io::large_page_bytes == 0);
    CHECK(is_mapped(memory + bytes - 4096));
    // Alone in its mapping, or the figures would be others' too.
    CHECK(::madvise(memory, bytes, MADV_DONTFORK) == 0);
    CHECK(bytes_of(memory, "Size") == bytes);
    CHECK(bytes_of(memory, "Rss") == bytes);
    if (large_pages_on()) CHECK(bytes_of(memory, "AnonHugePages") >= io::large_page_bytes);
    CHECK(::munmap(memory, bytes) == 0);
    CHECK_FALSE(is_mapped(memory));
}

TEST_CASE("large pages: what cannot be had is said, and nothing is kept") {
    CHECK(io::map_large(std::size_t{1} << 60) == nullptr);
    CHECK(errno == ENOMEM);
}

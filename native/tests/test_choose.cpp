// The choice of a backend. What is to be expected depends on what this process is permitted, so the
// fault tests run these cases under filters and limits and say by environment variables what must
// come out (tests/faults/test_uring_refused.py); without them the cases hold for any machine.
#include <doctest/doctest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>
#include <system_error>

#include "backend_contract.hpp"
#include "io/choose.hpp"

using namespace kvdisk;
using namespace kvdisk::test;

namespace {

std::string expected(const char* variable) {
    const char* const value = std::getenv(variable);
    return value != nullptr ? value : "";
}

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("A25: the automatic choice moves the right bytes and says what it is") {
    std::string name;
    std::string reason;
    const RealBackend chosen{"auto", [&](const io::BackendOptions& options) {
                                 io::ChosenBackend choice = io::choose_backend(options, "auto");
                                 name = choice.backend->name();
                                 reason = choice.reason;
                                 return std::move(choice.backend);
                             }};
    io::BackendStats stats;
    const std::string depth =
        expected("KVDISK_EXPECT_DEPTH");  // of 64 KiB of registered memory each
    const SoakOptions options{
        .seed = 25,
        .operations = 3000,
        .depth = depth.empty() ? 32U : static_cast<unsigned>(std::stoul(depth))};
    const SoakResult result = soak(contract_case(chosen), options, &stats);
    CHECK(result.completed == 3000);
    CHECK(result.wrong_results + result.wrong_bytes + result.strange_ids == 0);
    CHECK((name == "uring" || name == "threads"));
    CHECK(reason.empty() == (name == "uring"));
    MESSAGE("backend ", name, "; reason: ", reason, "; note: ", stats.note);

    CAPTURE(reason);
    CAPTURE(stats.note);
    const std::string name_expected = expected("KVDISK_EXPECT_BACKEND");
    if (!name_expected.empty()) CHECK(name == name_expected);
    CHECK(contains(reason, expected("KVDISK_EXPECT_REASON")));
    CHECK(contains(stats.note, expected("KVDISK_EXPECT_NOTE")));
    if (name_expected == "uring") {
        CHECK(stats.areas_registered == expected("KVDISK_EXPECT_NOTE").empty());
    }
}

TEST_CASE("A25: io_uring asked for by name is had, or refused with the same reason") {
    const bool to_be_refused = expected("KVDISK_EXPECT_BACKEND") == "threads";
    try {
        const io::ChosenBackend choice = io::choose_backend({}, "uring");
        CHECK_FALSE(to_be_refused);
        CHECK(std::string(choice.backend->name()) == "uring");
        CHECK(choice.reason.empty());
    } catch (const std::system_error& error) {
        MESSAGE("refused: ", std::string(error.what()));
        CHECK(contains(error.what(), "io_uring"));
        CHECK(contains(error.what(), expected("KVDISK_EXPECT_REASON")));
    }
}

TEST_CASE("threads asked for by name need no reason") {
    const io::ChosenBackend choice = io::choose_backend({}, "threads");
    CHECK(std::string(choice.backend->name()) == "threads");
    CHECK(choice.reason.empty());
}

TEST_CASE("an unknown backend is refused with the names that exist") {
    CHECK_THROWS_WITH_AS(io::choose_backend({}, "posix"),
                         "backend is \"auto\", \"uring\" or \"threads\", not \"posix\"",
                         std::invalid_argument);
}

// The soak: drives the pipeline over the simulated disk and copier through as many rows as it is
// asked to, from one seed, and judges every answer. Its last line is what counts:
//   ops=N wrong_bytes=0 invariant_breaks=0
// It exits with 0, or with 1 when one of the two is not 0. An assertion of the pipeline ends it
// before that: the last line then begins with "aborted:", and it exits with 3. The same arguments
// give the same trace hash.
#include <unistd.h>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "pipeline/canary.hpp"
#include "soak_world.hpp"

using namespace kvdisk::test;

namespace {

constexpr std::uint64_t episodes_per_world = 8;

struct Arguments {
    std::uint64_t ops = 1'000'000;
    std::uint64_t seed = 1;
    bool faults = true;
};

[[noreturn]] void usage() {
    std::fputs("usage: soak [--ops N] [--seed S] [--faults all|none]\n", stderr);
    if (KVDISK_CANARY == -1) {
        std::fprintf(stderr, "            [--canary 0..%d]\n", kvdisk::canary_last);
    }
    std::exit(2);
}

Arguments parse(int count, char** words) {
    Arguments arguments;
    for (int i = 1; i < count; i += 2) {
        if (i + 1 == count) usage();
        const std::string name = words[i];
        const std::string value = words[i + 1];
        char* end = nullptr;
        const std::uint64_t number = std::strtoull(value.c_str(), &end, 10);
        const bool is_number = !value.empty() && *end == '\0';
#if KVDISK_CANARY == -1
        if (name == "--canary" && is_number && number <= kvdisk::canary_last) {
            kvdisk::canary = static_cast<int>(number);
        } else
#endif
            if (name == "--ops" && is_number) {
            arguments.ops = number;
        } else if (name == "--seed" && is_number) {
            arguments.seed = number;
        } else if (name == "--faults" && (value == "all" || value == "none")) {
            arguments.faults = value == "all";
        } else {
            usage();
        }
    }
    return arguments;
}

Verdict verdict;
std::uint64_t volatile ops_so_far = 0;

// An assertion of the pipeline is a broken invariant like any other.
extern "C" void aborted(int) {
    char line[128];
    const int bytes = std::snprintf(line, sizeof line,
                                    "aborted: ops>=%llu wrong_bytes=%llu invariant_breaks=%llu\n",
                                    static_cast<unsigned long long>(ops_so_far),
                                    static_cast<unsigned long long>(verdict.wrong_bytes),
                                    static_cast<unsigned long long>(verdict.invariant_breaks + 1));
    if (::write(STDOUT_FILENO, line, static_cast<std::size_t>(bytes)) < 0) std::_Exit(4);
    std::_Exit(3);
}

}  // namespace

int main(int count, char** words) {
    const Arguments arguments = parse(count, words);
    std::signal(SIGABRT, aborted);
    std::printf("soak: ops=%llu seed=%llu faults=%s\n",
                static_cast<unsigned long long>(arguments.ops),
                static_cast<unsigned long long>(arguments.seed), arguments.faults ? "all" : "none");
    if (kvdisk::canary != 0) {
        std::printf("canary %d: %s\n", kvdisk::canary, kvdisk::canary_names[kvdisk::canary]);
    }
    std::fflush(stdout);

    const auto begin = std::chrono::steady_clock::now();
    const Noise noise(arguments.seed);
    kvdisk::io::SimRandom random(arguments.seed);
    Totals totals;
    while (totals.rows < arguments.ops && !verdict.hopeless()) {
        World world(random.next(), arguments.faults, noise, verdict);
        for (std::uint64_t episode = 0; episode < episodes_per_world; ++episode) {
            if (totals.rows + world.rows_ended() >= arguments.ops || verdict.hopeless()) break;
            const std::uint64_t rows_left = arguments.ops - totals.rows - world.rows_ended();
            const auto rows = static_cast<std::uint64_t>(random.between(1'000, 40'000));
            world.run_episode(std::min(rows, rows_left));
            ops_so_far = totals.rows + world.rows_ended();
        }
        world.add_to(totals);
    }
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

    totals.print();
    std::printf("episodes=%llu seconds=%.1f ops_per_minute=%.0f trace=%016llx\n",
                static_cast<unsigned long long>(verdict.episode), seconds,
                static_cast<double>(totals.rows) / seconds * 60,
                static_cast<unsigned long long>(totals.trace_hash));
    std::printf("ops=%llu wrong_bytes=%llu invariant_breaks=%llu\n",
                static_cast<unsigned long long>(totals.rows),
                static_cast<unsigned long long>(verdict.wrong_bytes),
                static_cast<unsigned long long>(verdict.invariant_breaks));
    return verdict.wrong_bytes + verdict.invariant_breaks == 0 ? 0 : 1;
}

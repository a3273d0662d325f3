#include "fake_cuda.hpp"

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "pipeline/gather.hpp"

namespace {

constexpr int success = 0;
constexpr int invalid_value = 1;
constexpr int invalid_device = 101;
constexpr int invalid_context = 201;
constexpr int not_found = 500;
constexpr int not_ready = 600;
constexpr int device_count = 2;

struct FakeContext {
    int device;
};

struct FakeEvent {
    int answer = success;
    std::uint64_t recorded = 0;  // the last record that was asked for
};

struct Plan {
    unsigned skipped;
    int error;
    bool always;
};

// All that the fake driver knows. One mutex guards it; streams take it only to fetch work.
struct World {
    std::mutex mutex;
    std::condition_variable changed;
    std::mt19937_64 random{1};
    unsigned delay_us_max = 0;
    bool frozen = false;
    int broken = success;
    std::map<std::string, Plan> plans;
    std::map<std::string, std::uint64_t> calls;
    std::map<std::string, std::int64_t> live;
    std::map<std::thread::id, std::string> first_calls;
    std::set<void*> registered;
    std::deque<FakeEvent> events;  // of somebody else; kept for ever
    FakeContext contexts[device_count] = {{0}, {1}};
};

World& world() {
    static World* const made = new World;  // streams may outlive main
    return *made;
}

thread_local std::vector<FakeContext*> current_contexts;

std::string context_kind(int device) { return "context " + std::to_string(device); }

// Notes a call; returns what it has to answer if it must fail.
int enter(const char* name, bool needs_context = true) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    ++w.calls[name];
    if (needs_context || std::strcmp(name, "cuCtxSetCurrent") == 0) {
        w.first_calls.emplace(std::this_thread::get_id(), name);
    }
    if (w.broken != success) return w.broken;
    if (const auto plan = w.plans.find(name); plan != w.plans.end()) {
        if (plan->second.skipped == 0) {
            const int error = plan->second.error;
            if (!plan->second.always) w.plans.erase(plan);
            return error;
        }
        --plan->second.skipped;
    }
    if (needs_context && (current_contexts.empty() || current_contexts.back() == nullptr)) {
        return invalid_context;
    }
    return success;
}

void count(const std::string& kind, int change) {
    const std::lock_guard lock(world().mutex);
    world().live[kind] += change;
}

class FakeStream {
  public:
    FakeStream() : thread_([this] { work(); }) {}

    ~FakeStream() {
        {
            const std::lock_guard lock(world().mutex);
            ending_ = true;
        }
        world().changed.notify_all();
        thread_.join();
    }

    void push(std::function<void()> operation) {
        {
            const std::lock_guard lock(world().mutex);
            operations_.push_back(std::move(operation));
        }
        world().changed.notify_all();
    }

    bool idle() {
        const std::lock_guard lock(world().mutex);
        return operations_.empty();
    }

    void wait_idle() {
        std::unique_lock lock(world().mutex);
        world().changed.wait(lock,
                             [this] { return operations_.empty() || world().broken != success; });
    }

  private:
    void work() {
        World& w = world();
        std::unique_lock lock(w.mutex);
        while (true) {
            w.changed.wait(lock, [&] { return ending_ || (!operations_.empty() && !w.frozen); });
            if (operations_.empty() || w.broken != success) {
                if (ending_) return;
                operations_.clear();
                continue;
            }
            const std::function<void()> operation = operations_.front();
            const auto delay_us = w.delay_us_max == 0 ? 0 : w.random() % w.delay_us_max;
            lock.unlock();
            if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
            operation();
            lock.lock();
            operations_.pop_front();
            w.changed.notify_all();
        }
    }

    std::deque<std::function<void()>> operations_;
    bool ending_ = false;
    std::thread thread_;
};

void move_late(char* target, const char* source, std::size_t bytes) {
    std::memcpy(target, source, bytes / 2);
    std::this_thread::yield();
    std::memcpy(target + bytes / 2, source + bytes / 2, bytes - bytes / 2);
}

// What gather.cu does.
void run_kernel(bool gather, const GatherPiece* pieces, unsigned piece_count, unsigned row_count,
                const GatherRows& rows) {
    for (unsigned row = 0; row < row_count; ++row) {
        for (unsigned i = 0; i < piece_count; ++i) {
            auto* const block =
                reinterpret_cast<char*>(pieces[i].block0 + rows.block[row] * pieces[i].stride);
            auto* const buffer = reinterpret_cast<char*>(rows.buffer[row] + pieces[i].offset);
            move_late(gather ? buffer : block, gather ? block : buffer, pieces[i].bytes);
        }
    }
}

}  // namespace

#define EXPORTED extern "C" __attribute__((visibility("default")))

// ---------------------------------------------------------------- for tests

EXPORTED void fake_cuda_reset(std::uint64_t seed, unsigned delay_us_max) {
    World& w = world();
    const std::lock_guard lock(w.mutex);
    w.random.seed(seed);
    w.delay_us_max = delay_us_max;
    w.frozen = false;
    w.broken = success;
    w.plans.clear();
    w.calls.clear();
    w.live.clear();
    w.first_calls.clear();
    w.registered.clear();
    w.changed.notify_all();
}

EXPORTED void fake_cuda_fail(const char* name, unsigned skipped, int error, int always) {
    const std::lock_guard lock(world().mutex);
    world().plans[name] = {skipped, error, always != 0};
}

EXPORTED void fake_cuda_break(int error) {
    const std::lock_guard lock(world().mutex);
    world().broken = error;
    world().changed.notify_all();
}

EXPORTED void fake_cuda_freeze(int frozen) {
    const std::lock_guard lock(world().mutex);
    world().frozen = frozen != 0;
    world().changed.notify_all();
}

EXPORTED void* fake_cuda_make_event(int answer) {
    const std::lock_guard lock(world().mutex);
    return &world().events.emplace_back(FakeEvent{answer});
}

EXPORTED void fake_cuda_set_event(void* event, int answer) {
    const std::lock_guard lock(world().mutex);
    static_cast<FakeEvent*>(event)->answer = answer;
}

EXPORTED std::uint64_t fake_cuda_calls(const char* name) {
    const std::lock_guard lock(world().mutex);
    std::uint64_t total = 0;
    for (const auto& [called, times] : world().calls) {
        if (*name == '\0' || called == name) total += times;
    }
    return total;
}

EXPORTED std::uint64_t fake_cuda_unprepared_threads() {
    const std::lock_guard lock(world().mutex);
    std::uint64_t total = 0;
    for (const auto& [thread, call] : world().first_calls) total += call != "cuCtxSetCurrent";
    return total;
}

EXPORTED std::int64_t fake_cuda_live(const char* kind, int device) {
    const std::lock_guard lock(world().mutex);
    return world().live[std::strcmp(kind, "context") == 0 ? context_kind(device) : kind];
}

// ---------------------------------------------------------------- the driver

EXPORTED int cuInit(unsigned) { return enter("cuInit", false); }

EXPORTED int cuGetErrorName(int error, const char** name) {
    *name = error == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_FAKE";
    return success;
}

EXPORTED int cuDeviceGetCount(int* devices) {
    *devices = device_count;
    return enter("cuDeviceGetCount", false);
}

EXPORTED int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    if (ordinal < 0 || ordinal >= device_count) return invalid_device;
    return enter("cuDeviceGet", false);
}

EXPORTED int cuDevicePrimaryCtxRetain(void** context, int device) {
    if (const int error = enter("cuDevicePrimaryCtxRetain", false)) return error;
    *context = &world().contexts[device];
    count(context_kind(device), 1);
    return success;
}

EXPORTED int cuDevicePrimaryCtxRelease_v2(int device) {
    count(context_kind(device), -1);
    return enter("cuDevicePrimaryCtxRelease", false);
}

EXPORTED int cuCtxGetCurrent(void** context) {
    *context = current_contexts.empty() ? nullptr : current_contexts.back();
    return enter("cuCtxGetCurrent", false);
}

EXPORTED int cuCtxGetDevice(int* device) {
    if (const int error = enter("cuCtxGetDevice")) return error;
    *device = current_contexts.back()->device;
    return success;
}

EXPORTED int cuCtxSetCurrent(void* context) {
    if (const int error = enter("cuCtxSetCurrent", false)) return error;
    current_contexts = {static_cast<FakeContext*>(context)};
    return success;
}

EXPORTED int cuCtxPushCurrent_v2(void* context) {
    if (const int error = enter("cuCtxPushCurrent", false)) return error;
    current_contexts.push_back(static_cast<FakeContext*>(context));
    return success;
}

EXPORTED int cuCtxPopCurrent_v2(void** context) {
    if (current_contexts.empty()) return invalid_context;
    *context = current_contexts.back();
    current_contexts.pop_back();
    return enter("cuCtxPopCurrent", false);
}

EXPORTED int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
    *least = 0;
    *greatest = -5;
    return enter("cuCtxGetStreamPriorityRange");
}

EXPORTED int cuStreamCreateWithPriority(void** stream, unsigned, int) {
    if (const int error = enter("cuStreamCreateWithPriority")) return error;
    *stream = new FakeStream;
    count("stream", 1);
    return success;
}

EXPORTED int cuStreamDestroy_v2(void* stream) {
    const int error = enter("cuStreamDestroy");
    delete static_cast<FakeStream*>(stream);
    count("stream", -1);
    return error;
}

EXPORTED int cuStreamQuery(void* stream) {
    if (const int error = enter("cuStreamQuery")) return error;
    return static_cast<FakeStream*>(stream)->idle() ? success : not_ready;
}

EXPORTED int cuStreamSynchronize(void* stream) {
    if (const int error = enter("cuStreamSynchronize")) return error;
    static_cast<FakeStream*>(stream)->wait_idle();
    return success;
}

EXPORTED int cuEventCreate(void** event, unsigned) {
    if (const int error = enter("cuEventCreate")) return error;
    *event = new FakeEvent;
    count("event", 1);
    return success;
}

EXPORTED int cuEventDestroy_v2(void* event) {
    delete static_cast<FakeEvent*>(event);
    count("event", -1);
    return enter("cuEventDestroy");
}

EXPORTED int cuEventRecord(void* event, void* stream) {
    if (const int error = enter("cuEventRecord")) return error;
    auto* const recorded = static_cast<FakeEvent*>(event);
    std::uint64_t number = 0;
    {
        const std::lock_guard lock(world().mutex);
        number = ++recorded->recorded;
        recorded->answer = not_ready;
    }
    static_cast<FakeStream*>(stream)->push([recorded, number] {
        const std::lock_guard lock(world().mutex);
        if (recorded->recorded == number) recorded->answer = success;
    });
    return success;
}

EXPORTED int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    if (const int error = enter("cuStreamWaitEvent")) return error;
    auto* const awaited = static_cast<FakeEvent*>(event);
    static_cast<FakeStream*>(stream)->push([awaited] {
        std::unique_lock lock(world().mutex);
        while (awaited->answer == not_ready && world().broken == success) {
            world().changed.wait_for(lock, std::chrono::milliseconds(1));
        }
    });
    return success;
}

EXPORTED int cuEventQuery(void* event) {
    if (const int error = enter("cuEventQuery")) return error;
    const std::lock_guard lock(world().mutex);
    return static_cast<FakeEvent*>(event)->answer;
}

EXPORTED int cuMemHostRegister_v2(void* memory, std::size_t, unsigned) {
    if (const int error = enter("cuMemHostRegister")) return error;
    {
        const std::lock_guard lock(world().mutex);
        if (!world().registered.insert(memory).second) return invalid_value;
    }
    count("registration", 1);
    return success;
}

EXPORTED int cuMemHostUnregister(void* memory) {
    {
        const std::lock_guard lock(world().mutex);
        if (world().registered.erase(memory) == 0) return invalid_value;
    }
    count("registration", -1);
    return enter("cuMemHostUnregister");
}

EXPORTED int cuMemHostGetDevicePointer_v2(std::uint64_t* address, void* memory, unsigned) {
    *address = reinterpret_cast<std::uint64_t>(memory);
    return enter("cuMemHostGetDevicePointer");
}

EXPORTED int cuMemAlloc_v2(std::uint64_t* address, std::size_t bytes) {
    if (const int error = enter("cuMemAlloc")) return error;
    *address = reinterpret_cast<std::uint64_t>(std::malloc(bytes));
    count("memory", 1);
    return success;
}

EXPORTED int cuMemFree_v2(std::uint64_t address) {
    std::free(reinterpret_cast<void*>(address));
    count("memory", -1);
    return enter("cuMemFree");
}

EXPORTED int cuMemcpyHtoD_v2(std::uint64_t target, const void* source, std::size_t bytes) {
    if (const int error = enter("cuMemcpyHtoD")) return error;
    std::memcpy(reinterpret_cast<void*>(target), source, bytes);
    return success;
}

EXPORTED int cuMemcpyAsync(std::uint64_t target, std::uint64_t source, std::size_t bytes,
                           void* stream) {
    if (const int error = enter("cuMemcpyAsync")) return error;
    static_cast<FakeStream*>(stream)->push([=] {
        move_late(reinterpret_cast<char*>(target), reinterpret_cast<const char*>(source), bytes);
    });
    return success;
}

EXPORTED int fake_memcpy_batch_async(std::uint64_t* targets, std::uint64_t* sources,
                                     std::size_t* sizes, std::size_t copies, void*, std::size_t*,
                                     std::size_t, std::size_t* failed, void* stream) {
    const int error = enter("cuMemcpyBatchAsync");
    if (error == success && stream == nullptr) return invalid_value;
    // One that fails has begun half of its work.
    const std::size_t begun = error == success ? copies : copies / 2;
    const std::vector<std::uint64_t> to(targets, targets + begun), from(sources, sources + begun);
    const std::vector<std::size_t> bytes(sizes, sizes + begun);
    static_cast<FakeStream*>(stream)->push([=] {
        for (std::size_t i = 0; i < to.size(); ++i) {
            move_late(reinterpret_cast<char*>(to[i]), reinterpret_cast<const char*>(from[i]),
                      bytes[i]);
        }
    });
    *failed = begun;
    return error;
}

EXPORTED int cuGetProcAddress_v2(const char* symbol, void** function, int version, std::uint64_t,
                                 int*) {
    if (const int error = enter("cuGetProcAddress", false)) return error;
    if (std::strcmp(symbol, "cuMemcpyBatchAsync") != 0 || version != 12080) return not_found;
    *function = reinterpret_cast<void*>(&fake_memcpy_batch_async);
    return success;
}

EXPORTED int cuModuleLoadData(void** module, const void* image) {
    if (const int error = enter("cuModuleLoadData")) return error;
    const std::string text(static_cast<const char*>(image));
    if (text.find(".entry kvdisk_gather") == std::string::npos) return invalid_value;
    *module = new int(0);
    count("module", 1);
    return success;
}

EXPORTED int cuModuleUnload(void* module) {
    delete static_cast<int*>(module);
    count("module", -1);
    return enter("cuModuleUnload");
}

EXPORTED int cuModuleGetFunction(void** function, void*, const char* name) {
    static char gather = 0, scatter = 0;
    *function = std::strcmp(name, "kvdisk_gather") == 0 ? &gather : &scatter;
    if (*function == &gather) gather = 1;
    return enter("cuModuleGetFunction");
}

EXPORTED int cuLaunchKernel(void* function, unsigned ctas, unsigned, unsigned, unsigned threads,
                            unsigned, unsigned, unsigned, void* stream, void** parameters, void**) {
    if (const int error = enter("cuLaunchKernel")) return error;
    if (ctas == 0 || threads == 0) return invalid_value;
    const bool gather = *static_cast<char*>(function) == 1;
    const auto* const pieces = *static_cast<const GatherPiece* const*>(parameters[0]);
    const unsigned piece_count = *static_cast<const unsigned*>(parameters[1]);
    const unsigned row_count = *static_cast<const unsigned*>(parameters[2]);
    const GatherRows rows = *static_cast<const GatherRows*>(parameters[3]);
    static_cast<FakeStream*>(stream)->push(
        [=] { run_kernel(gather, pieces, piece_count, row_count, rows); });
    return success;
}

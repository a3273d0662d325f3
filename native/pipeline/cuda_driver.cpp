#include "pipeline/cuda_driver.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace kvdisk::cuda {

namespace {

constexpr Result error_out_of_memory = 2;
constexpr Result error_no_device = 100;
constexpr Result error_invalid_device = 101;

template <typename FunctionPointer>
void find(void* library, const char* symbol, FunctionPointer& function) {
    function = reinterpret_cast<FunctionPointer>(::dlsym(library, symbol));
    if (function == nullptr) {
        throw std::system_error(ENOSYS, std::generic_category(),
                                std::string("the CUDA driver is too old: it has no ") + symbol);
    }
}

// cuMemcpyBatchAsync takes one argument less since CUDA 13; asked for by the version that brought
// it, every driver gives the one of 12.8.
void find_batched_copies(void* library, Driver& driver) {
    using GetProcAddress = Result (*)(const char* symbol, void** function, int version,
                                      std::uint64_t flags, int* query_result);
    const auto get_proc_address =
        reinterpret_cast<GetProcAddress>(::dlsym(library, "cuGetProcAddress_v2"));
    driver.memcpy_batch_async = nullptr;
    void* found = nullptr;
    int query_result = 0;
    if (get_proc_address != nullptr &&
        get_proc_address("cuMemcpyBatchAsync", &found, 12080, 0, &query_result) == success) {
        driver.memcpy_batch_async = reinterpret_cast<decltype(driver.memcpy_batch_async)>(found);
    }
}

Driver load() {
    void* const library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::system_error(ENODEV, std::generic_category(),
                                std::string("no CUDA driver: ") + ::dlerror());
    }
    Driver driver;
    find(library, "cuInit", driver.init);
    find(library, "cuGetErrorName", driver.get_error_name);
    find(library, "cuDeviceGetCount", driver.device_get_count);
    find(library, "cuDeviceGet", driver.device_get);
    find(library, "cuDevicePrimaryCtxRetain", driver.device_primary_ctx_retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", driver.device_primary_ctx_release);
    find(library, "cuCtxGetCurrent", driver.ctx_get_current);
    find(library, "cuCtxGetDevice", driver.ctx_get_device);
    find(library, "cuCtxSetCurrent", driver.ctx_set_current);
    find(library, "cuCtxPushCurrent_v2", driver.ctx_push_current);
    find(library, "cuCtxPopCurrent_v2", driver.ctx_pop_current);
    find(library, "cuCtxGetStreamPriorityRange", driver.ctx_get_stream_priority_range);
    find(library, "cuStreamCreateWithPriority", driver.stream_create_with_priority);
    find(library, "cuStreamDestroy_v2", driver.stream_destroy);
    find(library, "cuStreamQuery", driver.stream_query);
    find(library, "cuStreamSynchronize", driver.stream_synchronize);
    find(library, "cuStreamWaitEvent", driver.stream_wait_event);
    find(library, "cuEventCreate", driver.event_create);
    find(library, "cuEventDestroy_v2", driver.event_destroy);
    find(library, "cuEventRecord", driver.event_record);
    find(library, "cuEventQuery", driver.event_query);
    find(library, "cuMemHostRegister_v2", driver.mem_host_register);
    find(library, "cuMemHostUnregister", driver.mem_host_unregister);
    find(library, "cuMemHostGetDevicePointer_v2", driver.mem_host_get_device_pointer);
    find(library, "cuMemAlloc_v2", driver.mem_alloc);
    find(library, "cuMemFree_v2", driver.mem_free);
    find(library, "cuMemcpyHtoD_v2", driver.memcpy_host_to_device);
    find(library, "cuMemcpyAsync", driver.memcpy_async);
    find(library, "cuModuleLoadData", driver.module_load_data);
    find(library, "cuModuleUnload", driver.module_unload);
    find(library, "cuModuleGetFunction", driver.module_get_function);
    find(library, "cuLaunchKernel", driver.launch_kernel);
    find_batched_copies(library, driver);
    const Result result = driver.init(0);
    if (result != success) {
        const char* name = nullptr;
        driver.get_error_name(result, &name);
        throw std::system_error(errno_of(result), std::generic_category(),
                                std::string("the CUDA driver does not start: ") +
                                    (name == nullptr ? "unknown error" : name));
    }
    return driver;
}

}  // namespace

const Driver& driver() {
    static const Driver loaded = load();
    return loaded;
}

int resolve_device(const std::string& name) {
    const Driver& cuda = driver();
    int index = 0;
    if (name == "cuda") {
        Context current = nullptr;
        require(cuda.ctx_get_current(&current), "cuCtxGetCurrent");
        if (current != nullptr) require(cuda.ctx_get_device(&index), "cuCtxGetDevice");
        return index;
    }
    constexpr std::string_view prefix = "cuda:";
    const char* const end = name.data() + name.size();
    const char* const digits = name.data() + std::min(prefix.size(), name.size());
    const auto [parsed_to, error] = std::from_chars(digits, end, index);
    if (!name.starts_with(prefix) || error != std::errc{} || parsed_to != end || index < 0) {
        throw std::invalid_argument("device must be cpu, cuda or cuda:N, not " + name);
    }
    int count = 0;
    require(cuda.device_get_count(&count), "cuDeviceGetCount");
    if (index >= count) {
        throw std::invalid_argument("there is no device " + name + ": the driver shows " +
                                    std::to_string(count));
    }
    return index;
}

int errno_of(Result error) noexcept {
    switch (error) {
        case success:
            return 0;
        case error_out_of_memory:
            return ENOMEM;
        case error_no_device:
        case error_invalid_device:
            return ENODEV;
        default:
            return EIO;
    }
}

void require(Result result, const char* call) {
    if (result == success) return;
    const char* name = nullptr;
    driver().get_error_name(result, &name);
    throw std::system_error(errno_of(result), std::generic_category(),
                            std::string(call) + ": " + (name == nullptr ? "unknown" : name));
}

}  // namespace kvdisk::cuda

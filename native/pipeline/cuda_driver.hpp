// The few calls of the CUDA driver API that the `cuda` copier needs, found at run time in
// libcuda.so.1: so one build serves every CUDA version, and machines without a GPU.
//
// What always holds:
//   * Nothing here touches the driver before `driver()` or `resolve_device()` is called, and those
//     are called only for a device that is not "cpu".
//   * Structs and numbers are those of cuda.h; its ABI never changes, later versions get new names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvdisk::cuda {

using Result = int;  // CUresult
inline constexpr Result success = 0;
inline constexpr Result error_not_ready = 600;

using Device = int;
using DeviceAddress = std::uint64_t;  // CUdeviceptr
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

inline constexpr unsigned stream_non_blocking = 1;
inline constexpr unsigned event_disable_timing = 2;
inline constexpr unsigned host_register_portable = 1;
inline constexpr unsigned host_register_device_map = 2;

// CUmemcpyAttributes. Location hints are for managed memory, which is none of ours.
enum class SourceOrder : int { stream = 1, any = 3 };  // CUmemcpySrcAccessOrder
struct CopyAttributes {
    SourceOrder source_order = SourceOrder::stream;
    int source_hint[2] = {0, 0};
    int target_hint[2] = {0, 0};
    unsigned flags = 0;
};

// The driver's functions, each named as in cuda.h without its prefix and version.
struct Driver {
    Result (*init)(unsigned flags);
    Result (*get_error_name)(Result error, const char** name);
    Result (*device_get_count)(int* count);
    Result (*device_get)(Device* device, int ordinal);
    Result (*device_primary_ctx_retain)(Context* context, Device device);
    Result (*device_primary_ctx_release)(Device device);
    Result (*ctx_get_current)(Context* context);
    Result (*ctx_get_device)(Device* device);
    Result (*ctx_set_current)(Context context);
    Result (*ctx_push_current)(Context context);
    Result (*ctx_pop_current)(Context* context);
    Result (*ctx_get_stream_priority_range)(int* least, int* greatest);
    Result (*stream_create_with_priority)(Stream* stream, unsigned flags, int priority);
    Result (*stream_destroy)(Stream stream);
    Result (*stream_query)(Stream stream);
    Result (*stream_synchronize)(Stream stream);
    Result (*stream_wait_event)(Stream stream, Event event, unsigned flags);
    Result (*event_create)(Event* event, unsigned flags);
    Result (*event_destroy)(Event event);
    Result (*event_record)(Event event, Stream stream);
    Result (*event_query)(Event event);
    Result (*mem_host_register)(void* memory, std::size_t bytes, unsigned flags);
    Result (*mem_host_unregister)(void* memory);
    Result (*mem_host_get_device_pointer)(DeviceAddress* address, void* memory, unsigned flags);
    Result (*mem_alloc)(DeviceAddress* address, std::size_t bytes);
    Result (*mem_free)(DeviceAddress address);
    Result (*memcpy_host_to_device)(DeviceAddress target, const void* source, std::size_t bytes);
    Result (*memcpy_async)(DeviceAddress target, DeviceAddress source, std::size_t bytes,
                           Stream stream);
    Result (*module_load_data)(Module* module, const void* image);
    Result (*module_unload)(Module module);
    Result (*module_get_function)(Function* function, Module module, const char* name);
    Result (*launch_kernel)(Function function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                            unsigned block_x, unsigned block_y, unsigned block_z,
                            unsigned shared_bytes, Stream stream, void** parameters, void** extra);
    // Null where the driver is older than CUDA 12.8.
    Result (*memcpy_batch_async)(DeviceAddress* targets, DeviceAddress* sources, std::size_t* sizes,
                                 std::size_t count, CopyAttributes* attributes,
                                 std::size_t* attribute_firsts, std::size_t attribute_count,
                                 std::size_t* failed, Stream stream);
};

// Loads and initialises the driver, once. Throws std::system_error when there is none that works.
const Driver& driver();

// The index of the device that "cuda" (the calling thread's current one, else 0) or "cuda:N" means.
// Throws std::invalid_argument for another text or a device that is not there, and as `driver`.
int resolve_device(const std::string& name);

// The errno that tells a caller most.
int errno_of(Result error) noexcept;

// Throws std::system_error with the call and the driver's name of the error.
void require(Result result, const char* call);

// Makes a context current on this thread for a while, then the one before it again. For threads
// that are not ours.
class CurrentContext {
  public:
    explicit CurrentContext(Context context) noexcept
        : pushed_(driver().ctx_push_current(context) == success) {}
    ~CurrentContext() {
        Context popped = nullptr;
        if (pushed_) driver().ctx_pop_current(&popped);
    }
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;

  private:
    bool pushed_;
};

}  // namespace kvdisk::cuda

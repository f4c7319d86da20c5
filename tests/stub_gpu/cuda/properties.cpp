// What the stub device says of itself: an H200 of compute capability 9.0, as often as STUB_GPU_COUNT says; and errors.

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "device.hpp"

namespace stub {

namespace {

constexpr size_t total_bytes = 150'109'106'995;
constexpr int runtime_version = CUDART_VERSION;

thread_local int device = 0;
thread_local cudaError_t last_error = cudaSuccess;

int num_devices() {
  static const int number = static_cast<int>(number_from_environment("STUB_GPU_COUNT", 1));
  return number;
}

}  // namespace

int current_device() { return device; }

cudaError_t failed(cudaError_t error) {
  last_error = error;
  return error;
}

}  // namespace stub

using namespace stub;

extern "C" {

cudaError_t cudaGetDeviceCount(int* number) {
  *number = num_devices();
  return *number ? cudaSuccess : failed(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* number) {
  *number = device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int number) {
  if (number < 0 || number >= num_devices()) return failed(cudaErrorInvalidDevice);
  device = number;
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* version) {
  *version = runtime_version;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = runtime_version;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int number) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "NVIDIA H200 (stub)");
  properties->totalGlobalMem = static_cast<size_t>(number_from_environment("STUB_GPU_BYTES", total_bytes));
  properties->major = 9;
  properties->minor = 0;
  properties->multiProcessorCount = 132;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsDim[0] = properties->maxThreadsDim[1] = 1024;
  properties->maxThreadsDim[2] = 64;
  properties->maxGridSize[0] = 2147483647;
  properties->maxGridSize[1] = properties->maxGridSize[2] = 65535;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxBlocksPerMultiProcessor = 32;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 49152;
  properties->sharedMemPerBlockOptin = 232448;
  properties->sharedMemPerMultiprocessor = 233472;
  properties->reservedSharedMemPerBlock = 1024;
  properties->l2CacheSize = 60 << 20;
  properties->memoryBusWidth = 6144;
  properties->totalConstMem = 65536;
  properties->textureAlignment = 512;
  properties->unifiedAddressing = properties->managedMemory = properties->concurrentKernels = 1;
  properties->cooperativeLaunch = 1;
  properties->asyncEngineCount = 3;
  properties->pciBusID = number;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int number) {
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, number);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = properties.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = properties.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = properties.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = static_cast<int>(properties.sharedMemPerBlock); break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = static_cast<int>(properties.sharedMemPerBlockOptin); break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
      *value = static_cast<int>(properties.sharedMemPerMultiprocessor);
      break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = properties.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = properties.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = properties.maxThreadsPerBlock; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = properties.regsPerBlock; break;
    case cudaDevAttrMaxGridDimX: *value = properties.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = properties.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = properties.maxGridSize[2]; break;
    case cudaDevAttrWarpSize: *value = properties.warpSize; break;
    case cudaDevAttrL2CacheSize: *value = properties.l2CacheSize; break;
    default: *value = 1;  // most others are abilities, and it has them all
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) { return cudaSuccess; }

cudaError_t cudaDeviceGetPCIBusId(char* name, int size, int number) {
  std::snprintf(name, static_cast<size_t>(size), "0000:%02x:00.0", static_cast<unsigned>(number));
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }

// A function of the driver: the stub's libcuda has it under this name, or under that of its second version.
cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* result) {
  static void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  *function = driver ? dlsym(driver, symbol) : nullptr;
  if (driver && !*function) *function = dlsym(driver, (std::string(symbol) + "_v2").c_str());
  if (result) *result = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

// ---- errors

cudaError_t cudaGetLastError() { return lost() ? cudaErrorIllegalAddress : std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return lost() ? cudaErrorIllegalAddress : last_error; }

const char* cudaGetErrorName(cudaError_t error) {
  static thread_local char name[40];
  std::snprintf(name, sizeof name, "error %d of the stub device", static_cast<int>(error));
  return name;
}

const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorIllegalAddress: return "an illegal memory access was encountered";
    case cudaErrorNotReady: return "device not ready";
    case cudaErrorNotSupported: return "operation not supported";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorStreamCaptureUnsupported: return "operation not permitted when stream is capturing";
    case cudaErrorStreamCaptureInvalidated: return "operation failed due to a previous error during capture";
    case cudaErrorStreamCaptureMerge: return "operation would result in a merge of separate capture sequences";
    case cudaErrorStreamCaptureUnjoined: return "capturing stream has unjoined work";
    case cudaErrorStreamCaptureIsolation: return "dependency created on uncaptured work in another stream";
    case cudaErrorStreamCaptureWrongThread: return "attempt to terminate a thread-local capture from another thread";
    case cudaErrorCapturedEvent: return "operation not permitted on an event last recorded in a capturing stream";
    default: return cudaGetErrorName(error);
  }
}
}

// Launches: kernels are known by the names that torch's libraries register, and only written down.

#include <cxxabi.h>

#include <cstdlib>
#include <cstring>
#include <unordered_map>

#include "device.hpp"

namespace stub {

namespace {

// Kernels by the address of their host function, or of their name where they were loaded from a library.
std::unordered_map<const void*, std::string>& kernel_names() {
  static auto& all = *new std::unordered_map<const void*, std::string>;
  return all;
}

struct Configuration {
  dim3 grid, block;
  size_t shared_bytes;
  cudaStream_t stream;
};

// Of the launch that a compiled <<<...>>> is about to make.
thread_local Configuration pushed;

std::string name_of(const void* kernel) {
  const auto entry = kernel_names().find(kernel);
  if (entry == kernel_names().end()) return "a kernel without a name";
  int status = 0;
  char* readable = abi::__cxa_demangle(entry->second.c_str(), nullptr, nullptr, &status);
  const std::string name = readable ? readable : entry->second;
  std::free(readable);
  return name;
}

std::string sizes(const dim3& size) {
  return std::to_string(size.x) + "," + std::to_string(size.y) + "," + std::to_string(size.z);
}

cudaError_t launch_kernel(const void* kernel, const dim3& grid, const dim3& block, cudaStream_t stream) {
  Guard guard(the_lock());
  launch("kernel " + sizes(grid) + " " + sizes(block) + " " + name_of(kernel), stream);
  return cudaSuccess;
}

}  // namespace

bool& lost() {
  static bool is_lost = false;
  return is_lost;
}

void launch(const std::string& line, cudaStream_t stream) {
  static const char* illegal = std::getenv("STUB_GPU_ILLEGAL");
  if (illegal && line.ends_with(std::string(" ") + illegal)) lost() = true;
  submit(stream, {line}, [] { return forget_everything(), true; });
}

}  // namespace stub

using namespace stub;

extern "C" {

// ---- what compiled CUDA code calls when a library is loaded, and around <<<...>>>

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* host_function, char*, const char* name, int, uint3*, uint3*, dim3*,
                            dim3*, int*) {
  Guard guard(the_lock());
  kernel_names()[host_function] = name;
}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, CUstream_st* stream) {
  pushed = {grid, block, shared_bytes, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared_bytes, void* stream) {
  *grid = pushed.grid;
  *block = pushed.block;
  *shared_bytes = pushed.shared_bytes;
  *static_cast<cudaStream_t*>(stream) = pushed.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host_function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host_function));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, grid, block, stream);
}

cudaError_t __cudaLaunchKernel_ptsz(cudaKernel_t kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, grid, block, stream);
}

// ---- launches by name

cudaError_t cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t, cudaStream_t stream) {
  return launch_kernel(kernel, grid, block, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* kernel, void**) {
  return launch_kernel(kernel, config->gridDim, config->blockDim, config->stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* kernel, dim3 grid, dim3 block, void**, size_t,
                                        cudaStream_t stream) {
  return launch_kernel(kernel, grid, block, stream);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  submit(stream, {"host function"}, [=] { return function(data), true; });
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  if (cudaError_t error = refuse_in_capture("cudaStreamAddCallback")) return error;
  submit(stream, {"host function"}, [=] { return function(stream, cudaSuccess, data), true; });
  return cudaSuccess;
}

// ---- kernels of libraries that are loaded while the program runs

cudaError_t cudaLibraryLoadData(cudaLibrary_t* library, const void*, cudaJitOption*, void**, unsigned,
                                cudaLibraryOption*, void**, unsigned) {
  note("module loaded");
  if (cudaError_t error = refuse_in_capture("cudaLibraryLoadData")) return error;
  *library = reinterpret_cast<cudaLibrary_t>(library);
  return cudaSuccess;
}

cudaError_t cudaLibraryUnload(cudaLibrary_t) { return cudaSuccess; }

cudaError_t cudaLibraryGetKernel(cudaKernel_t* kernel, cudaLibrary_t, const char* name) {
  Guard guard(the_lock());
  char* key = strdup(name);  // an address of its own, for as long as the process lives
  kernel_names()[key] = name;
  *kernel = reinterpret_cast<cudaKernel_t>(key);
  return cudaSuccess;
}

// ---- what a kernel needs: nothing that would keep it from running

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  std::memset(attributes, 0, sizeof *attributes);
  attributes->maxThreadsPerBlock = 1024;
  attributes->numRegs = 32;
  attributes->ptxVersion = attributes->binaryVersion = 90;
  attributes->maxDynamicSharedSizeBytes = 49152;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }
cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t, cudaFuncAttribute, int, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* num_blocks, const void*, int num_threads,
                                                                   size_t, unsigned) {
  *num_blocks = num_threads > 512 ? 2 : 4;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* num_blocks, const void* kernel, int num_threads,
                                                          size_t shared_bytes) {
  return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(num_blocks, kernel, num_threads, shared_bytes, 0);
}

cudaError_t cudaGetSymbolAddress(void** address, const void* symbol) {
  *address = const_cast<void*>(symbol);
  return cudaSuccess;
}
}

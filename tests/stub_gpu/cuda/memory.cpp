// Memory: the device's is mapped from the host's and takes room only where it is written, which kernels never do.

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>

#include "device.hpp"

namespace stub {

namespace {

constexpr size_t page_bytes = 4096;
constexpr size_t default_total_bytes = 150'109'106'995;  // of an H200
constexpr int most_devices = 64;

struct Block {
  size_t num_bytes;
  int device;
};

std::map<const char*, Block>& device_blocks() {
  static auto& all = *new std::map<const char*, Block>;
  return all;
}

std::map<const char*, Block>& pinned_blocks() {
  static auto& all = *new std::map<const char*, Block>;
  return all;
}

size_t used_bytes[most_devices];

size_t total_bytes() {
  static const auto total = static_cast<size_t>(number_from_environment("STUB_GPU_BYTES", default_total_bytes));
  return total;
}

size_t whole_pages(size_t num_bytes) { return std::max<size_t>(1, (num_bytes + page_bytes - 1) / page_bytes) * page_bytes; }

// The block that holds an address, or nullptr.
const Block* block_at(const std::map<const char*, Block>& blocks, const void* address) {
  const char* place = static_cast<const char*>(address);
  auto next = blocks.upper_bound(place);
  if (next == blocks.begin()) return nullptr;
  --next;
  return place < next->first + next->second.num_bytes ? &next->second : nullptr;
}

cudaError_t allocate(void** address, size_t wanted_bytes) {
  Guard guard(the_lock());
  const size_t num_bytes = whole_pages(wanted_bytes);
  const int device = current_device();
  *address = nullptr;
  if (used_bytes[device] + num_bytes > total_bytes() || is_asked_for("full")) {
    note("out of memory");
    journal("out of memory");
    return failed(cudaErrorMemoryAllocation);
  }
  void* block = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (block == MAP_FAILED) return failed(cudaErrorMemoryAllocation);
  device_blocks()[static_cast<char*>(block)] = {num_bytes, device};
  used_bytes[device] += num_bytes;
  *address = block;
  return cudaSuccess;
}

}  // namespace

bool is_on_device(const void* address) {
  Guard guard(the_lock());
  return block_at(device_blocks(), address);
}

bool is_pinned(const void* address) {
  Guard guard(the_lock());
  return block_at(pinned_blocks(), address);
}

}  // namespace stub

using namespace stub;

extern "C" {

cudaError_t cudaMalloc(void** address, size_t num_bytes) {
  if (cudaError_t error = refuse_in_capture("cudaMalloc")) return error;
  return allocate(address, num_bytes);
}

cudaError_t cudaMallocAsync(void** address, size_t num_bytes, cudaStream_t) { return allocate(address, num_bytes); }

cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  if (cudaError_t error = refuse_in_capture("cudaFree")) return error;
  drain(nullptr);  // as on a GPU: what runs may still use it
  Guard guard(the_lock());
  const auto block = device_blocks().find(static_cast<char*>(address));
  if (block == device_blocks().end()) return failed(cudaErrorInvalidValue);
  forget(address, block->second.num_bytes);
  munmap(address, block->second.num_bytes);
  used_bytes[block->second.device] -= block->second.num_bytes;
  device_blocks().erase(block);
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* address, cudaStream_t) { return cudaFree(address); }

cudaError_t cudaHostAlloc(void** address, size_t num_bytes, unsigned) {
  if (cudaError_t error = refuse_in_capture("cudaHostAlloc")) return error;
  Guard guard(the_lock());
  *address = std::aligned_alloc(page_bytes, whole_pages(num_bytes));
  if (!*address) return failed(cudaErrorMemoryAllocation);
  pinned_blocks()[static_cast<char*>(*address)] = {whole_pages(num_bytes), 0};
  return cudaSuccess;
}

cudaError_t cudaFreeHost(void* address) {
  if (cudaError_t error = refuse_in_capture("cudaFreeHost")) return error;
  Guard guard(the_lock());
  pinned_blocks().erase(static_cast<char*>(address));
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaHostRegister(void* address, size_t num_bytes, unsigned) {
  Guard guard(the_lock());
  pinned_blocks()[static_cast<char*>(address)] = {num_bytes, 0};
  return cudaSuccess;
}

cudaError_t cudaHostUnregister(void* address) {
  Guard guard(the_lock());
  pinned_blocks().erase(static_cast<char*>(address));
  return cudaSuccess;
}

cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Guard guard(the_lock());
  *total = total_bytes();
  *free_bytes = total_bytes() - used_bytes[current_device()];
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Guard guard(the_lock());
  std::memset(attributes, 0, sizeof *attributes);
  attributes->type = cudaMemoryTypeUnregistered;
  attributes->device = -1;
  if (const Block* block = block_at(device_blocks(), address)) {
    attributes->type = cudaMemoryTypeDevice;
    attributes->device = block->device;
  } else if (is_pinned(address)) {
    attributes->type = cudaMemoryTypeHost;
  }
  attributes->devicePointer = attributes->hostPointer = const_cast<void*>(address);
  return cudaSuccess;
}

// Pools of the driver: torch sets them up only where it is told to use them.
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t* pool, int) {
  *pool = nullptr;
  return cudaSuccess;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return failed(cudaErrorNotSupported); }
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) { return failed(cudaErrorNotSupported); }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t, const cudaMemAccessDesc*, size_t) { return cudaSuccess; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t, size_t) { return cudaSuccess; }

// Memory of other processes cannot be mapped.
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t*, void*) { return failed(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenMemHandle(void**, cudaIpcMemHandle_t, unsigned) { return failed(cudaErrorNotSupported); }
cudaError_t cudaIpcCloseMemHandle(void*) { return cudaSuccess; }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t*, cudaEvent_t) { return failed(cudaErrorNotSupported); }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t*, cudaIpcEventHandle_t) { return failed(cudaErrorNotSupported); }
}

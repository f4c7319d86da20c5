// Copies: bytes move for real, except that the host gets zeros for what kernels would have computed.

#include <cstring>
#include <memory>

#include "device.hpp"

namespace stub {

namespace {

// Stretches of device memory whose bytes are known, by their beginnings; they never overlap.
std::map<const char*, const char*>& known() {
  static auto& all = *new std::map<const char*, const char*>;
  return all;
}

const char* place_of(const void* address) {
  return is_on_device(address) ? "device" : is_pinned(address) ? "pinned" : "pageable";
}

bool is_pageable(const void* address) { return !is_on_device(address) && !is_pinned(address); }

void move(void* to, const void* from, size_t num_bytes) {
  const bool is_real = !is_on_device(from) || is_known(from, num_bytes);
  if (is_real)
    std::memmove(to, from, num_bytes);
  else if (!is_on_device(to))
    std::memset(to, 0, num_bytes);
  if (is_on_device(to)) is_real ? learn(to, num_bytes) : forget(to, num_bytes);
}

Node copy_node(const void* to, const void* from, size_t num_bytes) {
  return {std::string("copy ") + place_of(from) + "->" + place_of(to) + " " + std::to_string(num_bytes)};
}

Task copy_task(void* to, const void* from, size_t num_bytes) {
  if (!is_pageable(from)) return [=] { return move(to, from, num_bytes), true; };
  // The caller may overwrite pageable memory as soon as the call returns.
  const char* bytes = static_cast<const char*>(from);
  auto staged = std::make_shared<std::vector<char>>(bytes, bytes + num_bytes);
  return [=] { return move(to, staged->data(), num_bytes), true; };
}

}  // namespace

bool is_known(const void* address, size_t num_bytes) {
  Guard guard(the_lock());
  const char* start = static_cast<const char*>(address);
  auto next = known().upper_bound(start);
  if (next == known().begin()) return false;
  --next;
  return start + num_bytes <= next->second;
}

void forget(const void* address, size_t num_bytes) {
  Guard guard(the_lock());
  const char *start = static_cast<const char*>(address), *end = start + num_bytes;
  auto stretch = known().lower_bound(start);
  if (stretch != known().begin() && std::prev(stretch)->second > start) --stretch;
  while (stretch != known().end() && stretch->first < end) {
    const auto [first, last] = *stretch;
    stretch = known().erase(stretch);
    if (first < start) known()[first] = start;
    if (last > end) known()[end] = last;
  }
}

void learn(const void* address, size_t num_bytes) {
  Guard guard(the_lock());
  forget(address, num_bytes);
  const char* start = static_cast<const char*>(address);
  known()[start] = start + num_bytes;
}

void forget_everything() {
  Guard guard(the_lock());
  known().clear();
}

}  // namespace stub

using namespace stub;

extern "C" {

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t num_bytes, cudaMemcpyKind, cudaStream_t handle) {
  if (num_bytes == 0) return cudaSuccess;
  {
    Guard guard(the_lock());
    Stream& stream = stream_of(handle);
    const bool waits = is_pageable(to) || is_pageable(from);
    if (stream.capture && waits) return break_capture(*stream.capture, "a copy with pageable memory");
    submit(handle, copy_node(to, from, num_bytes), copy_task(to, from, num_bytes));
    if (!is_pageable(to)) return cudaSuccess;
  }
  drain(&stream_of(handle));  // the call returns when pageable memory has been written
  return cudaSuccess;
}

cudaError_t cudaMemcpy(void* to, const void* from, size_t num_bytes, cudaMemcpyKind kind) {
  if (cudaError_t error = refuse_in_capture("cudaMemcpy")) return error;
  cudaMemcpyAsync(to, from, num_bytes, kind, nullptr);
  note("wait stream");
  drain(&stream_of(nullptr));
  return cudaSuccess;
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t num_bytes, cudaStream_t stream) {
  return cudaMemcpyAsync(to, from, num_bytes, cudaMemcpyDefault, stream);
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  submit(stream, copy_node(to, from, width * height), [=] {
    for (size_t row = 0; row < height; ++row)
      move(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch, width);
    return true;
  });
  if (is_pageable(to) || is_pageable(from)) drain(&stream_of(stream));
  return cudaSuccess;
}

cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) {
  return refuse_in_capture("cudaMemcpyToSymbol");
}

// Nothing is written: a large cache would take real memory, and what the host reads of it is zeros anyway.
cudaError_t cudaMemsetAsync(void* address, int, size_t num_bytes, cudaStream_t stream) {
  submit(stream, {"memset " + std::to_string(num_bytes)}, [=] { return forget(address, num_bytes), true; });
  return cudaSuccess;
}

cudaError_t cudaMemset(void* address, int value, size_t num_bytes) {
  return cudaMemsetAsync(address, value, num_bytes, nullptr);
}
}

// Streams: queues of tasks, the device's thread that works on them, and the host's waits for them.

#include <unistd.h>

#include <condition_variable>
#include <thread>
#include <unordered_map>

#include "device.hpp"

namespace stub {

namespace {

constexpr int nap_us = 20;

std::unordered_map<cudaStream_t, Stream*>& streams() {
  static auto& all = *new std::unordered_map<cudaStream_t, Stream*>;
  return all;
}

std::condition_variable_any& work_has_come() {
  static auto& condition = *new std::condition_variable_any;
  return condition;
}

bool has_work() {
  for (const auto& [handle, stream] : streams())
    if (!stream->waiting.empty()) return true;
  return false;
}

// Does the tasks of a stream in their order, up to the first that has to wait.
bool advance(Stream& stream) {
  bool has_moved = false;
  while (!stream.waiting.empty() && !is_asked_for("stuck") && stream.waiting.front()()) {
    stream.waiting.pop_front();
    has_moved = true;
  }
  return has_moved;
}

// The device: works while the host does something else. It begins with the first task that has to wait.
void work_for_ever() {
  std::unique_lock<std::recursive_mutex> lock(the_lock());
  while (true) {
    work_has_come().wait(lock, has_work);
    if (!progress()) {
      lock.unlock();
      usleep(nap_us);
      lock.lock();
    }
  }
}

void start_device() {
  static bool has_started = false;
  if (has_started) return;
  has_started = true;
  std::thread(work_for_ever).detach();
}

}  // namespace

Stream& stream_of(cudaStream_t handle) {
  Guard guard(the_lock());
  Stream*& stream = streams()[handle];
  if (!stream) stream = new Stream;  // the default stream, or one of the driver's names for it
  return *stream;
}

void submit(cudaStream_t handle, Node node, Task task) {
  Guard guard(the_lock());
  Stream& stream = stream_of(handle);
  if (stream.capture) {
    add_node(*stream.capture, stream, std::move(node));
    return;
  }
  if (is_this_thread_capturing()) fault("launched outside of this thread's capture: " + node.line);
  note(node.line);
  push(stream, std::move(task));
}

void push(Stream& stream, Task task) {
  stream.waiting.push_back(std::move(task));
  advance(stream);
  if (!stream.waiting.empty()) {
    start_device();
    work_has_come().notify_one();
  }
}

bool progress() {
  Guard guard(the_lock());
  bool has_moved = false;
  for (const auto& [handle, stream] : streams()) has_moved |= advance(*stream);
  return has_moved;
}

void drain(Stream* stream) {
  while (true) {
    {
      Guard guard(the_lock());
      progress();
      if (stream ? stream->waiting.empty() : !has_work()) {
        // A device that was asked to be stuck is so even if it has nothing to do.
        if (!is_asked_for("stuck")) return;
      }
    }
    usleep(nap_us);
  }
}

namespace {

cudaError_t make_stream(cudaStream_t* handle, bool is_blocking, int priority) {
  if (cudaError_t error = refuse_in_capture("cudaStreamCreate")) return error;
  Guard guard(the_lock());
  auto* stream = new Stream;
  stream->is_blocking = is_blocking;
  stream->priority = priority;
  *handle = reinterpret_cast<cudaStream_t>(stream);
  streams()[*handle] = stream;
  return cudaSuccess;
}

}  // namespace

}  // namespace stub

using namespace stub;

extern "C" {

cudaError_t cudaStreamCreate(cudaStream_t* stream) { return make_stream(stream, true, 0); }

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return make_stream(stream, !(flags & cudaStreamNonBlocking), 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int priority) {
  return make_stream(stream, !(flags & cudaStreamNonBlocking), priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = stream_of(stream).priority;
  return cudaSuccess;
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  Guard guard(the_lock());
  Stream& stream = stream_of(handle);
  if (stream.capture) return break_capture(*stream.capture, "cudaStreamQuery of a capturing stream");
  if (cudaError_t error = refuse_in_capture("cudaStreamQuery")) return error;
  progress();
  return stream.waiting.empty() && !is_asked_for("stuck") ? cudaSuccess : cudaErrorNotReady;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  Stream& stream = stream_of(handle);
  {
    Guard guard(the_lock());
    if (stream.capture) return break_capture(*stream.capture, "cudaStreamSynchronize of a capturing stream");
    if (cudaError_t error = refuse_in_capture("cudaStreamSynchronize")) return error;
    note("wait stream");
  }
  drain(&stream);
  return lost() ? cudaErrorIllegalAddress : cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  if (cudaError_t error = refuse_in_capture("cudaDeviceSynchronize")) return error;
  note("wait device");
  drain(nullptr);
  return lost() ? cudaErrorIllegalAddress : cudaSuccess;
}
}

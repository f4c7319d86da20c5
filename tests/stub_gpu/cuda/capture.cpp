// Stream capture: what belongs to a capture, what is not allowed during one, and how one ends.
//
// The rules are those of the CUDA programming guide. A call that may disturb a capture breaks it: global captures are
// disturbed by such calls of every thread, thread-local ones by those of their own thread, relaxed ones by none.

#include <algorithm>

#include "device.hpp"

namespace stub {

namespace {

std::vector<std::unique_ptr<Capture>>& captures() {
  static auto& all = *new std::vector<std::unique_ptr<Capture>>;
  return all;
}

thread_local cudaStreamCaptureMode thread_mode = cudaStreamCaptureModeGlobal;

bool is_disturbed(const Capture& capture) {
  const bool is_own = capture.thread == this_thread();
  const bool is_own_and_strict = is_own && capture.mode != cudaStreamCaptureModeRelaxed;
  switch (thread_mode) {
    case cudaStreamCaptureModeRelaxed:
      return false;
    case cudaStreamCaptureModeThreadLocal:
      return is_own_and_strict;
    default:
      return is_own_and_strict || (!is_own && capture.mode == cudaStreamCaptureModeGlobal);
  }
}

// Whether everything that was captured comes before the end of the stream where the capture began.
bool is_joined(Capture& capture) {
  Seen& seen_by_origin = capture.streams[capture.origin];
  return std::all_of(capture.streams.begin(), capture.streams.end(), [&](auto& entry) {
    auto& [stream, seen] = entry;
    return seen_by_origin[stream] >= seen[stream];
  });
}

cudaStreamCaptureStatus status_of(const Capture* capture) {
  if (!capture) return cudaStreamCaptureStatusNone;
  return capture->broken.empty() ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusInvalidated;
}

}  // namespace

cudaError_t break_capture(Capture& capture, const std::string& why, cudaError_t error) {
  Guard guard(the_lock());
  if (capture.broken.empty()) capture.broken = why;
  fault("in a capture: " + why);
  return failed(error);
}

cudaError_t refuse_in_capture(const char* function) {
  Guard guard(the_lock());
  cudaError_t error = cudaSuccess;
  for (auto& capture : captures())
    if (is_disturbed(*capture)) error = break_capture(*capture, function);
  return error;
}

void add_node(Capture& capture, Stream& stream, Node node) {
  capture.nodes.push_back(std::move(node));
  ++capture.streams[&stream][&stream];
}

bool is_this_thread_capturing() {
  return std::any_of(captures().begin(), captures().end(),
                     [](const auto& capture) { return capture->thread == this_thread(); });
}

Capture* live_capture(const Event& event) {
  if (!event.capture) return nullptr;
  for (auto& capture : captures())
    if (capture->id == event.capture_id) return capture.get();
  return nullptr;
}

}  // namespace stub

using namespace stub;

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  static unsigned long long next_id = 1;
  Guard guard(the_lock());
  Stream& stream = stream_of(handle);
  if (!handle || handle == cudaStreamLegacy) return failed(cudaErrorStreamCaptureUnsupported);
  if (stream.capture) return failed(cudaErrorIllegalState);
  auto capture = std::make_unique<Capture>();
  capture->id = next_id++;
  capture->mode = mode;
  capture->thread = this_thread();
  capture->origin = &stream;
  capture->streams[&stream];
  stream.capture = capture.get();
  captures().push_back(std::move(capture));
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*,
                                          size_t, cudaStreamCaptureMode) {
  return failed(cudaErrorNotSupported);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* graph) {
  Guard guard(the_lock());
  Capture* capture = stream_of(handle).capture;
  *graph = nullptr;
  if (!capture) return failed(cudaErrorIllegalState);
  if (capture->origin != &stream_of(handle)) return failed(cudaErrorStreamCaptureUnmatched);
  if (capture->mode != cudaStreamCaptureModeRelaxed && capture->thread != this_thread())
    return failed(cudaErrorStreamCaptureWrongThread);
  cudaError_t error = capture->broken.empty() ? cudaSuccess : failed(cudaErrorStreamCaptureInvalidated);
  if (!error && !is_joined(*capture))
    error = break_capture(*capture, "work on another stream was not joined", cudaErrorStreamCaptureUnjoined);
  for (auto& [stream, seen] : capture->streams) stream->capture = nullptr;
  if (!error) *graph = make_graph(std::move(capture->nodes));
  const auto is_it = [&](const auto& each) { return each.get() == capture; };
  captures().erase(std::find_if(captures().begin(), captures().end(), is_it));
  return error;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  Guard guard(the_lock());
  *status = status_of(stream_of(stream).capture);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* num_dependencies) {
  Guard guard(the_lock());
  const Capture* capture = stream_of(stream).capture;
  *status = status_of(capture);
  if (capture && id) *id = capture->id;
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (num_dependencies) *num_dependencies = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                unsigned) {
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, thread_mode);
  return cudaSuccess;
}
}

// Events: marks in streams, which other streams and the host wait for; during a capture, what joins streams to it.

#include <unistd.h>

#include "device.hpp"

namespace stub {

namespace {

constexpr int nap_us = 20;

std::shared_ptr<Event>& event_of(cudaEvent_t handle) { return *reinterpret_cast<std::shared_ptr<Event>*>(handle); }

bool has_passed(const Event& event) { return event.num_passed >= event.num_recorded && !is_asked_for("stuck"); }

// The host may not look at an event that was last recorded in a capture, nor at any event during most captures.
cudaError_t refuse_look(const Event& event, const char* function) {
  if (!event.capture) return refuse_in_capture(function);
  if (Capture* capture = live_capture(event)) break_capture(*capture, std::string(function) + " of a captured event");
  return failed(cudaErrorCapturedEvent);
}

// Takes a stream into the capture of an event, or tells it what the event has seen.
cudaError_t wait_in_capture(Stream& stream, const Event& event) {
  Capture* capture = live_capture(event);
  if (!capture) {
    // An event that was never recorded is nothing to wait for.
    if (event.num_recorded == 0) return cudaSuccess;
    return break_capture(*stream.capture, "a capturing stream waits for an event from outside",
                         cudaErrorStreamCaptureIsolation);
  }
  if (stream.capture && stream.capture != capture)
    return break_capture(*capture, "two captures are joined", cudaErrorStreamCaptureMerge);
  stream.capture = capture;
  Seen& seen = capture->streams[&stream];
  for (const auto& [other, number] : event.seen) seen[other] = std::max(seen[other], number);
  return cudaSuccess;
}

}  // namespace

}  // namespace stub

using namespace stub;

extern "C" {

cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event_handle, unsigned) {
  Guard guard(the_lock());
  Stream& stream = stream_of(handle);
  std::shared_ptr<Event> event = event_of(event_handle);
  if (stream.capture || live_capture(*event)) return wait_in_capture(stream, *event);
  const uint64_t number = event->num_recorded;
  if (event->num_passed >= number) return cudaSuccess;
  push(stream, [event, number] { return event->num_passed >= number; });
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* handle, unsigned flags) {
  auto* event = new std::shared_ptr<Event>(new Event);
  (*event)->has_time = !(flags & cudaEventDisableTiming);
  *handle = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* handle) { return cudaEventCreateWithFlags(handle, cudaEventDefault); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  Guard guard(the_lock());
  delete &event_of(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  Guard guard(the_lock());
  Stream& stream = stream_of(stream_handle);
  std::shared_ptr<Event> event = event_of(handle);
  event->capture = stream.capture;
  if (stream.capture) {
    event->capture_id = stream.capture->id;
    event->seen = stream.capture->streams[&stream];
    return cudaSuccess;
  }
  const uint64_t number = ++event->num_recorded;
  push(stream, [event, number] {
    event->num_passed = std::max(event->num_passed, number);
    event->passed_at = seconds_now();
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  Guard guard(the_lock());
  Event& event = *event_of(handle);
  if (cudaError_t error = refuse_look(event, "cudaEventQuery")) return error;
  progress();
  if (!has_passed(event)) return cudaErrorNotReady;
  note("poll event");
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  std::shared_ptr<Event> event = event_of(handle);
  {
    Guard guard(the_lock());
    if (cudaError_t error = refuse_look(*event, "cudaEventSynchronize")) return error;
    note("wait event");
  }
  while (true) {
    {
      Guard guard(the_lock());
      progress();
      if (has_passed(*event)) return cudaSuccess;
    }
    usleep(nap_us);
  }
}

cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Guard guard(the_lock());
  const Event &first = *event_of(start), &last = *event_of(end);
  if (!first.has_time || !last.has_time || !first.num_recorded || !last.num_recorded)
    return failed(cudaErrorInvalidResourceHandle);
  if (!has_passed(first) || !has_passed(last)) return failed(cudaErrorNotReady);
  *milliseconds = static_cast<float>(1e3 * (last.passed_at - first.passed_at));
  return cudaSuccess;
}
}

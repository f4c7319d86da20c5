// What the parts of the stub device share: streams, events, captures, graphs, and the log that tests read.
//
// A stream is a queue of tasks. A kernel is a task that computes nothing and ends at once, a collective is a task that
// ends when its peers have come. So what waits behind a collective whose peer is gone waits for ever, as on a GPU.
// All state is guarded by one lock. A thread of the process, the device, goes through the queues that are not empty.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace stub {

using Guard = std::lock_guard<std::recursive_mutex>;
std::recursive_mutex& the_lock();

// ---- journal.cpp: what happened

// Adds a line to the log; its first word is its kind.
void note(const std::string& line);
// Notes what a program should not have done, and adds it to the file STUB_GPU_JOURNAL at once.
void fault(const std::string& what);
// Adds a line to the file STUB_GPU_JOURNAL, which outlives a process that is killed.
void journal(const std::string& line);
// A setting of the environment as a number, or the default.
long long number_from_environment(const char* name, long long otherwise);
// Whether the file NAME or NAME.RANK is in the folder STUB_GPU_CONTROL, by which tests disturb a running process.
bool is_asked_for(const char* name);
double seconds_now();
long this_thread();

// ---- communicators.cpp: ranks that meet

struct Communicator;
// A collective that has been launched: returns whether all ranks have come; it is called until it returns true.
using Meeting = std::function<bool()>;
// A collective without values, as graphs replay it.
Meeting meet(std::shared_ptr<Communicator> communicator);

// ---- streams.cpp and events.cpp: queues of tasks

// A part of a stream's work: returns whether it is done; it is called until it returns true.
using Task = std::function<bool()>;

struct Capture;

struct Stream {
  bool is_blocking = true;
  int priority = 0;
  Capture* capture = nullptr;
  std::deque<Task> waiting;
};

// What a stream that takes part in a capture knows of: how many nodes of each stream come before what it adds next.
using Seen = std::map<Stream*, size_t>;

struct Event {
  bool has_time = true;
  uint64_t num_recorded = 0;
  uint64_t num_passed = 0;
  double passed_at = 0;
  Capture* capture = nullptr;  // in which it was last recorded, if in any
  unsigned long long capture_id = 0;
  Seen seen;  // what comes before it there
};

// A node of a graph: the line of the log that a launch would have been, and the communicator that it uses, if any;
// `meets` says whether it waits for all ranks of it.
struct Node {
  std::string line;
  std::shared_ptr<Communicator> communicator = nullptr;
  bool meets = false;
};

Stream& stream_of(cudaStream_t handle);
// Launches work: a node of the graph if the stream is capturing, else a line of the log and a task of the stream.
void submit(cudaStream_t handle, Node node, Task task);
// Adds a task to a stream, and does what can be done now.
void push(Stream& stream, Task task);
// Waits on this thread until all tasks of a stream, or of all streams, are done.
void drain(Stream* stream);
// Does what can be done now; returns whether anything was.
bool progress();

// ---- capture.cpp: stream capture and its rules

struct Capture {
  unsigned long long id;
  cudaStreamCaptureMode mode;
  long thread;
  Stream* origin;
  std::vector<Node> nodes;
  std::map<Stream*, Seen> streams;  // those that take part, and what each has seen
  std::string broken;               // why it has become invalid, or empty
};

// Invalidates a capture, notes a fault, and returns the error.
cudaError_t break_capture(Capture& capture, const std::string& why, cudaError_t error = cudaErrorStreamCaptureUnsupported);
// Called by functions that must not be called during a capture: breaks those that this call disturbs.
cudaError_t refuse_in_capture(const char* function);
// Adds a node to the capture of a stream.
void add_node(Capture& capture, Stream& stream, Node node);
// Whether a capture of this thread is under way.
bool is_this_thread_capturing();
// The capture that an event belongs to, if that is still under way.
Capture* live_capture(const Event& event);

// ---- graphs.cpp

// Makes a graph of what was captured.
cudaGraph_t make_graph(std::vector<Node> nodes);
// How many instantiated graphs hold collectives of a communicator; of any, or none, for nullptr.
size_t num_live_graphs(const Communicator* communicator);

// ---- memory.cpp and copies.cpp

bool is_on_device(const void* address);
bool is_pinned(const void* address);
// Bytes of the device are known if the host or a peer has sent them and no kernel could have overwritten them since.
bool is_known(const void* address, size_t num_bytes);
void learn(const void* address, size_t num_bytes);
void forget(const void* address, size_t num_bytes);
void forget_everything();

// ---- launches.cpp and properties.cpp

int current_device();
// Remembers the error for cudaGetLastError, and returns it.
cudaError_t failed(cudaError_t error);
// Launches a kernel, which computes nothing.
void launch(const std::string& line, cudaStream_t stream);
// Whether a kernel that STUB_GPU_ILLEGAL names has been launched: every later call fails, as after an illegal access.
bool& lost();

}  // namespace stub

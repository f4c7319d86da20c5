// Graphs: lists of nodes. A replay takes STUB_GPU_REPLAY_US microseconds, and as long as the peers of its collectives.

#include <algorithm>
#include <cstdio>
#include <set>

#include "device.hpp"

namespace stub {

namespace {

struct Graph {
  size_t number;
  std::vector<Node> nodes;
};

// Graphs by the number of their capture; what they were made of is kept for tests, also when they are gone.
std::vector<std::shared_ptr<const Graph>>& captured() {
  static auto& all = *new std::vector<std::shared_ptr<const Graph>>;
  return all;
}

using Instance = std::shared_ptr<const Graph>;

std::set<Instance*>& instances() {
  static auto& all = *new std::set<Instance*>;
  return all;
}

Instance& instance_of(cudaGraphExec_t handle) { return *reinterpret_cast<Instance*>(handle); }
Instance& graph_of(cudaGraph_t handle) { return *reinterpret_cast<Instance*>(handle); }

bool holds(const Graph& graph, const Communicator* communicator) {
  return !communicator || std::any_of(graph.nodes.begin(), graph.nodes.end(), [&](const Node& node) {
    return node.communicator.get() == communicator;
  });
}

// A replay meets the ranks of each of its communicators once, however often its kernels would.
Task replay(const Graph& graph) {
  static const double replay_s = 1e-6 * static_cast<double>(number_from_environment("STUB_GPU_REPLAY_US", 0));
  auto meetings = std::make_shared<std::deque<Meeting>>();
  std::set<Communicator*> met;
  for (const Node& node : graph.nodes)
    if (node.meets && met.insert(node.communicator.get()).second) meetings->push_back(meet(node.communicator));
  auto ends_at = std::make_shared<double>(0);
  return [meetings, ends_at] {
    forget_everything();
    if (*ends_at == 0) *ends_at = seconds_now() + replay_s;
    while (!meetings->empty() && meetings->front()()) meetings->pop_front();
    return meetings->empty() && seconds_now() >= *ends_at;
  };
}

}  // namespace

cudaGraph_t make_graph(std::vector<Node> nodes) {
  const size_t number = captured().size();
  auto graph = std::make_shared<const Graph>(Graph{number, std::move(nodes)});
  captured().push_back(graph);
  note("captured " + std::to_string(number));
  return reinterpret_cast<cudaGraph_t>(new Instance(graph));
}

size_t num_live_graphs(const Communicator* communicator) {
  Guard guard(the_lock());
  return static_cast<size_t>(std::count_if(instances().begin(), instances().end(), [&](const Instance* instance) {
    return holds(**instance, communicator);
  }));
}

}  // namespace stub

using namespace stub;

extern "C" {

// Writes the nodes of a captured graph to a file, a line for each; returns how many there are, or -1.
long stub_write_graph(long number, const char* path) {
  Guard guard(the_lock());
  if (number < 0 || static_cast<size_t>(number) >= captured().size()) return -1;
  FILE* file = std::fopen(path, "w");
  if (!file) return -1;
  const auto& nodes = captured()[static_cast<size_t>(number)]->nodes;
  for (const Node& node : nodes) std::fprintf(file, "%s\n", node.line.c_str());
  std::fclose(file);
  return static_cast<long>(nodes.size());
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* handle, cudaGraph_t graph, unsigned long long) {
  Guard guard(the_lock());
  auto* instance = new Instance(graph_of(graph));
  instances().insert(instance);
  *handle = reinterpret_cast<cudaGraphExec_t>(instance);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t handle, cudaStream_t stream) {
  Guard guard(the_lock());
  const Instance graph = instance_of(handle);
  submit(stream, {"replay " + std::to_string(graph->number)}, replay(*graph));
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  Guard guard(the_lock());
  delete &graph_of(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t handle) {
  Guard guard(the_lock());
  Instance* instance = &instance_of(handle);
  note("graph destroyed " + std::to_string((*instance)->number));
  instances().erase(instance);
  delete instance;
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* num_nodes) {
  Guard guard(the_lock());
  *num_nodes = graph_of(graph)->nodes.size();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* number) {
  *number = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphAddNode(cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                             cudaGraphNodeParams*) {
  return failed(cudaErrorNotSupported);
}

cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned) {
  return failed(cudaErrorNotSupported);
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
}

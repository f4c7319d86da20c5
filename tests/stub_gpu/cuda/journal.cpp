// The log of the stub device, the functions by which tests read it, and the environment and files that steer it.

#include <fcntl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "device.hpp"

namespace stub {

namespace {

constexpr size_t most_lines = 2'000'000;

// Never destroyed: threads of torch call CUDA until the very end of the process.
std::vector<std::string>& lines() {
  static auto& log = *new std::vector<std::string>;
  return log;
}

}  // namespace

std::recursive_mutex& the_lock() {
  static auto& lock = *new std::recursive_mutex;
  return lock;
}

void note(const std::string& line) {
  Guard guard(the_lock());
  if (lines().size() < most_lines) lines().push_back(line);
}

void journal(const std::string& line) {
  static const char* path = std::getenv("STUB_GPU_JOURNAL");
  if (!path) return;
  const char* rank = std::getenv("RANK");
  const std::string text = std::string("rank ") + (rank ? rank : "0") + ": " + line + "\n";
  const int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (file < 0) return;
  // One write of a line is whole, also when several ranks write.
  [[maybe_unused]] const ssize_t written = write(file, text.data(), text.size());
  close(file);
}

void fault(const std::string& what) {
  note("fault " + what);
  journal("fault: " + what);
}

long long number_from_environment(const char* name, long long otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoll(value) : otherwise;
}

bool is_asked_for(const char* name) {
  static const char* folder = std::getenv("STUB_GPU_CONTROL");
  if (!folder) return false;
  const std::string path = std::string(folder) + "/" + name;
  if (access(path.c_str(), F_OK) == 0) return true;
  const char* rank = std::getenv("RANK");
  return access((path + "." + (rank ? rank : "0")).c_str(), F_OK) == 0;
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

long this_thread() { return syscall(SYS_gettid); }

}  // namespace stub

extern "C" {

// Empties the log.
void stub_reset() {
  stub::Guard guard(stub::the_lock());
  stub::lines().clear();
}

// Writes the log to a file, a line for each event; returns how many there are, or -1 if the file cannot be written.
long stub_write_log(const char* path) {
  stub::Guard guard(stub::the_lock());
  FILE* file = std::fopen(path, "w");
  if (!file) return -1;
  for (const std::string& line : stub::lines()) std::fprintf(file, "%s\n", line.c_str());
  std::fclose(file);
  return static_cast<long>(stub::lines().size());
}

// How many instantiated graphs exist.
long stub_num_live_graphs() { return static_cast<long>(stub::num_live_graphs(nullptr)); }

// A launch through the driver, by Triton's kernels; called by the stub's libcuda.
void stub_launch(const char* line, cudaStream_t stream) { stub::launch(line, stream); }

// Whether kernels can read an address; called by the stub's libcuda.
int stub_can_access(const void* address) { return stub::is_on_device(address) || stub::is_pinned(address); }

// Code was loaded by the driver, which no capture allows; called by the stub's libcuda.
int stub_load_module() {
  stub::note("module loaded");
  return stub::refuse_in_capture("loading a module");
}
}

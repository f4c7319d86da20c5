// NCCL's communicators: how they begin, split and end, and how their ranks meet.

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>

#include "ranks.hpp"

namespace stub {

Handle& communicator_of(ncclComm_t handle) { return *reinterpret_cast<Handle*>(handle); }

void write_nothing(Message& message) {
  message.is_known = false;
  message.num_bytes = 0;
}

Meeting make_meeting(Handle communicator, Exchange exchange) {
  auto number = std::make_shared<uint64_t>(0);
  auto has_arrived = std::make_shared<bool>(false);
  return [=] {
    Communicator& own = *communicator;
    if (own.has_ended) return true;  // aborted: its kernels end
    if (!own.board) {
      static auto& message = *new Message;
      exchange.write(message);
      for (int rank = 0; rank < own.size; ++rank) exchange.read(rank, message);
      return true;
    }
    if (*number == 0) *number = ++own.num_meetings;
    Seat* const seats = own.board->seats;
    const auto all = [&](std::atomic<uint64_t> Seat::*count, uint64_t least) {
      return std::all_of(seats, seats + own.size, [&](const Seat& seat) { return (seat.*count).load() >= least; });
    };
    if (!*has_arrived) {
      if (!all(&Seat::num_left, *number - 1)) return false;
      exchange.write(seats[own.rank].message);
      seats[own.rank].num_arrived = *number;
      *has_arrived = true;
    }
    if (!all(&Seat::num_arrived, *number)) return false;
    for (int rank = 0; rank < own.size; ++rank) exchange.read(rank, seats[rank].message);
    seats[own.rank].num_left = *number;
    return true;
  };
}

Meeting meet(std::shared_ptr<Communicator> communicator) {
  return make_meeting(std::move(communicator), {write_nothing, [](int, const Message&) {}});
}

namespace {

ncclResult_t make_communicator(ncclComm_t* handle, const std::string& name, int size, int rank) {
  if (refuse_in_capture("making a communicator")) return ncclInvalidUsage;
  Board* board = nullptr;
  if (!number_from_environment("STUB_GPU_ALONE", 0)) {
    board = join_board(name, size);
    if (!board) return ncclSystemError;
  }
  *handle = reinterpret_cast<ncclComm_t>(new Handle(new Communicator{name, rank, size, board}));
  journal("communicator of " + std::to_string(size) + " ranks begins");
  return ncclSuccess;
}

// Communicators that have ended are kept: graphs and tasks may still name them.
ncclResult_t end_communicator(ncclComm_t handle, const char* how) {
  Guard guard(the_lock());
  Communicator& communicator = *communicator_of(handle);
  if (communicator.has_ended) return ncclSuccess;
  communicator.has_ended = true;
  const std::string line = std::string("communicator ") + how + ", graphs that use it: " +
                           std::to_string(num_live_graphs(&communicator));
  note(line);
  journal(line);
  return ncclSuccess;
}

}  // namespace

}  // namespace stub

using namespace stub;

extern "C" {

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  static const char digits[] = "0123456789abcdef";
  std::random_device random;
  std::memset(id->internal, 0, sizeof id->internal);
  for (int place = 0; place < 32; ++place) id->internal[place] = digits[random() % 16];
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* handle, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  return make_communicator(handle, id.internal, size, rank);
}

ncclResult_t ncclCommInitRank(ncclComm_t* handle, int size, ncclUniqueId id, int rank) {
  return make_communicator(handle, id.internal, size, rank);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t* handle, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t*) {
  return make_communicator(handle, ids[0].internal, size, rank);
}

// All ranks tell each other their colour and key; those of one colour, in the order of their keys, are the new group.
ncclResult_t ncclCommSplit(ncclComm_t handle, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  const Handle parent = communicator_of(handle);
  struct Wish {
    int color, key, rank;
  };
  std::vector<Wish> wishes;
  const Wish own{color, key, parent->rank};
  const Exchange exchange{[&](Message& message) { std::memcpy(message.bytes, &own, sizeof own); },
                          [&](int rank, const Message& message) {
                            Wish wish;
                            std::memcpy(&wish, message.bytes, sizeof wish);
                            wish.rank = rank;
                            if (wish.color == color) wishes.push_back(wish);
                          }};
  const Meeting meeting = make_meeting(parent, exchange);
  const auto has_met = [&] {
    Guard guard(the_lock());
    return meeting();
  };
  while (!has_met()) usleep(100);
  *made = nullptr;
  const std::string name = parent->name + "-" + std::to_string(++parent->num_splits) + "-" + std::to_string(color);
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::stable_sort(wishes.begin(), wishes.end(), [](const Wish& a, const Wish& b) { return a.key < b.key; });
  const auto place = std::find_if(wishes.begin(), wishes.end(), [&](const Wish& w) { return w.rank == own.rank; });
  return make_communicator(made, name, static_cast<int>(wishes.size()), static_cast<int>(place - wishes.begin()));
}

ncclResult_t ncclCommAbort(ncclComm_t handle) { return end_communicator(handle, "aborted"); }
ncclResult_t ncclCommDestroy(ncclComm_t handle) { return end_communicator(handle, "destroyed"); }
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }

ncclResult_t ncclCommCount(ncclComm_t handle, int* size) {
  *size = communicator_of(handle)->size;
  return ncclSuccess;
}

ncclResult_t ncclCommUserRank(ncclComm_t handle, int* rank) {
  *rank = communicator_of(handle)->rank;
  return ncclSuccess;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
  *error = ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclGetVersion(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* ncclGetErrorString(ncclResult_t) { return "error of the stub's NCCL"; }
const char* ncclGetLastError(ncclComm_t) { return ""; }
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }

// ---- memory: registered windows are accepted, and change nothing

ncclResult_t ncclMemAlloc(void** address, size_t num_bytes) {
  return cudaMalloc(address, num_bytes) ? ncclUnhandledCudaError : ncclSuccess;
}
ncclResult_t ncclMemFree(void* address) { return cudaFree(address) ? ncclUnhandledCudaError : ncclSuccess; }

ncclResult_t ncclCommRegister(ncclComm_t, void*, size_t, void** handle) {
  *handle = nullptr;
  return ncclSuccess;
}
ncclResult_t ncclCommDeregister(ncclComm_t, void*) { return ncclSuccess; }

#if NCCL_VERSION_CODE >= 22700
ncclResult_t ncclCommWindowRegister(ncclComm_t, void* buffer, size_t num_bytes, ncclWindow_t* window, int) {
  note("nccl window " + std::to_string(num_bytes));
  *window = reinterpret_cast<ncclWindow_t>(buffer);
  return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t, ncclWindow_t) { return ncclSuccess; }
#endif
}

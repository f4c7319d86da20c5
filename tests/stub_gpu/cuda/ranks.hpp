// Communicators and meetings, shared by the two files that make up the stub's NCCL.
//
// With STUB_GPU_ALONE=1 a process is one of several ranks by itself: it waits for nobody, and its peers send what it
// sends.

#pragma once

#include <nccl.h>

#include "board.hpp"
#include "device.hpp"

namespace stub {

struct Communicator {
  std::string name;
  int rank;
  int size;
  Board* board;  // nullptr for a process that is alone
  uint64_t num_meetings = 0;
  uint64_t num_received[most_ranks] = {};  // from each peer, of what it has sent to this rank alone
  int num_splits = 0;
  bool has_ended = false;
};

using Handle = std::shared_ptr<Communicator>;

// What a rank says at a meeting, and what it does with the message of each rank.
struct Exchange {
  std::function<void(Message&)> write;
  std::function<void(int rank, const Message&)> read;
};

Handle& communicator_of(ncclComm_t handle);
void write_nothing(Message& message);
// A meeting of all ranks; see board.hpp. Its number is that of its first call, which is in the order of the device.
Meeting make_meeting(Handle communicator, Exchange exchange);

}  // namespace stub

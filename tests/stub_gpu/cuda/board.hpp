// Shared memory by which the ranks of a communicator meet, and through which small messages go.
//
// A meeting has two steps, so that one seat per rank is enough: a rank waits until all have left the meeting before,
// puts its message on its seat and arrives; when all have arrived it reads their seats and leaves.

#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace stub {

constexpr size_t most_message_bytes = 65536;
constexpr int most_ranks = 64;

struct Message {
  bool is_known;  // whether `bytes` are what the sender has, or nothing is known of them
  size_t num_bytes;
  char bytes[most_message_bytes];
};

struct Seat {
  std::atomic<uint64_t> num_arrived, num_left;
  Message message;
};

struct Board {
  std::atomic<int> num_joined;
  std::atomic<uint64_t> num_sent[most_ranks][most_ranks];  // by one rank to another
  Seat seats[most_ranks];
};

// Maps the board of this name, and waits on this thread until all ranks have; nullptr if that is impossible.
Board* join_board(const std::string& name, int num_ranks);

}  // namespace stub

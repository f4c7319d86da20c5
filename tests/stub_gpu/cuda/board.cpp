// Maps boards: files of /dev/shm that are removed as soon as all ranks have them, and so outlive no process.

#include "board.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

namespace stub {

Board* join_board(const std::string& name, int num_ranks) {
  if (num_ranks > most_ranks) return nullptr;
  const std::string path = "/dev/shm/stub-gpu-" + name;
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) return nullptr;
  // A new file is all zeros, which is how a board begins.
  const bool has_size = ftruncate(file, sizeof(Board)) == 0;
  void* memory = mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (!has_size || memory == MAP_FAILED) return nullptr;
  auto* board = static_cast<Board*>(memory);
  if (++board->num_joined == num_ranks) unlink(path.c_str());
  while (board->num_joined < num_ranks) usleep(100);
  return board;
}

}  // namespace stub

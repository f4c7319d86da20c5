// NCCL's collectives: they end when all ranks of the communicator have come. Messages of up to 64 KiB whose bytes are
// known move outside of graphs; everything else is rendezvous alone, and what is received is then unknown.

#include <cstring>

#include "ranks.hpp"

namespace stub {

namespace {

// Reads a buffer of the device into a message.
auto reader_of(const void* buffer, size_t num_bytes) {
  return [=](Message& message) {
    message.num_bytes = num_bytes;
    message.is_known = num_bytes <= most_message_bytes && is_known(buffer, num_bytes);
    if (message.is_known) std::memcpy(message.bytes, buffer, num_bytes);
  };
}

// Writes a message to a buffer of the device.
void receive(void* buffer, size_t num_bytes, const Message& message) {
  if (message.is_known && message.num_bytes == num_bytes) {
    std::memcpy(buffer, message.bytes, num_bytes);
    learn(buffer, num_bytes);
  } else {
    forget(buffer, num_bytes);
  }
}

size_t size_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8:
    case ncclUint8: return 1;
    case ncclFloat16:
    case ncclBfloat16: return 2;
    case ncclInt64:
    case ncclUint64:
    case ncclFloat64: return 8;
    case ncclInt32:
    case ncclUint32:
    case ncclFloat32: return 4;
    default: return 1;
  }
}

ncclResult_t collective(const char* kind, size_t num_bytes, ncclComm_t handle, cudaStream_t stream, Exchange exchange) {
  Guard guard(the_lock());
  const Handle& communicator = communicator_of(handle);
  const std::string line = std::string("nccl ") + kind + " " + std::to_string(num_bytes);
  submit(stream, {line, communicator, true}, make_meeting(communicator, std::move(exchange)));
  return ncclSuccess;
}

}  // namespace

}  // namespace stub

using namespace stub;

extern "C" {

ncclResult_t ncclAllReduce(const void*, void* to, size_t count, ncclDataType_t type, ncclRedOp_t, ncclComm_t handle,
                           cudaStream_t stream) {
  const size_t num_bytes = count * size_of(type);
  const auto read = [=](int, const Message&) { forget(to, num_bytes); };
  return collective("all_reduce", num_bytes, handle, stream, {write_nothing, read});
}

ncclResult_t ncclAllGather(const void* from, void* to, size_t count, ncclDataType_t type, ncclComm_t handle,
                           cudaStream_t stream) {
  const size_t num_bytes = count * size_of(type);
  const auto read = [=](int rank, const Message& message) {
    receive(static_cast<char*>(to) + static_cast<size_t>(rank) * num_bytes, num_bytes, message);
  };
  return collective("all_gather", num_bytes, handle, stream, {reader_of(from, num_bytes), read});
}

ncclResult_t ncclBroadcast(const void* from, void* to, size_t count, ncclDataType_t type, int root, ncclComm_t handle,
                           cudaStream_t stream) {
  const size_t num_bytes = count * size_of(type);
  const auto read = [=](int rank, const Message& message) {
    if (rank == root) receive(to, num_bytes, message);
  };
  return collective("broadcast", num_bytes, handle, stream, {reader_of(from, num_bytes), read});
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t handle,
                       cudaStream_t stream) {
  return ncclBroadcast(buffer, buffer, count, type, root, handle, stream);
}

// ---- between two ranks: a message does not wait for its receiver, and its bytes are unknown

ncclResult_t ncclSend(const void*, size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
  Guard guard(the_lock());
  const Handle communicator = communicator_of(handle);
  submit(stream, {"nccl send " + std::to_string(count * size_of(type)), communicator, false}, [=] {
    if (communicator->board) ++communicator->board->num_sent[communicator->rank][peer];
    return true;
  });
  return ncclSuccess;
}

ncclResult_t ncclRecv(void* buffer, size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                      cudaStream_t stream) {
  Guard guard(the_lock());
  const Handle communicator = communicator_of(handle);
  const size_t num_bytes = count * size_of(type);
  submit(stream, {"nccl receive " + std::to_string(num_bytes), communicator, false}, [=] {
    uint64_t& num_received = communicator->num_received[peer];
    const bool waits = communicator->board && !communicator->has_ended;
    if (waits && communicator->board->num_sent[peer][communicator->rank] <= num_received) return false;
    ++num_received;
    forget(buffer, num_bytes);
    return true;
  });
  return ncclSuccess;
}
}

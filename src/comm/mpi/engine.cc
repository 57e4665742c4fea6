#include "comm/mpi/engine.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "comm/issuer/exchange_texts.h"
#include "comm/reduce_kernels.h"

namespace unisono {
namespace {

EngineInfo info_of(MpiLibrary& library, MpiHandle comm, std::chrono::nanoseconds timeout) {
  EngineInfo info{.name = "mpi", .thread = "uni-mpi", .eager = true};
  info.timeout = std::chrono::ceil<std::chrono::milliseconds>(timeout);
  info.grace = std::chrono::milliseconds(0);
  library.call("MPI_Comm_rank", [&](const MpiShim& mpi) { return mpi.rank(comm, &info.rank); });
  library.call("MPI_Comm_size", [&](const MpiShim& mpi) { return mpi.size(comm, &info.size); });
  return info;
}

EngineOp in_flight(std::shared_ptr<MpiTransfer> transfer) {
  EngineOp op;
  op.done = [transfer] { return transfer->done(); };
  op.check = [transfer] { transfer->check(); };
  return op;
}

// Reduces blocks that lie one behind the other, one per rank.
void reduce(const std::byte* blocks, std::size_t ranks, void* out, std::size_t count, const DataCall& call,
            double divisor) {
  const Dtype dtype = call.out.dtype;
  std::vector<const void*> in;
  for (std::size_t r = 0; r < ranks; ++r) in.push_back(blocks + r * count * size_of(dtype));
  tree_reduce(in, std::span<void* const>(&out, 1), count, dtype, call.op == ReduceOp::avg ? ReduceOp::sum : call.op,
              divisor);
}

std::size_t slice_of(std::size_t count, std::size_t ranks) { return (count + ranks - 1) / ranks; }

}  // namespace

MpiCommunicator::MpiCommunicator(MpiLibrary& library, MpiHandle parent, std::chrono::nanoseconds timeout)
    : library_(library) {
  const auto deadline = deadline_after(timeout);
  MpiTransfer copy(library, "MPI_Comm_idup", sizeof(MpiHandle));
  auto* handle = reinterpret_cast<MpiHandle*>(copy.data());
  copy.start([&](const MpiShim& mpi, MpiHandle* request) { return mpi.duplicate(parent, handle, request); });
  while (!copy.done()) {
    if (std::chrono::steady_clock::now() > deadline) {
      throw Error(ErrorCode::timeout, "unisono mpi group: not all ranks came to make it within " +
                                          std::to_string(std::chrono::duration<double>(timeout).count()) +
                                          " s. MPI does not tell which; every rank must make the group.");
    }
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  copy.check();
  handle_ = *handle;
  library.call("MPI_Comm_set_errhandler", [&](const MpiShim& mpi) { return mpi.return_errors(handle_); });
}

// Local in the MPIs there are, so that ranks may end their groups in any order.
MpiCommunicator::~MpiCommunicator() {
  if (keep_) return;
  try {
    library_.call("MPI_Comm_free", [&](const MpiShim& mpi) { return mpi.release(&handle_); });
  } catch (const Error&) {  // MPI has ended before the group, and the communicator with it
  }
}

MpiEngine::MpiEngine(MpiLibrary& library, MpiHandle parent, const MpiEngineOptions& options)
    : Engine(info_of(library, parent, options.timeout)),
      library_(library),
      longest_block_(options.longest_block),
      start_timeout_(options.start_timeout),
      calls_(library, parent, options.start_timeout),
      seconds_(library, parent, options.start_timeout) {}

std::unique_ptr<NoticeBoard> MpiEngine::notice_board() {
  std::random_device random;
  const std::uint64_t own = std::uint64_t{random()} << 32 | random();
  const auto group = std::stoull(exchange_texts(*this, std::to_string(own), start_timeout_)[0]);
  auto board = std::make_unique<MpiNoticeBoard>(library_, calls_.handle(), info().rank, info().size, group);
  board_ = board.get();
  return board;
}

// Short enough to stay in cache between the copy, the wire and the sum, and so that several are under way at once.
std::vector<DataCall> MpiEngine::parts_of(const DataCall& call) const {
  constexpr std::size_t kPart = 1 << 20;
  if (call.operation == Operation::all_reduce) return split(call, kPart / size_of(call.out.dtype));
  return {call};
}

EngineOp MpiEngine::start(const DataCall& call, Milliseconds) {
  switch (call.operation) {
    case Operation::all_reduce:
      return all_reduce(call);
    case Operation::reduce_scatter:
      return reduce_scatter(call);
    case Operation::broadcast:
      return broadcast(call);
    case Operation::all_gather:
      return all_gather(call);
    case Operation::all_to_all:
      return all_to_all(call);
    case Operation::barrier:
    case Operation::allocate:
      break;
  }
  throw Error(ErrorCode::internal, std::string(to_string(call.operation)) + " moves no data");
}

EngineOp MpiEngine::gather_bytes(const void* block, std::size_t bytes, Milliseconds) {
  if (board_) board_->read();
  const auto all = std::make_shared<MpiTransfer>(library_, "MPI_Iallgather", bytes * ranks());
  std::memcpy(all->data() + own() * bytes, block, bytes);
  gather(all, calls_, bytes);
  EngineOp op = in_flight(all);
  op.gathered = [all, size = bytes * ranks()] {
    const auto* data = reinterpret_cast<const std::uint8_t*>(all->data());
    return std::vector<std::uint8_t>(data, data + size);
  };
  return op;
}

// Nothing in flight can be ended; its memory and its communicators are left to MPI.
void MpiEngine::abort(const Error&) {
  calls_.keep();
  seconds_.keep();
}

EngineOp MpiEngine::all_reduce(const DataCall& call) {
  constexpr std::size_t kShort = 32 << 10;  // bytes received by each rank
  if (ranks() <= 2 || call.out.bytes() * ranks() <= kShort) return reduce_gathered(call);
  const std::size_t count = slice_of(call.out.count, ranks()), slice = count * size_of(call.out.dtype),
                    all = slice * ranks();
  const auto first = std::make_shared<MpiTransfer>(library_, "MPI_Ialltoall", 2 * all);
  std::byte* const in = first->data();
  std::memcpy(in, call.out.data, call.out.bytes());
  std::memset(in + call.out.bytes(), 0, all - call.out.bytes());
  exchange(first, in, in + all, slice);
  EngineOp op = in_flight(first);
  op.staged = true;
  op.then = [=, this](double divisor) {
    const auto second = std::make_shared<MpiTransfer>(library_, "MPI_Iallgather", all);
    reduce(first->data() + all, ranks(), second->data() + own() * slice, count, call, divisor);
    gather(second, seconds_, slice);
    EngineOp out = in_flight(second);
    out.staged = true;
    out.finish = [second, call](double) { std::memcpy(call.out.data, second->data(), call.out.bytes()); };
    return out;
  };
  return op;
}

EngineOp MpiEngine::reduce_gathered(const DataCall& call) {
  const std::size_t bytes = call.out.bytes();
  const auto all = std::make_shared<MpiTransfer>(library_, "MPI_Iallgather", bytes * ranks());
  std::memcpy(all->data() + own() * bytes, call.out.data, bytes);
  gather(all, calls_, bytes);
  EngineOp op = in_flight(all);
  op.finish = [all, call, ranks = ranks()](double divisor) {
    reduce(all->data(), ranks, call.out.data, call.out.count, call, divisor);
  };
  return op;
}

EngineOp MpiEngine::reduce_scatter(const DataCall& call) {
  const std::size_t all = call.in.bytes();
  const auto parts = std::make_shared<MpiTransfer>(library_, "MPI_Ialltoall", 2 * all);
  std::memcpy(parts->data(), call.in.data, all);
  exchange(parts, parts->data(), parts->data() + all, call.out.bytes());
  EngineOp op = in_flight(parts);
  op.finish = [parts, call, all, ranks = ranks()](double divisor) {
    reduce(parts->data() + all, ranks, call.out.data, call.out.count, call, divisor);
  };
  return op;
}

EngineOp MpiEngine::broadcast(const DataCall& call) {
  const auto data = std::make_shared<MpiTransfer>(library_, "MPI_Ibcast", call.out.bytes());
  const bool root = call.root == info().rank;
  if (root) std::memcpy(data->data(), call.out.data, call.out.bytes());
  for (std::size_t at = 0; at < call.out.bytes(); at += longest_block_) {
    const auto bytes = static_cast<std::int64_t>(std::min(longest_block_, call.out.bytes() - at));
    data->start([&](const MpiShim& mpi, MpiHandle* request) {
      return mpi.broadcast(calls_.handle(), data->data() + at, bytes, call.root, request);
    });
  }
  EngineOp op = in_flight(data);
  if (!root) op.finish = [data, call](double) { std::memcpy(call.out.data, data->data(), call.out.bytes()); };
  return op;
}

EngineOp MpiEngine::all_gather(const DataCall& call) {
  const auto all = std::make_shared<MpiTransfer>(library_, "MPI_Iallgather", call.out.bytes());
  std::memcpy(all->data() + own() * call.in.bytes(), call.in.data, call.in.bytes());
  gather(all, calls_, call.in.bytes());
  EngineOp op = in_flight(all);
  op.finish = [all, call](double) { std::memcpy(call.out.data, all->data(), call.out.bytes()); };
  return op;
}

EngineOp MpiEngine::all_to_all(const DataCall& call) {
  const std::size_t all = call.in.bytes();
  const auto both = std::make_shared<MpiTransfer>(library_, "MPI_Ialltoall", 2 * all);
  std::memcpy(both->data(), call.in.data, all);
  exchange(both, both->data(), both->data() + all, all / ranks());
  EngineOp op = in_flight(both);
  op.finish = [both, call, all](double) { std::memcpy(call.out.data, both->data() + all, all); };
  return op;
}

void MpiEngine::gather(const Transfer& transfer, const MpiCommunicator& comm, std::size_t block) const {
  for (std::size_t at = 0; at < block; at += longest_block_) {
    const auto bytes = static_cast<std::int64_t>(std::min(longest_block_, block - at));
    transfer->start([&](const MpiShim& mpi, MpiHandle* request) {
      return mpi.all_gather(comm.handle(), transfer->data() + at, bytes, static_cast<std::int64_t>(block), request);
    });
  }
}

void MpiEngine::exchange(const Transfer& transfer, std::byte* in, std::byte* out, std::size_t block) const {
  for (std::size_t at = 0; at < block; at += longest_block_) {
    const auto bytes = static_cast<std::int64_t>(std::min(longest_block_, block - at));
    transfer->start([&](const MpiShim& mpi, MpiHandle* request) {
      return mpi.all_to_all(calls_.handle(), in + at, out + at, bytes, static_cast<std::int64_t>(block), request);
    });
  }
}

}  // namespace unisono

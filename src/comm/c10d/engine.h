#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <unisono/buffer.h>
#include <unisono/error.h>

#include "comm/c10d/call_header.h"

namespace unisono {

/// One operation in flight, with what must happen when it has ended.
///
/// An operation may be followed by another, `then`. If it is `staged`, what follows uses groups of its own: it must begin in the
/// order of the calls, whatever else is in flight. If not, it uses the same group: nothing else may begin in between.
struct EngineOp {
  c10::intrusive_ptr<c10d::Work> work;
  c10::intrusive_ptr<c10::ivalue::Future> future;  ///< null where the engine has none
  std::vector<at::Tensor> memory;                  ///< kept alive until the engine lets go
  std::function<void(double divisor)> finish = nullptr;    ///< may be empty
  std::function<EngineOp(double divisor)> then = nullptr;  ///< what follows; may be empty
  bool staged = false;
  int stage = 0;
  std::function<bool()> ready = nullptr;   ///< in place of `work`: whether it has ended ...
  std::function<void()> check = nullptr;   ///< ... and what throws its error

  bool done() const { return ready ? ready() : future ? future->completed() : work->isCompleted(); }
  /// *Throws* the engine's error; orders device streams.
  void require_success() const { check ? check() : static_cast<void>(work->wait()); }
};

/// A c10d operation's options with this timeout.
template <typename Options>
Options with(std::chrono::milliseconds timeout) {
  Options out;
  out.timeout = timeout;
  return out;
}

/// *Throws* `internal` when the engine returned nothing.
EngineOp in_flight(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> memory);

class Hierarchy;

/// The data part of a call.
struct DataCall {
  Operation operation = Operation::barrier;
  Buffer out;
  Buffer in;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  bool may_round = false;
};

/// An all-reduce in parts of `length` elements.
std::vector<DataCall> split(const DataCall& call, std::size_t length);

/// The contract's operations in the words of a c10d group, and what engines lack: f16 and bf16 are added in f32 (large ones travel in
/// 16 bits, see tree_all_reduce.h), bool is reduced in u8, averages are divided afterwards; everything that only moves data moves bytes.
/// *Threads*: one.
class Engine {
 public:
  using Milliseconds = std::chrono::milliseconds;

  /// `hierarchy`: how all-reduces of CPU memory go; null: as the group's own.
  explicit Engine(c10::intrusive_ptr<c10d::ProcessGroup> group, std::shared_ptr<const Hierarchy> hierarchy = nullptr);

  const std::string& name() const { return name_; }
  Milliseconds timeout() const { return timeout_; }
  const c10::intrusive_ptr<c10d::ProcessGroup>& group() const { return group_; }
  bool serves(Device::Kind kind) const;

  EngineOp start(const DataCall& call, Milliseconds timeout) const;
  /// What to start in place of `call`, one after the other: usually itself.
  std::vector<DataCall> parts_of(const DataCall& call) const;
  /// Gathers equal blocks of bytes; `blocks` has room for all ranks'. Their memory is the CPU's after `fetch`.
  EngineOp gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) const;
  static std::vector<std::uint8_t> fetch(const EngineOp& gathered);
  /// Ends what is in flight beside the c10d group.
  void abort(const Error& cause) const;

 private:
  EngineOp all_reduce(const DataCall& call, Milliseconds timeout) const;
  EngineOp reduce_scatter(const DataCall& call, Milliseconds timeout) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<const Hierarchy> hierarchy_;
  c10::Device control_device_;
  std::string name_;
  Milliseconds timeout_;
};

}  // namespace unisono

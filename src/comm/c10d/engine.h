#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <memory>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <vector>

#include "comm/issuer/engine.h"

namespace unisono {

/// A c10d operation's options with this timeout.
template <typename Options>
Options with(std::chrono::milliseconds timeout) {
  Options out;
  out.timeout = timeout;
  return out;
}

/// *Throws* `internal` when the engine returned nothing.
EngineOp in_flight(c10::intrusive_ptr<c10d::Work> work, std::vector<at::Tensor> memory);

/// The contract's operations in the words of a c10d group, and what engines lack: f16 and bf16 are added in f32 (large
/// ones travel in 16 bits, see tree_all_reduce.h), bool is reduced in u8, averages are divided afterwards; everything
/// that only moves data moves bytes.
/// *Threads*: as Engine.
class C10dEngine final : public Engine {
 public:
  /// `ordered`: all-reduces of CPU memory are sums in our tree's order, else the group's own.
  explicit C10dEngine(c10::intrusive_ptr<c10d::ProcessGroup> group, bool ordered = false);

  bool serves(Device::Kind kind) const override;
  StreamFence fence(const Device& device) const override;
  std::unique_ptr<NoticeBoard> notice_board() override;
  std::vector<DataCall> parts_of(const DataCall& call) const override;
  EngineOp start(const DataCall& call, Milliseconds timeout) override;
  /// Their memory is the CPU's when it is asked for.
  EngineOp gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) override;

 private:
  EngineOp all_reduce(const DataCall& call, Milliseconds timeout) const;
  EngineOp reduce_scatter(const DataCall& call, Milliseconds timeout) const;
  bool by_tree(const DataCall& call) const;

  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  bool ordered_;
  c10::Device control_device_;
};

}  // namespace unisono

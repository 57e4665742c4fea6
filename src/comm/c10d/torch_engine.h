#pragma once

#include <unisono/make_group.h>

#include <chrono>
#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace unisono {

/// Where and for how long the ranks of an engine look for each other.
struct EngineStart {
  c10::intrusive_ptr<c10d::Store> store;  ///< its keys are this group's alone
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
};

/// One of torch's engines that `make_group` can start by itself.
struct TorchEngine {
  const char* name;
  c10::DeviceType device;  ///< whose memory it moves
  c10d::ProcessGroup::BackendType type;
  /// *Collective*. *Blocks* until all ranks are connected. *Throws* Error for what is wrong here, the engine's own
  /// otherwise.
  c10::intrusive_ptr<c10d::Backend> (*start)(const EngineStart& start);
  const char* advice;  ///< when the ranks have met and the engine does not start
};

/// The ranks meet in a round of `options.store` (comm/rendezvous.h), start the engine there, and have it behind the
/// contract. *Collective*. *Blocks*, at most `options.start_timeout`, twice that where an engine does not keep to it.
/// *Throws* as `join_round`; `timeout` with the engine's text and the advice.
std::shared_ptr<ProcessGroup> make_engine_group(const TorchEngine& engine, const GroupOptions& options);
/// The same, and in two levels where there are several hosts with several ranks: shared memory inside a host, the
/// engine between.
std::shared_ptr<ProcessGroup> make_engine_group_over_hosts(const TorchEngine& engine, const GroupOptions& options);

/// The above over Gloo.
std::shared_ptr<ProcessGroup> make_gloo_group_over_hosts(const GroupOptions& options);

}  // namespace unisono

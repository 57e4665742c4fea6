#pragma once

#include <unisono/process_group.h>

#include <memory>

#include "base/fork.h"
#include "comm/issuer/issuer.h"

namespace unisono {

/// An engine behind the contract: the calls are checked, numbered, and issued by the group's thread.
class IssuedGroup final : public ProcessGroup {
 public:
  explicit IssuedGroup(std::unique_ptr<Engine> engine);
  /// *Blocks* as `~Issuer`, but where the issuer's own thread lets go of the group, and in a forked child, whose threads
  /// these are not.
  ~IssuedGroup() override;

  Work all_reduce(Buffer data, const AllReduceOptions& options) override;
  Work broadcast(Buffer data, int root, const CallOptions& options) override;
  Work all_gather(Buffer out, Buffer in, const CallOptions& options) override;
  Work reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) override;
  Work all_to_all(Buffer out, Buffer in, const CallOptions& options) override;
  Work barrier(const CallOptions& options) override;
  Buffer allocate(std::size_t bytes) override;
  void abort(const Error& cause) override;

 private:
  Device::Kind served(const Buffer& buffer) const;
  Work submit(DataCall data, std::size_t count, const CallOptions& options, int divide_by_sum = -1);

  std::unique_ptr<Issuer> issuer_;
  ForkMark mark_;
};

}  // namespace unisono

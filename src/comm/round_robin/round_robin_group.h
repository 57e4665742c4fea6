#pragma once

#include <unisono/round_robin.h>

#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "comm/round_robin/call_line.h"
#include "comm/round_robin/homes.h"

namespace unisono {

/// See `make_round_robin_group`, which checks the groups.
class RoundRobinGroup final : public ProcessGroup {
 public:
  explicit RoundRobinGroup(std::vector<std::shared_ptr<ProcessGroup>> groups);

  const std::vector<std::shared_ptr<ProcessGroup>>& groups() const { return groups_; }

  Work all_reduce(Buffer data, const AllReduceOptions& options) override;
  Work broadcast(Buffer data, int root, const CallOptions& options) override;
  Work all_gather(Buffer out, Buffer in, const CallOptions& options) override;
  Work reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) override;
  Work all_to_all(Buffer out, Buffer in, const CallOptions& options) override;
  Work barrier(const CallOptions& options) override;
  Buffer allocate(std::size_t bytes) override;
  void abort(const Error& cause) override { line_->fail(cause); }

 private:
  std::optional<std::size_t> home_of(const Buffer& out, const Buffer& in);
  /// The next call, made by `make` on its group.
  template <typename Options, typename Make>
  Work call(std::optional<std::size_t> home, Options options, const Make& make);

  std::vector<std::shared_ptr<ProcessGroup>> groups_;
  std::shared_ptr<CallLine> line_;
  Homes homes_;
  std::mutex order_mutex_;  // held while a call is numbered and made
  std::int64_t next_ = 0;
};

}  // namespace unisono

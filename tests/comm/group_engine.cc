#include "comm/group_engine.h"

#include <unisono/regroup.h>

#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "comm/hierarchy/blocks.h"
#include "comm/reduce_kernels.h"

namespace unisono::testing {
namespace {

class Notices final : public NoticeBoard {
 public:
  Notices(std::shared_ptr<Store> store, std::string place, int rank, int size)
      : store_(std::move(store)), place_(std::move(place) + "/"), rank_(rank), size_(size) {}

  void post_failure(const Error& cause) noexcept override {
    if (!failure()) store_->set(place_ + "failed", std::to_string(static_cast<int>(cause.code())) + " " + cause.what());
  }
  std::optional<Error> failure() noexcept override {
    const auto text = read("failed");
    if (!text) return std::nullopt;
    return Error(static_cast<ErrorCode>(std::stoi(*text)), text->substr(text->find(' ') + 1));
  }
  void post_waiting(std::int64_t sequence) noexcept override {
    store_->set(place_ + std::to_string(rank_), std::to_string(sequence));
  }
  std::vector<int> absent(std::int64_t sequence) noexcept override {
    std::vector<int> out;
    for (int rank = 0; rank < size_; ++rank)
      if (rank != rank_ && std::stoll(read(std::to_string(rank)).value_or("-1")) < sequence) out.push_back(rank);
    return out;
  }

 private:
  std::optional<std::string> read(const std::string& key) {
    return store_->get(place_ + key, std::chrono::nanoseconds(0));
  }

  std::shared_ptr<Store> store_;
  std::string place_;
  int rank_, size_;
};

class GroupEngine final : public Engine {
 public:
  GroupEngine(std::shared_ptr<ProcessGroup> group, std::shared_ptr<Store> store, std::string place)
      : Engine({.name = group->name(),
                .rank = group->rank(),
                .size = group->size(),
                .timeout = std::chrono::ceil<std::chrono::milliseconds>(group->timeout())}),
        group_(std::move(group)),
        store_(std::move(store)),
        place_(std::move(place)) {}

  std::unique_ptr<NoticeBoard> notice_board() override {
    return store_ ? std::make_unique<Notices>(store_, place_, info().rank, info().size) : nullptr;
  }

  EngineOp start(const DataCall& call, Milliseconds timeout) override {
    CallOptions options;
    options.timeout = timeout;
    switch (call.operation) {
      case Operation::all_reduce:
        return reduced(call, call.out, timeout);
      case Operation::reduce_scatter: {
        const Buffer parts = scratch(call.in.count, call.in.dtype);
        return reducing(group_->all_to_all(parts, call.in, options), parts, call);
      }
      case Operation::broadcast:
        return moving(group_->broadcast(call.out, call.root, options));
      case Operation::all_gather:
        return moving(group_->all_gather(call.out, call.in, options));
      case Operation::all_to_all:
        return moving(group_->all_to_all(call.out, call.in, options));
      default:
        throw Error(ErrorCode::internal, "it moves no data");
    }
  }

  EngineOp gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) override {
    const Buffer own = scratch(bytes, Dtype::u8), all = scratch(bytes * ranks(), Dtype::u8);
    std::memcpy(own.data, block, bytes);
    CallOptions options;
    options.timeout = timeout;
    EngineOp op = moving(group_->all_gather(all, own, options));
    op.gathered = [all] {
      const auto* data = static_cast<const std::uint8_t*>(all.data);
      return std::vector<std::uint8_t>(data, data + all.count);
    };
    return op;
  }

  std::vector<int> lost() const override { return lost_ranks(*group_); }
  void abort(const Error& cause) override { group_->abort(cause); }

 private:
  std::size_t ranks() const { return static_cast<std::size_t>(info().size); }

  static EngineOp moving(Work work) {
    return {
        .done = [work]() mutable { return work.poll(); }, .check = [work]() mutable { work.wait(); }, .local = true};
  }

  EngineOp reducing(Work work, const Buffer& parts, const DataCall& call) const {
    EngineOp op = moving(std::move(work));
    op.finish = [parts, call, ranks = ranks()](double divisor) {
      std::vector<const void*> in;
      for (std::size_t r = 0; r < ranks; ++r) in.push_back(part_of(parts, r * call.out.count, 0).data);
      tree_reduce(in, std::span<void* const>(&call.out.data, 1), call.out.count, call.out.dtype,
                  call.op == ReduceOp::avg ? ReduceOp::sum : call.op, divisor);
    };
    return op;
  }

  EngineOp reduced(const DataCall& call, const Buffer& in, Milliseconds timeout) {
    CallOptions options;
    options.timeout = timeout;
    const Buffer parts = scratch(ranks() * in.count, in.dtype);
    return reducing(group_->all_gather(parts, in, options), parts, call);
  }

  std::shared_ptr<ProcessGroup> group_;
  std::shared_ptr<Store> store_;
  std::string place_;
};

}  // namespace

std::unique_ptr<Engine> make_group_engine(std::shared_ptr<ProcessGroup> group, std::shared_ptr<Store> store,
                                          std::string place) {
  return std::make_unique<GroupEngine>(std::move(group), std::move(store), std::move(place));
}

}  // namespace unisono::testing

// all_reduce of a sparse tensor. How much the others have to send no rank knows when it makes the call, so a sum has
// two halves.
//
// In the first an all_gather, a collective in the order of the caller's, tells every rank everybody's shape and number
// of entries. In the second everybody sends its indices and values to everybody, and each rank adds them up by itself,
// in the tree that the contract has for dense tensors: so all get the same bits, and those of a sum of dense tensors.
// When the second begins differs between ranks, so it may not be made of collectives, whose order must not: messages
// between two ranks have no place in that order. Their tag is drawn with the call.
//
// Whoever waits or polls begins the second half. If nobody does, a thread of the backend must, for the other ranks wait
// for this one's entries. It is not the thread of the futures: that may be waiting for a message which comes only after
// this sum.

#include <ATen/ATen.h>
#include <unisono/error.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

#include "comm/torch_backend/beside_work.h"
#include "comm/torch_backend/staging.h"
#include "comm/torch_backend/torch_backend.h"
#include "comm/torch_backend/two_halves.h"

namespace unisono {
namespace {

constexpr const char* kWhat = "all_reduce of a sparse tensor";

// What each rank tells the others, a row of whole numbers: entries, dtype, sparse dimensions, dense dimensions, sizes.
constexpr std::int64_t kSizesAt = 4;
constexpr std::int64_t kMostDims = 28;

// As many exchanges of one pair of ranks as can be under way at once over the backend beside ours.
constexpr std::uint64_t kTagsBeside = 1 << 20;

[[noreturn]] void gone() {
  throw Error(ErrorCode::peer_lost,
              std::string("unisono ") + kWhat + ": this rank destroyed the group before the sum had ended");
}

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCode::invalid_argument, std::string("unisono ") + kWhat + ": " + problem);
}

at::Tensor record_of(const at::Tensor& mine) {
  at::Tensor record = at::zeros({kSizesAt + kMostDims}, at::kLong);
  auto* to = record.mutable_data_ptr<std::int64_t>();
  to[0] = mine._nnz();
  to[1] = static_cast<std::int64_t>(mine.scalar_type());
  to[2] = mine.sparse_dim();
  to[3] = mine.dense_dim();
  std::copy(mine.sizes().begin(), mine.sizes().end(), to + kSizesAt);
  return record;
}

std::string description(const std::int64_t* record) {
  std::string sizes;
  for (std::int64_t i = 0; i < record[2] + record[3]; ++i)
    sizes += (i > 0 ? ", " : "") + std::to_string(record[kSizesAt + i]);
  return "[" + sizes + "] with " + std::to_string(record[2]) + " sparse and " + std::to_string(record[3]) +
         " dense dimensions of " + at::toString(static_cast<at::ScalarType>(record[1]));
}

// One sum: what this rank gives, and what comes of the others.
struct Exchange {
  std::weak_ptr<ProcessGroup> group;  // weak, as is the next: a thread of the backend may be the last to know this
  c10::weak_intrusive_ptr<c10d::Backend> beside;  // for groups without messages between two ranks
  std::int64_t tag = 0;
  std::chrono::nanoseconds limit{0};  // of each half
  at::Tensor mine;                    // coalesced
  at::Tensor records;                 // of all ranks
  std::vector<at::Tensor> indices, values;

  const std::int64_t* record(int rank) const {
    return records.const_data_ptr<std::int64_t>() + rank * (kSizesAt + kMostDims);
  }
};

// All ranks have the same records, so all come to the same end, and with the same text.
void check_records(const Exchange& exchange, ProcessGroup& group) {
  for (int r = 1; r < group.size(); ++r) {
    const auto *first = exchange.record(0), *other = exchange.record(r);
    if (std::equal(first + 1, first + kSizesAt + kMostDims, other + 1)) continue;
    const Error error(ErrorCode::mismatch, "group " + group.name() + ", " + kWhat + ": rank 0 has " +
                                               description(first) + ", rank " + std::to_string(r) + " has " +
                                               description(other) +
                                               "; give tensors of one shape and dtype on all ranks");
    group.abort(error);
    throw error;
  }
}

// Messages of one exchange: by the group's transport, else by the backend beside it.
class Post {
 public:
  Post(const Exchange& exchange, ProcessGroup& group)
      : own_(dynamic_cast<PointToPoint*>(&group)),
        beside_(exchange.beside.lock()),
        tag_(exchange.tag),
        limit_(exchange.limit) {
    if (own_ == nullptr && !beside_ && group.size() > 1) gone();
  }

  unisono::Work send(const at::Tensor& data, int to) const {
    if (own_ != nullptr) return unisono::Work(own_->send(moved_buffer(data, kWhat), to, tag_, limit_));
    std::vector<at::Tensor> list = {data};
    return beside(beside_->send(list, to, tag_of_beside()));
  }
  unisono::Work receive(const at::Tensor& data, int from) const {
    if (own_ != nullptr) return unisono::Work(own_->receive(moved_buffer(data, kWhat), from, tag_, limit_));
    std::vector<at::Tensor> list = {data};
    return beside(beside_->recv(list, from, tag_of_beside()));
  }

 private:
  unisono::Work beside(c10::intrusive_ptr<c10d::Work> work) const {
    return unisono::Work(
        std::make_shared<BesideWork>(std::move(work), std::chrono::duration_cast<std::chrono::milliseconds>(limit_)));
  }
  // Its tags may not be negative: the highest, which no program uses.
  int tag_of_beside() const {
    return std::numeric_limits<int>::max() - static_cast<int>(static_cast<std::uint64_t>(tag_) % kTagsBeside);
  }

  PointToPoint* own_;
  c10::intrusive_ptr<c10d::Backend> beside_;
  std::int64_t tag_;
  std::chrono::nanoseconds limit_;
};

// Indices and values of all ranks, each as a message; where there is nothing in one, none goes.
std::vector<unisono::Work> swap_entries(Exchange& exchange, ProcessGroup& group) {
  const at::NoGradGuard no_grad;
  const Post post(exchange, group);
  const at::Tensor indices = exchange.mine.indices().contiguous(), values = exchange.mine.values().contiguous();
  std::vector<std::int64_t> rows = values.sizes().vec();
  std::vector<unisono::Work> out;
  for (int r = 0; r < group.size(); ++r) {
    const bool own = r == group.rank();
    rows[0] = exchange.record(r)[0];
    exchange.indices.push_back(own ? indices : at::empty({exchange.mine.sparse_dim(), rows[0]}, indices.options()));
    exchange.values.push_back(own ? values : at::empty(rows, values.options()));
    for (const auto* tensor : {&exchange.indices.back(), &exchange.values.back()})
      if (!own && tensor->numel() > 0) out.push_back(post.receive(*tensor, r));
  }
  for (int r = 0; r < group.size(); ++r)
    for (const auto* tensor : {&indices, &values})
      if (r != group.rank() && tensor->numel() > 0) out.push_back(post.send(*tensor, r));
  return out;
}

// The sum of ranks first ... first + count - 1, split at the largest power of two below their number.
at::Tensor tree_sum(const Exchange& exchange, std::size_t first, std::size_t count) {
  if (count > 1) {
    const std::size_t left = std::bit_floor(count - 1);
    return at::add(tree_sum(exchange, first, left), tree_sum(exchange, first + left, count - left));
  }
  const at::ScalarType type = exchange.mine.scalar_type();
  const bool half =
      type == at::kHalf || type == at::kBFloat16;  // as in sums of dense tensors these are rounded once, at the end
  return at::_sparse_coo_tensor_unsafe(exchange.indices[first],
                                       half ? exchange.values[first].to(at::kFloat) : exchange.values[first],
                                       exchange.mine.sizes(), {}, {}, {}, {}, true);
}

void check(const at::Tensor& tensor, const c10d::AllreduceOptions& options) {
  if (!tensor.device().is_cpu())
    refuse("the tensor is on " + tensor.device().str() + "; this backend serves CPU tensors. Move it with .cpu()");
  if (static_cast<c10d::ReduceOp::RedOpType>(options.reduceOp) != c10d::ReduceOp::SUM)
    refuse("only SUM is there; for another operation make the tensor dense with .to_dense()");
  if (tensor.dim() > kMostDims)
    refuse("the tensor has " + std::to_string(tensor.dim()) + " dimensions; at most " + std::to_string(kMostDims) +
           " are served");
}

}  // namespace

TorchBackend::WorkPtr TorchBackend::sum_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const at::Tensor& tensor = tensors[0];
  check(tensor, options);
  if (size_ > 1 && !beside_) messages(kWhat);
  const at::NoGradGuard no_grad;
  auto exchange = std::make_shared<Exchange>(Exchange{.group = group_,
                                                      .beside = c10::weak_intrusive_ptr<c10d::Backend>(beside_),
                                                      .tag = next_exchange(),
                                                      .limit = timeout_of(options.timeout),
                                                      .mine = tensor.coalesce()});
  const at::Tensor record = record_of(exchange->mine);
  exchange->records = at::empty({size_, record.numel()}, record.options());
  CallOptions how;
  how.timeout = exchange->limit;
  how.tag.what = "sparse tensor";
  auto sizes = group_->all_gather(moved_buffer(exchange->records, kWhat), moved_buffer(record, kWhat), how);
  auto next = [exchange] {
    const auto group = exchange->group.lock();
    if (!group) gone();
    check_records(*exchange, *group);
    return swap_entries(*exchange, *group);
  };
  TorchWork::Call call;
  call.parts.emplace_back(std::make_shared<TwoHalves>(std::move(sizes), std::move(next)));
  call.outputs = {tensor};
  call.finish = [exchange, to = tensor]() mutable {
    const at::NoGradGuard none;
    to.copy_(
        tree_sum(*exchange, 0, exchange->values.size()));  // not detached: that would not share what `to` is resized to
  };
  auto work = start(c10d::OpType::_ALLREDUCE_SPARSE, std::move(call), halves_);
  work->getFuture();
  return work;
}

}  // namespace unisono

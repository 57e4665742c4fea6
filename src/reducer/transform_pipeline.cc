#include "reducer/transform_pipeline.h"

#include <ATen/ATen.h>

#include <string>

#include "comm/c10d/tensors.h"

namespace unisono {
namespace {

Buffer sent(const at::Tensor& tensor) {
  if (!tensor.is_contiguous()) throw Error(ErrorCode::invalid_argument, "a tensor to be sent is not contiguous");
  return buffer_of(tensor, "a gradient transform");
}

}  // namespace

Work GradientChannel::all_reduce(const at::Tensor& tensor, ReduceOp op) {
  AllReduceOptions options;
  options.op = op;
  options.tag = tag_;
  options.may_round = tensor.element_size() == 2;  // a transform to 16 bits has rounded already
  bytes_ += tensor.nbytes();
  ++messages_;
  return group_.all_reduce(sent(tensor), options);
}

Work GradientChannel::all_gather(const at::Tensor& out, const at::Tensor& in) {
  CallOptions options;
  options.tag = tag_;
  bytes_ += in.nbytes() * static_cast<std::size_t>(group_.size() - 1);
  ++messages_;
  return group_.all_gather(sent(out), sent(in), options);
}

void GradientTransform::load_state(const std::vector<NamedTensor>& state) {
  if (state.empty()) return;
  throw Error(ErrorCode::invalid_argument, "the gradient transform '" + name() + "' has no state, but is given '" +
                                               state.front().name + "' to load");
}

// A transform that fails on one rank leaves the others in the middle of its collectives: nothing can go on from there.
template <typename Body>
void TransformPipeline::guarded(int bucket, Body body) {
  at::NoGradGuard no_grad;
  std::string what;
  try {
    body();
    return;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::invalid_argument) throw;  // the group's own failure: everybody has it already
    what = error.what();
  } catch (const std::exception& error) {
    what = error.what();
  }
  const Error cause(ErrorCode::invalid_argument, "rank " + std::to_string(group_.rank()) +
                                                     ": the gradient transform '" + transform_->name() +
                                                     "' failed in bucket " + std::to_string(bucket) + ": " + what);
  group_.abort(cause);
  throw cause;
}

void TransformPipeline::account(Flight& flight) {
  for (; flight.counted_messages < flight.channel->messages(); ++flight.counted_messages) timeline_.count_message(0);
  timeline_.count_bytes(flight.channel->bytes() - flight.counted);
  flight.counted = flight.channel->bytes();
}

void TransformPipeline::go_on(Flight& flight) {
  guarded(flight.bucket, [&] { flight.task->advance(); });
  account(flight);
}

void TransformPipeline::start(GradientBucket bucket) {
  if (transform_->rounds() > 1) {
    for (Flight& flight : flights_) {
      if (!flight.task->done()) go_on(flight);
    }
  }
  const CallTag tag{bucket.step, bucket.index, "gradients"};
  Flight& flight =
      flights_.emplace_back(Flight{bucket.index, std::make_unique<GradientChannel>(group_, tag), std::nullopt});
  guarded(flight.bucket, [&] {
    flight.task.emplace(transform_->run(std::move(bucket), *flight.channel));
    flight.task->rethrow();
  });
  account(flight);
}

double TransformPipeline::factor(bool weighted, double total_weight) const {
  const double ranks = group_.size();
  const double sum = transform_->yields() == GradientTransform::Yields::mean ? ranks : 1;
  if (!weighted) return sum / ranks;
  return total_weight > 0 ? sum / total_weight : 0;
}

}  // namespace unisono

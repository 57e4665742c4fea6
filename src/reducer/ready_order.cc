#include "reducer/ready_order.h"

#include <numeric>

namespace unisono {

ReadyOrder::ReadyOrder(std::size_t parameters) : order_(parameters), silent_for_(parameters, 0) {
  std::iota(order_.rbegin(), order_.rend(), std::size_t{0});
}

void ReadyOrder::end_of_backward(const Bitmap& fired, bool known) {
  bool all = true;
  for (std::size_t i = 0; i < fired.size() && all; ++i) all = fired.test(i);
  if (!all || any_silent_) {
    any_silent_ = false;
    for (std::size_t i = 0; i < fired.size(); ++i) {
      silent_for_[i] = fired.test(i) ? 0 : static_cast<std::uint8_t>(silent_for_[i] < 3 ? silent_for_[i] + 1 : 3);
      any_silent_ |= silent_for_[i] > 0;
    }
  }
  learnt_ = learnt_ || known;
}

void ReadyOrder::agree(ProcessGroup& group, std::int64_t step) {
  // What was not observed keeps its place behind what was.
  std::vector<std::int32_t> order(observed_.begin(), observed_.end());
  Bitmap seen(order_.size());
  for (std::size_t i : observed_) seen.set(i);
  for (std::size_t i : order_) {
    if (!seen.test(i)) order.push_back(static_cast<std::int32_t>(i));
  }
  CallOptions options;
  options.tag = {step, 0, "ready order"};
  group.broadcast({order.data(), order.size(), Dtype::i32}, 0, options).wait();
  order_.assign(order.begin(), order.end());
  observed_.clear();
  observed_.shrink_to_fit();
  agreed_ = true;
}

}  // namespace unisono

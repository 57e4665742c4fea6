#include "nn/buffer_sync.h"

#include <ATen/ATen.h>

#include <set>
#include <sstream>

#include "nn/model_digest.h"
#include "nn/state_broadcast.h"
#include "reducer/torch_types.h"

namespace unisono {
namespace {

std::vector<std::string> describe_buffers(const std::vector<NamedTensor>& buffers) {
  std::vector<std::string> lines;
  for (const NamedTensor& b : buffers) {
    std::ostringstream line;
    line << "buffer " << lines.size() << ": '" << b.name << "' " << b.tensor.scalar_type() << " " << b.tensor.sizes();
    if (b.tensor.is_cuda()) line << " on a GPU";
    lines.push_back(line.str());
  }
  return lines;
}

}  // namespace

BufferSync::BufferSync(const std::vector<NamedTensor>& buffers, BufferPolicy policy) : policy_(policy) {
  agree_on(buffers);
}

void BufferSync::agree_on(const std::vector<NamedTensor>& buffers) {
  agreed_.clear();
  for (const NamedTensor& b : buffers) {
    agreed_.push_back({b.name, b.tensor.sizes().vec(), b.tensor.scalar_type(), place_of(b.tensor)});
  }
  plan_ = plan_state(buffers, policy_);
}

std::vector<NamedTensor> BufferSync::added_to(const std::vector<NamedTensor>& buffers) const {
  std::set<std::string> agreed;
  for (const Entry& e : agreed_) agreed.insert(e.name);
  std::vector<NamedTensor> out;
  for (const NamedTensor& b : buffers) {
    if (!agreed.contains(b.name)) out.push_back(b);
  }
  return out;
}

bool BufferSync::are_as_agreed(const std::vector<NamedTensor>& buffers) const {
  if (buffers.size() != agreed_.size()) return false;
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const Entry& e = agreed_[i];
    const at::Tensor& t = buffers[i].tensor;
    if (e.dtype != t.scalar_type() || t.sizes() != e.sizes || e.device != place_of(t) || e.name != buffers[i].name) {
      return false;
    }
  }
  return true;
}

void BufferSync::run(const std::vector<NamedTensor>& buffers, int root, ProcessGroup& group) {
  at::NoGradGuard no_grad;
  if (hook_) return hook_(buffers, group);
  if (group.size() == 1) return;
  if (are_as_agreed(buffers)) {
    if (exchange_state(buffers, plan_, root, group, "buffers")) return;
  } else if (!plan_.empty()) {
    withhold_state(plan_, root, group, "buffers");
  }
  require_same_entries(
      describe_buffers(buffers), group, "buffers",
      "Reassign or resize a buffer alike on every rank, or name it in parameters_and_buffers_to_ignore.");
  agree_on(buffers);
  exchange_state(buffers, plan_, root, group, "buffers");
}

}  // namespace unisono

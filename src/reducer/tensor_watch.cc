#include "reducer/tensor_watch.h"

#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <mutex>
#include <unordered_map>

namespace unisono {

struct TensorWatch::State {
  std::unordered_map<const c10::StorageImpl*, std::vector<std::size_t>> by_memory;
  std::function<void(std::size_t)> used;
};

namespace {

// RecordFunction callbacks are plain function pointers: what they look for is found through this.
struct Watches {
  std::mutex mutex;
  std::vector<std::shared_ptr<TensorWatch::State>> all;

  static Watches& get() {
    static Watches watches;
    return watches;
  }
};

thread_local bool inside = false;

void look_at(const at::Tensor& tensor, const std::vector<std::shared_ptr<TensorWatch::State>>& watches) {
  if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->has_storage()) return;
  const c10::StorageImpl* memory = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  for (const auto& watch : watches) {
    const auto found = watch->by_memory.find(memory);
    if (found == watch->by_memory.end()) continue;
    for (std::size_t i : found->second) watch->used(i);
  }
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  if (inside) return nullptr;
  std::vector<std::shared_ptr<TensorWatch::State>> watches;
  {
    const std::lock_guard lock(Watches::get().mutex);
    watches = Watches::get().all;
  }
  inside = true;
  for (const c10::IValue& input : function.inputs()) {
    if (input.isTensor()) {
      look_at(input.toTensor(), watches);
    } else if (input.isTensorList()) {
      for (const at::Tensor& tensor : input.toTensorVector()) look_at(tensor, watches);
    }
  }
  inside = false;
  return nullptr;
}

}  // namespace

TensorWatch::TensorWatch(const std::vector<at::Tensor>& tensors, std::function<void(std::size_t)> used)
    : state_(std::make_shared<State>()) {
  state_->used = std::move(used);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    state_->by_memory[tensors[i].storage().unsafeGetStorageImpl()].push_back(i);
  }
  {
    const std::lock_guard lock(Watches::get().mutex);
    Watches::get().all.push_back(state_);
  }
  handle_ = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

TensorWatch::~TensorWatch() {
  at::removeCallback(handle_);
  const std::lock_guard lock(Watches::get().mutex);
  std::erase(Watches::get().all, state_);
}

}  // namespace unisono

// The only file that touches autograd's internals, which change between torch releases. Written against torch 2.13.
#include "reducer/autograd_hooks.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace unisono {
namespace {

using torch::autograd::variable_list;

template <typename Body>
auto telling(GradientListener& listener, Body body) {
  try {
    return body();
  } catch (const Error& error) {
    listener.leaving(error);
    throw;
  }
}

class PreHook : public torch::autograd::FunctionPreHook {
 public:
  PreHook(GradientListener& listener, std::size_t index) : listener_(listener), index_(index) {}
  variable_list operator()(const variable_list& gradients) override {
    return telling(listener_, [&] { return variable_list{listener_.before_accumulate(index_, gradients[0])}; });
  }

 private:
  GradientListener& listener_;
  std::size_t index_;
};

class PostHook : public torch::autograd::FunctionPostHook {
 public:
  PostHook(GradientListener& listener, std::size_t index) : listener_(listener), index_(index) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    telling(listener_, [&] { listener_.after_accumulate(index_); });
    return outputs;
  }

 private:
  GradientListener& listener_;
  std::size_t index_;
};

}  // namespace

struct AutogradHooks::Hooked {
  c10::intrusive_ptr<torch::autograd::Node> accumulator;
  torch::autograd::FunctionPreHook* pre = nullptr;
  std::uintptr_t post = 0;
};

AutogradHooks::AutogradHooks(const std::vector<at::Tensor>& parameters, GradientListener& listener) {
  hooked_.reserve(parameters.size());
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    Hooked h;
    h.accumulator = torch::autograd::impl::grad_accumulator(parameters[i]);
    auto pre = std::make_unique<PreHook>(listener, i);
    h.pre = pre.get();
    h.accumulator->add_pre_hook(std::move(pre));
    h.post = h.accumulator->add_post_hook(std::make_unique<PostHook>(listener, i));
    hooked_.push_back(std::move(h));
  }
}

AutogradHooks::~AutogradHooks() {
  for (Hooked& h : hooked_) {
    h.accumulator->del_post_hook(h.post);
    std::erase_if(h.accumulator->pre_hooks(), [&](const auto& hook) { return hook.get() == h.pre; });
  }
}

std::vector<bool> AutogradHooks::reached_from(const std::vector<at::Tensor>& outputs) const {
  using torch::autograd::Node;
  std::unordered_map<const Node*, std::size_t> index_of;
  for (std::size_t i = 0; i < hooked_.size(); ++i) index_of.emplace(hooked_[i].accumulator.get(), i);
  std::vector<bool> reached(hooked_.size(), false);
  std::unordered_set<const Node*> seen;
  std::vector<const Node*> left;
  const auto visit = [&](const Node* node) {
    if (node != nullptr && seen.insert(node).second) left.push_back(node);
  };
  for (const at::Tensor& output : outputs) {
    if (output.defined() && output.requires_grad()) visit(torch::autograd::impl::gradient_edge(output).function.get());
  }
  while (!left.empty()) {
    const Node* node = left.back();
    left.pop_back();
    if (const auto found = index_of.find(node); found != index_of.end()) reached[found->second] = true;
    for (const auto& edge : node->next_edges()) visit(edge.function.get());
  }
  return reached;
}

bool is_hooked(const at::Tensor& parameter) {
  const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
  if (!accumulator) return false;
  for (const auto& hook : accumulator->pre_hooks()) {
    if (dynamic_cast<const PreHook*>(hook.get())) return true;
  }
  return false;
}

bool has_post_accumulate_hook(const at::Tensor& parameter) {
  return torch::autograd::impl::post_acc_grad_hooks(parameter) != nullptr;
}

BackwardContext current_backward() {
  using torch::autograd::GraphTask;
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (exec_info == nullptr) return {};
  // The exported function gives the address of a member of the running GraphTask; the task's depth lies beside it.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Winvalid-offsetof"
  const auto* task =
      reinterpret_cast<const GraphTask*>(reinterpret_cast<const char*>(exec_info) - offsetof(GraphTask, exec_info_));
#pragma GCC diagnostic pop
  return {task->reentrant_depth_, torch::autograd::get_current_graph_task_id()};
}

void at_end_of_backward(std::function<void()> done) {
  torch::autograd::Engine::get_default_engine().queue_callback(std::move(done));
}

namespace {

// RecordFunction callbacks are plain function pointers: the watches that a thread waits for, one of each wrapper inside a
// checkpoint, are found through this. The callback is a global one, for autograd puts the thread-local ones back to what
// they were when the nested backward ends.
struct Watch {
  Watch(int below, std::function<void()> call) : depth(below), reached(std::move(call)) {}
  ~Watch() { at::removeCallback(handle); }
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;

  int depth;
  std::function<void()> reached;
  at::CallbackHandle handle = at::INVALID_CALLBACK_HANDLE;
};
thread_local std::vector<std::weak_ptr<Watch>> watches;

std::unique_ptr<at::ObserverContext> on_backward_node(const at::RecordFunction&) {
  if (watches.empty()) return nullptr;
  const int depth = current_backward().depth;
  if (depth < 0) return nullptr;
  std::vector<std::function<void()>> due;
  std::erase_if(watches, [&](const std::weak_ptr<Watch>& held) {
    const auto watch = held.lock();
    if (watch && depth >= watch->depth) return false;
    if (watch) due.push_back(std::move(watch->reached));
    return true;
  });
  for (const auto& reached : due) reached();
  return nullptr;
}

}  // namespace

std::shared_ptr<void> watch_outer_backward(int depth, std::function<void()> reached) {
  auto watch = std::make_shared<Watch>(depth, std::move(reached));
  watch->handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&on_backward_node).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  watches.push_back(watch);
  return watch;
}

}  // namespace unisono

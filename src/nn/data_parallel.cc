#include <ATen/ATen.h>
#include <pthread.h>
#include <unisono/distributed_data_parallel.h>

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <thread>

#include "comm/c10d/recorded_group.h"
#include "comm/c10d/tensors.h"
#include "nn/buffer_sync.h"
#include "nn/model_digest.h"
#include "nn/module_walk.h"
#include "nn/state_broadcast.h"
#include "reducer/autograd_hooks.h"
#include "reducer/reducer.h"

namespace unisono {
namespace {

std::vector<NamedTensor> without(std::vector<NamedTensor> tensors, const std::vector<std::string>& ignored) {
  const std::set<std::string> names(ignored.begin(), ignored.end());
  std::erase_if(tensors, [&](const NamedTensor& t) { return names.contains(t.name) || !t.tensor.defined(); });
  return tensors;
}

// A parameter registered under two names is one parameter.
std::vector<NamedTensor> distinct(std::vector<NamedTensor> tensors) {
  std::set<const void*> seen;
  std::erase_if(tensors, [&](const NamedTensor& t) { return !seen.insert(t.tensor.unsafeGetTensorImpl()).second; });
  return tensors;
}

// `frozen`: whether it may be that none requires grad now.
void require_reducible(const std::vector<NamedTensor>& parameters, bool frozen = false) {
  bool any = frozen;
  for (const NamedTensor& p : parameters) {
    if (!p.tensor.requires_grad()) continue;
    any = true;
    if (p.tensor.layout() != at::kStrided || p.tensor.is_meta()) {
      throw Error(ErrorCode::invalid_argument,
                  "parameter '" + p.name + "' is " +
                      (p.tensor.is_meta() ? "on the meta device" : "not a strided tensor") +
                      "; give it real, dense memory before wrapping the module");
    }
    if (!p.tensor.is_leaf()) {
      throw Error(ErrorCode::invalid_argument, "parameter '" + p.name + "' is no leaf of the autograd graph");
    }
    wire_type(p.tensor.scalar_type(), "parameter '" + p.name + "'");
  }
  if (!any) {
    throw Error(
        ErrorCode::invalid_argument,
        "no parameter of the module requires grad, so there is nothing to synchronise; use the module as it is");
  }
}

// What must stay as it is for the reducer's plan and hooks to hold.
struct Wrapped {
  explicit Wrapped(const at::Tensor& t)
      : impl(t.unsafeGetTensorImpl()), options(t.options()), requires_grad(t.requires_grad()) {}
  bool still(const at::Tensor& t) const {
    return t.unsafeGetTensorImpl() == impl && t.requires_grad() == requires_grad &&
           t.scalar_type() == options.dtype() && t.device() == options.device();
  }
  const void* impl;
  at::TensorOptions options;
  bool requires_grad;
};

void require_unwrapped(const std::vector<NamedTensor>& parameters) {
  for (const NamedTensor& p : parameters) {
    if (!p.tensor.requires_grad() || !is_hooked(p.tensor)) continue;
    throw Error(ErrorCode::invalid_argument,
                "parameter '" + p.name +
                    "' belongs to another DistributedDataParallel already: the module, or one inside or "
                    "around it, has been wrapped before. Its gradients would be averaged twice; wrap the outermost "
                    "module once, "
                    "or destroy the other wrapper first.");
  }
}

// While it lives, what a forward and backward of this rank would send over the companion group is sent, with nothing in it, by the
// thread "uni-join": where it stands among the messages of the group itself is not the same on all ranks.
class ReplayedForward {
 public:
  explicit ReplayedForward(std::shared_ptr<ProcessGroup> group)
      : group_(std::move(group)), second_(recorded_companion(group_)) {
    if (second_) thread_ = std::thread([this] { run(); });
  }
  ~ReplayedForward() {
    if (!second_) return;
    if (std::uncaught_exceptions() > exceptions_) {
      second_->abort(Error(ErrorCode::peer_lost, "a join has failed on rank " + std::to_string(group_->rank())));
    }
    thread_.join();
  }
  ReplayedForward(const ReplayedForward&) = delete;
  ReplayedForward& operator=(const ReplayedForward&) = delete;

 private:
  void run() {
    pthread_setname_np(pthread_self(), "uni-join");
    try {
      second_->replay();
    } catch (const Error& error) {
      group_->abort(error);  // whoever waits there learns why
    }
  }

  std::shared_ptr<ProcessGroup> group_;
  std::shared_ptr<RecordedGroup> second_;
  int exceptions_ = std::uncaught_exceptions();
  std::thread thread_;
};

}  // namespace

struct DataParallel::State {
  void wrap(std::int64_t first_step);

  std::vector<NamedTensor> parameters;
  std::vector<Wrapped> wrapped;
  mutable std::size_t key = 0;  // of the module's parameters when they were last compared
  std::vector<NamedTensor> buffers;
  std::shared_ptr<ProcessGroup> group;
  DistributedDataParallelOptions options;
  std::unique_ptr<Reducer> reducer;
  std::function<void(const std::vector<NamedTensor>&)> update;  // the optimizer in backward
  StepInBackwardOptions update_options;
  std::unique_ptr<BufferSync> buffer_sync;
  int user = 0;                 // which of the wrappers on the group
  std::int64_t buffers_at = 0;  // synchronisations when buffers were last brought; -1: never
};

DataParallel::DataParallel(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                           std::shared_ptr<ProcessGroup> group, const DistributedDataParallelOptions& options)
    : state_(std::make_unique<State>()) {
  if (!group)
    throw Error(ErrorCode::invalid_argument, "DistributedDataParallel needs a process group; see unisono::init()");
  State& s = *state_;
  s.group = std::move(group);
  s.options = options;
  s.user = s.group->number_user();
  s.parameters = distinct(without(std::move(parameters), options.parameters_and_buffers_to_ignore));
  s.buffers = distinct(without(std::move(buffers), options.parameters_and_buffers_to_ignore));
  require_same_model(describe_model(s.parameters, s.buffers, options), *s.group);
  require_reducible(s.parameters);
  require_unwrapped(s.parameters);
  if (options.init_sync) {
    broadcast_state(s.parameters, 0, *s.group, "parameters");
    broadcast_state(s.buffers, 0, *s.group, "buffers");
  }
  s.buffers_at = options.init_sync ? 0 : -1;
  s.buffer_sync = std::make_unique<BufferSync>(s.buffers, options.buffer_policy);
  s.wrap(0);
}

void DataParallel::State::wrap(std::int64_t first_step) {
  Reducer::Options o;
  o.caps = BucketCaps::from(options);
  o.overlap = options.overlap && !options.naive;
  o.as_view = options.gradient_as_bucket_view;
  o.strict = options.strict;
  o.uneven_accumulation = options.uneven_accumulation;
  o.check_finite = options.check_finite;
  o.check_replicas = options.check_replicas && options.init_sync;
  if (options.reduce_dtype) o.travels_as = scalar_type_of(*options.reduce_dtype);
  o.first_step = first_step;
  o.user = user;
  o.rethrow = options.rethrow;
  const std::set<std::string> sparse(options.sparse_parameters.begin(), options.sparse_parameters.end());
  const std::set<std::string> delayed(options.delayed_parameters.begin(), options.delayed_parameters.end());
  std::vector<NamedTensor> trainable;
  wrapped.clear();
  for (const NamedTensor& p : parameters) {
    wrapped.emplace_back(p.tensor);
    if (!p.tensor.requires_grad()) {
      o.frozen.push_back(p);
      continue;
    }
    trainable.push_back(p);
    o.sparse.push_back(sparse.contains(p.name));
    o.delayed.push_back(delayed.contains(p.name));
  }
  if (std::find(o.sparse.begin(), o.sparse.end(), true) == o.sparse.end()) o.sparse.clear();
  auto next = std::make_unique<Reducer>(trainable, group, o);
  if (reducer) {
    next->set_sync(reducer->sync());
    next->set_transform(reducer->transform());
    next->set_update(update, update_options);
    next->continue_join(*reducer);
    next->timeline() = reducer->timeline();
  }
  reducer = std::move(next);
}

bool DataParallel::parameters_changed() const {
  const State& s = *state_;
  for (std::size_t i = 0; i < s.parameters.size(); ++i) {
    if (!s.wrapped[i].still(s.parameters[i].tensor)) return true;
  }
  return false;
}

bool DataParallel::module_changed(const torch::nn::Module& module) const {
  const std::size_t before = state_->key;
  state_->key = parameters_key(module);
  return (before != 0 && before != state_->key) || parameters_changed();
}

void DataParallel::follow(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers) {
  State& s = *state_;
  parameters = distinct(without(std::move(parameters), s.options.parameters_and_buffers_to_ignore));
  buffers = distinct(without(std::move(buffers), s.options.parameters_and_buffers_to_ignore));
  bool rewrap = parameters.size() < s.parameters.size();
  std::string changed;
  std::vector<NamedTensor> fresh;
  std::map<const void*, std::size_t> before;
  for (std::size_t i = 0; i < s.wrapped.size(); ++i) before.emplace(s.wrapped[i].impl, i);
  for (const NamedTensor& p : parameters) {
    const auto found = before.find(p.tensor.unsafeGetTensorImpl());
    if (found == before.end()) fresh.push_back(p);
    if (found != before.end() && s.wrapped[found->second].still(p.tensor)) continue;
    rewrap = true;
    if (changed.empty()) changed = p.name;
  }
  // Where there were buffers, those of the next forward are compared anyway, and the group survives a difference.
  std::vector<NamedTensor> fresh_buffers;
  if (rewrap || (s.options.broadcast_buffers && s.buffer_sync->empty()))
    fresh_buffers = s.buffer_sync->added_to(buffers);
  if (!rewrap && fresh_buffers.empty()) return;
  if (changed.empty()) changed = rewrap ? "one removed" : fresh_buffers[0].name;
  finish_step();
  if (rewrap && s.reducer->has_unsynchronised()) {
    throw Error(ErrorCode::invalid_argument,
                "a parameter ('" + changed +
                    "') was added, removed or changed while gradients accumulated under "
                    "no_sync wait for their synchronisation; change the module between steps");
  }
  std::vector<std::string> entries = describe_model(parameters, buffers, s.options);
  for (const NamedTensor& p : fresh) entries.push_back("new since the module was wrapped: '" + p.name + "'");
  require_same_model(entries, *s.group, name_of_change(changed));
  require_reducible(parameters, /*frozen=*/true);
  if (s.options.init_sync) {
    broadcast_state(fresh, 0, *s.group, "new parameters");
    broadcast_state(fresh_buffers, 0, *s.group, "new buffers");
  }
  s.parameters = std::move(parameters);
  s.buffers = std::move(buffers);
  s.buffer_sync->agree_on(s.buffers);
  if (rewrap) s.wrap(s.reducer->step());
  s.buffers_at = -1;
}

void DataParallel::set_group(std::shared_ptr<ProcessGroup> group) {
  if (!group) throw Error(ErrorCode::invalid_argument, "set_group: no group was given");
  State& s = *state_;
  try {
    s.reducer->finish_step();  // before values are compared and brought: none may be taken later
  } catch (const Error&) {     // why the old group failed
  }
  const int user = group->number_user();
  require_same_model(describe_model(s.parameters, s.buffers, s.options), *group);
  if (s.options.init_sync) {
    broadcast_state(s.parameters, 0, *group, "parameters");
    broadcast_state(s.buffers, 0, *group, "buffers");
  }
  for (const NamedTensor& p : s.parameters) {
    if (p.tensor.requires_grad()) p.tensor.mutable_grad().reset();
  }
  s.group = std::move(group);
  s.user = user;
  s.wrap(0);
  s.buffers_at = s.options.init_sync ? 0 : -1;
}

void DataParallel::begin_join(const JoinOptions& options) {
  state_->reducer->begin_join(!options.divide_by_initial_world_size, options.throw_on_early_termination);
}

void DataParallel::finish_join() {
  State& s = *state_;
  try {
    bool others_go_on = true;
    while (others_go_on) {
      const ReplayedForward forward(s.group);
      before_forward(s.buffers);
      others_go_on = s.reducer->shadow_step();
    }
    const int last = s.reducer->authority();
    broadcast_state(s.parameters, last, *s.group, "parameters after join");
    broadcast_state(s.buffers, last, *s.group, "buffers after join");
  } catch (...) {
    cancel_join();
    throw;
  }
  cancel_join();
}

void DataParallel::cancel_join() { state_->reducer->end_join(); }

void DataParallel::set_transform(std::shared_ptr<GradientTransform> transform) {
  state_->reducer->set_transform(std::move(transform));
}
void DataParallel::set_step_in_backward(std::function<void(const std::vector<NamedTensor>&)> update,
                                        StepInBackwardOptions options) {
  state_->reducer->set_update(update, options);
  state_->update = std::move(update);
  state_->update_options = std::move(options);
}
void DataParallel::finish_step() const { state_->reducer->finish_step(); }
void DataParallel::check_step() const { state_->reducer->check_step(); }
std::shared_ptr<GradientTransform> DataParallel::transform() const { return state_->reducer->transform(); }

DataParallel::~DataParallel() = default;
DataParallel::DataParallel(DataParallel&&) noexcept = default;
DataParallel& DataParallel::operator=(DataParallel&&) noexcept = default;

bool DataParallel::wants_buffers() const {
  const State& s = *state_;
  return s.options.broadcast_buffers && !s.buffer_sync->empty() && s.group->size() > 1 && s.reducer->sync() &&
         s.reducer->synchronisations() > s.buffers_at && at::GradMode::is_enabled();
}

void DataParallel::before_forward(const std::vector<NamedTensor>& buffers) {
  if (wants_buffers()) sync_state(buffers);
}

void DataParallel::follow_buffers(const std::vector<NamedTensor>& buffers) {
  state_->buffers = distinct(without(buffers, state_->options.parameters_and_buffers_to_ignore));
}

void DataParallel::sync_state(const std::vector<NamedTensor>& buffers) {
  State& s = *state_;
  follow_buffers(buffers);
  if (s.group->size() > 1) s.buffer_sync->run(s.buffers, s.reducer->authority(), *s.group);
  s.buffers_at = s.reducer->synchronisations();
}

void DataParallel::set_buffer_hook(BufferHook hook) { state_->buffer_sync->set_hook(std::move(hook)); }

bool DataParallel::wants_outputs() const {
  const State& s = *state_;
  return s.options.find_unused_parameters && s.reducer->sync() && at::GradMode::is_enabled();
}

void DataParallel::after_forward(const std::vector<at::Tensor>& outputs) {
  if (wants_outputs() && !outputs.empty()) state_->reducer->expect_backward_from(outputs);
}

bool DataParallel::has_unsynchronised_gradients() const { return state_->reducer->has_unsynchronised(); }

void DataParallel::require_synchronised() const {
  if (!has_unsynchronised_gradients() || state_->group->size() == 1) return;
  throw Error(ErrorCode::invalid_argument,
              "an optimizer step on gradients that were accumulated under no_sync and not averaged since: the replicas "
              "would drift "
              "apart. Run the last backward of the step outside of no_sync, or call sync_grads() before the step.");
}

void DataParallel::set_sync(bool on) { state_->reducer->set_sync(on); }
bool DataParallel::sync() const { return state_->reducer->sync(); }
at::Tensor DataParallel::weight(const at::Tensor& mean_loss, double n) { return state_->reducer->weight(mean_loss, n); }
void DataParallel::sync_grads() { state_->reducer->sync_grads(); }

std::string DataParallel::digest() const {
  finish_step();
  return digest_of(state_->parameters, state_->buffers);
}

bool DataParallel::replicas_identical() {
  if (wants_buffers()) sync_state(state_->buffers);
  const std::vector<std::string> all = gather_texts(digest(), *state_->group, "replica digest");
  return std::all_of(all.begin(), all.end(), [&](const std::string& d) { return d == all[0]; });
}

const StepStats& DataParallel::last_step() const { return state_->reducer->timeline().last(); }
void DataParallel::set_tracing(bool on) { state_->reducer->timeline().set_tracing(on); }
std::vector<TraceEvent> DataParallel::take_trace() { return state_->reducer->timeline().take(); }
std::vector<std::int64_t> DataParallel::bucket_sizes() const { return state_->reducer->bucket_sizes(); }
const std::shared_ptr<ProcessGroup>& DataParallel::group() const { return state_->group; }

}  // namespace unisono

#include <ATen/ATen.h>
#include <unisono/distributed_data_parallel.h>

#include <algorithm>

#include "nn/data_parallel_state.h"
#include "nn/model_digest.h"
#include "nn/replayed_forward.h"
#include "nn/state_broadcast.h"

namespace unisono {

DataParallel::DataParallel(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                           std::shared_ptr<ProcessGroup> group, const DistributedDataParallelOptions& options)
    : state_(std::make_unique<State>()) {
  if (!group)
    throw Error(ErrorCode::invalid_argument, "DistributedDataParallel needs a process group; see unisono::init()");
  State& s = *state_;
  s.group = std::move(group);
  s.options = options;
  s.user = s.group->number_user();
  s.parameters = synchronised(parameters, options.parameters_and_buffers_to_ignore);
  s.buffers = synchronised(buffers, options.parameters_and_buffers_to_ignore);
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
  state_->buffers = synchronised(buffers, state_->options.parameters_and_buffers_to_ignore);
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

std::string DataParallel::digest(const std::vector<NamedTensor>& parameters,
                                 const std::vector<NamedTensor>& buffers) const {
  finish_step();
  const auto& ignored = state_->options.parameters_and_buffers_to_ignore;
  return digest_of(synchronised(parameters, ignored), synchronised(buffers, ignored));
}

bool DataParallel::replicas_identical(const std::vector<NamedTensor>& parameters,
                                      const std::vector<NamedTensor>& buffers) {
  if (wants_buffers()) sync_state(buffers);
  const std::vector<std::string> all = gather_texts(digest(parameters, buffers), *state_->group, "replica digest");
  return std::all_of(all.begin(), all.end(), [&](const std::string& d) { return d == all[0]; });
}

const StepStats& DataParallel::last_step() const { return state_->reducer->timeline().last(); }
void DataParallel::set_tracing(bool on) { state_->reducer->timeline().set_tracing(on); }
std::vector<TraceEvent> DataParallel::take_trace() { return state_->reducer->timeline().take(); }
std::vector<std::int64_t> DataParallel::bucket_sizes() const { return state_->reducer->bucket_sizes(); }
const std::shared_ptr<ProcessGroup>& DataParallel::group() const { return state_->group; }

}  // namespace unisono

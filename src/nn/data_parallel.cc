#include <algorithm>
#include <set>

#include <ATen/ATen.h>

#include <unisono/distributed_data_parallel.h>

#include "nn/model_digest.h"
#include "nn/state_broadcast.h"
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

void require_reducible(const std::vector<NamedTensor>& parameters) {
  bool any = false;
  for (const NamedTensor& p : parameters) {
    if (!p.tensor.requires_grad()) continue;
    any = true;
    if (p.tensor.layout() != at::kStrided || p.tensor.is_meta()) {
      throw Error(ErrorCode::invalid_argument,
                  "parameter '" + p.name + "' is " + (p.tensor.is_meta() ? "on the meta device" : "not a strided tensor") +
                      "; give it real, dense memory before wrapping the module");
    }
    if (!p.tensor.is_leaf()) {
      throw Error(ErrorCode::invalid_argument, "parameter '" + p.name + "' is no leaf of the autograd graph");
    }
    wire_type(p.tensor.scalar_type(), "parameter '" + p.name + "'");
  }
  if (!any) {
    throw Error(ErrorCode::invalid_argument,
                "no parameter of the module requires grad, so there is nothing to synchronise; use the module as it is");
  }
}

}  // namespace

struct DataParallel::State {
  std::vector<NamedTensor> parameters;
  std::vector<NamedTensor> buffers;
  std::shared_ptr<ProcessGroup> group;
  DistributedDataParallelOptions options;
  std::unique_ptr<Reducer> reducer;
  std::int64_t buffers_at = 0;  // synchronisations when buffers were last sent
};

DataParallel::DataParallel(std::vector<NamedTensor> parameters, std::vector<NamedTensor> buffers,
                           std::shared_ptr<ProcessGroup> group, const DistributedDataParallelOptions& options)
    : state_(std::make_unique<State>()) {
  if (!group) throw Error(ErrorCode::invalid_argument, "DistributedDataParallel needs a process group; see unisono::init()");
  State& s = *state_;
  s.group = std::move(group);
  s.options = options;
  s.parameters = distinct(without(std::move(parameters), options.parameters_and_buffers_to_ignore));
  s.buffers = distinct(without(std::move(buffers), options.parameters_and_buffers_to_ignore));
  require_same_model(describe_model(s.parameters, s.buffers, options), *s.group);
  require_reducible(s.parameters);
  if (options.init_sync) {
    broadcast_state(s.parameters, 0, *s.group, "parameters");
    broadcast_state(s.buffers, 0, *s.group, "buffers");
  }
  std::vector<NamedTensor> trainable;
  for (const NamedTensor& p : s.parameters) {
    if (p.tensor.requires_grad()) trainable.push_back(p);
  }
  s.reducer = std::make_unique<Reducer>(
      trainable, s.group,
      Reducer::Options{BucketCaps::from(options), options.overlap && !options.naive, options.gradient_as_bucket_view,
                       options.strict, options.rethrow});
}

DataParallel::~DataParallel() = default;
DataParallel::DataParallel(DataParallel&&) noexcept = default;
DataParallel& DataParallel::operator=(DataParallel&&) noexcept = default;

bool DataParallel::wants_buffers() const {
  const State& s = *state_;
  return s.options.broadcast_buffers && !s.buffers.empty() && s.group->size() > 1 && s.reducer->sync() &&
         s.reducer->synchronisations() > s.buffers_at && at::GradMode::is_enabled();
}

void DataParallel::before_forward(const std::vector<NamedTensor>& buffers) {
  if (!wants_buffers()) return;
  State& s = *state_;
  s.buffers = distinct(without(buffers, s.options.parameters_and_buffers_to_ignore));
  broadcast_state(s.buffers, 0, *s.group, "buffers");
  s.buffers_at = s.reducer->synchronisations();
}

bool DataParallel::wants_outputs() const {
  const State& s = *state_;
  return s.options.find_unused_parameters && s.reducer->sync() && at::GradMode::is_enabled();
}

void DataParallel::after_forward(const std::vector<at::Tensor>& outputs) {
  if (wants_outputs() && !outputs.empty()) state_->reducer->expect_backward_from(outputs);
}

bool DataParallel::has_unsynchronised_gradients() const { return state_->reducer->has_unsynchronised(); }

void DataParallel::set_sync(bool on) { state_->reducer->set_sync(on); }
bool DataParallel::sync() const { return state_->reducer->sync(); }
at::Tensor DataParallel::weight(const at::Tensor& mean_loss, double n) { return state_->reducer->weight(mean_loss, n); }
void DataParallel::sync_grads() { state_->reducer->sync_grads(); }

std::string DataParallel::digest() const { return digest_of(state_->parameters, state_->buffers); }

bool DataParallel::replicas_identical() {
  if (wants_buffers()) before_forward(state_->buffers);
  const std::vector<std::string> all = gather_texts(digest(), *state_->group, "replica digest");
  return std::all_of(all.begin(), all.end(), [&](const std::string& d) { return d == all[0]; });
}

const StepStats& DataParallel::last_step() const { return state_->reducer->timeline().last(); }
void DataParallel::set_tracing(bool on) { state_->reducer->timeline().set_tracing(on); }
std::vector<TraceEvent> DataParallel::take_trace() { return state_->reducer->timeline().take(); }
std::vector<std::int64_t> DataParallel::bucket_sizes() const { return state_->reducer->bucket_sizes(); }
const std::shared_ptr<ProcessGroup>& DataParallel::group() const { return state_->group; }

}  // namespace unisono

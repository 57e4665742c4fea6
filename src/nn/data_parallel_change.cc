// Making the reducer, and making it anew when the module or its group has changed.
#include <algorithm>
#include <map>
#include <set>

#include "comm/c10d/tensors.h"
#include "nn/data_parallel_state.h"
#include "nn/model_digest.h"
#include "nn/module_walk.h"
#include "nn/state_broadcast.h"

namespace unisono {

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
  parameters = synchronised(parameters, s.options.parameters_and_buffers_to_ignore);
  buffers = synchronised(buffers, s.options.parameters_and_buffers_to_ignore);
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

void DataParallel::set_group(std::shared_ptr<ProcessGroup> group, std::vector<NamedTensor> parameters,
                             std::vector<NamedTensor> buffers) {
  if (!group) throw Error(ErrorCode::invalid_argument, "set_group: no group was given");
  State& s = *state_;
  try {
    s.reducer->finish_step();  // before values are compared and brought: none may be taken later
  } catch (const Error&) {     // why the old group failed
  }
  parameters = synchronised(parameters, s.options.parameters_and_buffers_to_ignore);
  buffers = synchronised(buffers, s.options.parameters_and_buffers_to_ignore);
  const int user = group->number_user();
  require_same_model(describe_model(parameters, buffers, s.options), *group);
  require_reducible(parameters, /*frozen=*/true);
  if (s.options.init_sync) {
    broadcast_state(parameters, 0, *group, "parameters");
    broadcast_state(buffers, 0, *group, "buffers");
  }
  for (const NamedTensor& p : parameters) {
    if (p.tensor.requires_grad()) p.tensor.mutable_grad().reset();
  }
  s.parameters = std::move(parameters);
  s.buffers = std::move(buffers);
  s.group = std::move(group);
  s.user = user;
  s.buffer_sync->agree_on(s.buffers);
  s.wrap(0);
  s.buffers_at = s.options.init_sync ? 0 : -1;
}

}  // namespace unisono

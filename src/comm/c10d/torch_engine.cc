#include "comm/c10d/torch_engine.h"

#include <unisono/c10d.h>

#include <algorithm>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>

#include "base/clock.h"
#include "base/time_budget.h"
#include "comm/c10d/engine.h"
#include "comm/c10d/first_line.h"
#include "comm/c10d/store_for_torch.h"
#include "comm/hierarchy/hierarchy_group.h"
#include "comm/rendezvous.h"

namespace unisono {
namespace {

std::chrono::milliseconds whole(std::chrono::nanoseconds time) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(bounded(time)), std::chrono::milliseconds(1));
}

EngineStart meet(const GroupOptions& options) {
  EngineStart out{nullptr, options.rank, options.size, whole(options.start_timeout)};
  if (!options.store) {  // a world of one
    out.store = c10::make_intrusive<c10d::HashStore>();
    return out;
  }
  const TimeBudget time(options.start_timeout);
  const std::string round =
      join_round(*options.store, options.rank, options.size, options.prefix, options.start_timeout);
  out.store = c10::make_intrusive<c10d::PrefixStore>(round, store_for_torch(options.store));
  out.timeout = whole(time.left());
  return out;
}

c10::intrusive_ptr<c10d::ProcessGroup> connect(const TorchEngine& engine, const EngineStart& start,
                                               const GroupOptions& options) {
  c10::intrusive_ptr<c10d::Backend> backend;
  try {
    backend = engine.start(start);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& e) {
    throw Error(ErrorCode::timeout, std::string("unisono ") + engine.name + " group, rank " +
                                        std::to_string(options.rank) + " of " + std::to_string(options.size) +
                                        ": the ranks have met in their store, but the engine did not start: " +
                                        first_line(e) + ". " + engine.advice);
  }
  backend->setTimeout(whole(options.timeout));
  auto group = c10::make_intrusive<c10d::ProcessGroup>(start.store, start.rank, start.size);
  group->setBackend(engine.device, engine.type, backend);
  group->setDefaultBackend(engine.type);
  return group;
}

}  // namespace

std::shared_ptr<ProcessGroup> make_engine_group(const TorchEngine& engine, const GroupOptions& options) {
  return make_c10d_group(connect(engine, meet(options), options));
}

std::shared_ptr<ProcessGroup> make_engine_group_over_hosts(const TorchEngine& engine, const GroupOptions& options) {
  const EngineStart start = meet(options);
  const auto among = [&](const std::string& name, const std::vector<int>& ranks) -> std::unique_ptr<Engine> {
    const auto own = std::find(ranks.begin(), ranks.end(), options.rank);
    if (own == ranks.end()) return nullptr;
    EngineStart part = start;
    part.store = c10::make_intrusive<c10d::PrefixStore>(name, start.store);
    part.rank = static_cast<int>(own - ranks.begin());
    part.size = static_cast<int>(ranks.size());
    return std::make_unique<C10dEngine>(connect(engine, part, options));
  };
  const auto host_store = [&](const std::string& name, bool) {
    return make_store(c10::make_intrusive<c10d::PrefixStore>("host/" + name, start.store));
  };
  return make_over_hosts(std::make_unique<C10dEngine>(connect(engine, start, options)), among, host_store,
                         options.start_timeout);
}

}  // namespace unisono

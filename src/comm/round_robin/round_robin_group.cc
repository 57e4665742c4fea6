#include "comm/round_robin/round_robin_group.h"

#include <algorithm>
#include <array>
#include <set>
#include <string>
#include <utility>

namespace unisono {
namespace {

using Groups = std::vector<std::shared_ptr<ProcessGroup>>;

[[noreturn]] void refuse(const std::string& problem) {
  throw Error(ErrorCode::invalid_argument, "make_round_robin_group: " + problem);
}

void check_alike(const Groups& groups) {
  if (groups.empty()) refuse("no group was given; give one or more");
  std::set<const ProcessGroup*> seen;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    const std::string here = "group " + std::to_string(i);
    if (!groups[i]) refuse(here + " is null");
    const auto place = [](const ProcessGroup& g) {
      return "rank " + std::to_string(g.rank()) + " of " + std::to_string(g.size());
    };
    if (groups[i]->rank() != groups[0]->rank() || groups[i]->size() != groups[0]->size()) {
      refuse("this process is " + place(*groups[0]) + " in group 0 and " + place(*groups[i]) + " in " + here +
             "; all groups must have the same ranks");
    }
    if (!seen.insert(groups[i].get()).second)
      refuse(here + " was given before; each group may be there once, make " + std::to_string(groups.size()) +
             " groups of the same ranks");
  }
}

std::string name_of(const Groups& groups) {
  std::string names;
  for (const auto& group : groups) names += (names.empty() ? "" : ", ") + group->name();
  return "round-robin(" + names + ")";
}

std::chrono::nanoseconds longest_timeout(const Groups& groups) {
  std::chrono::nanoseconds longest{0};
  for (const auto& group : groups) longest = std::max(longest, group->timeout());
  return longest;
}

// Ranks that send call i to different groups must not have it taken for another one: where a call has no name of its
// own, the fingerprint holds its number. A table, because tags are literals.
const char* name_of_turn(std::int64_t number) {
  static const auto names = [] {
    std::array<std::string, 256> all;
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = "turn " + std::to_string(i);
    return all;
  }();
  return names[static_cast<std::size_t>(number) % names.size()].c_str();
}

bool is_named(const CallTag& tag) {
  return tag.step >= 0 || tag.bucket >= 0 || (tag.what != nullptr && *tag.what != '\0');
}

}  // namespace

RoundRobinGroup::RoundRobinGroup(Groups groups)
    : ProcessGroup(groups[0]->rank(), groups[0]->size(), name_of(groups), longest_timeout(groups)),
      groups_(std::move(groups)),
      line_(std::make_shared<CallLine>(groups_)) {}

std::optional<std::size_t> RoundRobinGroup::home_of(const Buffer& out, const Buffer& in) {
  const auto home = homes_.find(out);
  return home ? home : homes_.find(in);
}

template <typename Options, typename Make>
Work RoundRobinGroup::call(std::optional<std::size_t> home, Options options, const Make& make) {
  line_->check();
  const std::lock_guard lock(order_mutex_);
  if (!is_named(options.tag)) options.tag.what = name_of_turn(next_);
  TurnCall made{.group = home.value_or(static_cast<std::size_t>(next_) % groups_.size()),
                .number = next_,
                .in_order = options.priority == 0};
  try {
    made.work = make(*groups_[made.group], options);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument) throw;  // this rank's arguments: no call was made
    line_->fail(made, error);
    line_->check();
    throw;
  }
  ++next_;
  return line_->add(std::move(made));
}

Work RoundRobinGroup::all_reduce(Buffer data, const AllReduceOptions& options) {
  return call(homes_.find(data), options,
              [&](ProcessGroup& g, const auto& o) { return g.all_reduce(std::move(data), o); });
}

Work RoundRobinGroup::broadcast(Buffer data, int root, const CallOptions& options) {
  return call(homes_.find(data), options,
              [&](ProcessGroup& g, const auto& o) { return g.broadcast(std::move(data), root, o); });
}

Work RoundRobinGroup::all_gather(Buffer out, Buffer in, const CallOptions& options) {
  return call(home_of(out, in), options,
              [&](ProcessGroup& g, const auto& o) { return g.all_gather(std::move(out), std::move(in), o); });
}

Work RoundRobinGroup::reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) {
  return call(home_of(out, in), options,
              [&](ProcessGroup& g, const auto& o) { return g.reduce_scatter(std::move(out), std::move(in), o); });
}

Work RoundRobinGroup::all_to_all(Buffer out, Buffer in, const CallOptions& options) {
  return call(home_of(out, in), options,
              [&](ProcessGroup& g, const auto& o) { return g.all_to_all(std::move(out), std::move(in), o); });
}

Work RoundRobinGroup::barrier(const CallOptions& options) {
  return call(std::nullopt, options, [](ProcessGroup& g, const auto& o) { return g.barrier(o); });
}

Buffer RoundRobinGroup::allocate(std::size_t bytes) {
  line_->check();
  TurnCall made;
  {
    const std::lock_guard lock(order_mutex_);
    made.number = next_++;
    made.group = static_cast<std::size_t>(made.number) % groups_.size();
  }
  try {
    Buffer memory = groups_[made.group]->allocate(bytes);
    homes_.add(memory, made.group);
    return memory;
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument) throw;  // all ranks have refused it
    line_->fail(made, error);
    line_->check();
    throw;
  }
}

std::shared_ptr<ProcessGroup> make_round_robin_group(Groups groups) {
  check_alike(groups);
  return std::make_shared<RoundRobinGroup>(std::move(groups));
}

Groups groups_of_round_robin(const ProcessGroup& group) {
  const auto* ours = dynamic_cast<const RoundRobinGroup*>(&group);
  return ours ? ours->groups() : Groups{};
}

}  // namespace unisono

#include <unisono/regroup.h>
#include <unisono/round_robin.h>

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "base/time_budget.h"
#include "comm/stored_group.h"

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kSlice{50};

std::string list(const std::vector<int>& ranks) {
  std::string out;
  for (const int rank : ranks) out += (out.empty() ? "" : ", ") + std::to_string(rank);
  return "[" + out + "]";
}

std::string here(const ProcessGroup& group, const std::vector<int>& ranks) {
  return "group " + group.name() + ", rank " + std::to_string(group.rank()) + " of " + std::to_string(group.size()) +
         ", without " + list(ranks) + ": ";
}

void check(const ProcessGroup& group, const std::vector<int>& ranks) {
  for (const int rank : ranks) {
    if (rank < 0 || rank >= group.size()) {
      throw Error(ErrorCode::invalid_argument, here(group, ranks) + "there is no rank " + std::to_string(rank) +
                                                   "; ranks are 0 to " + std::to_string(group.size() - 1));
    }
    if (rank == group.rank()) {
      throw Error(ErrorCode::invalid_argument,
                  here(group, ranks) + "this rank itself is to go; only those that stay call it");
    }
  }
}

// Those that stay write down whom they leave out, and read what the others wrote.
class Departure {
 public:
  Departure(StoredGroup& group, std::vector<int> ranks, std::chrono::nanoseconds timeout)
      : group_(group), ranks_(std::move(ranks)), time_(timeout) {
    for (int rank = 0; rank < group.size(); ++rank) {
      if (!std::binary_search(ranks_.begin(), ranks_.end(), rank)) staying_.push_back(rank);
    }
  }

  std::shared_ptr<ProcessGroup> run() {
    if (!group_.options().store) return make({.timeout = group_.timeout()});
    place_ = group_.place() + "/without/" + std::to_string(group_.departure());
    store().set(key(group_.rank()), list(ranks_));
    for (auto missing = staying_; !(missing = read(missing)).empty();) {
      if (time_.spent()) report(missing);
      store().get(key(missing[0]), kSlice);
    }
    GroupOptions options = group_.options();
    options.size = static_cast<int>(staying_.size());
    options.rank = static_cast<int>(std::find(staying_.begin(), staying_.end(), group_.rank()) - staying_.begin());
    options.prefix = place_;
    options.start_timeout = time_.left();
    auto made = make(options);
    group_.end_departure();
    return made;
  }

 private:
  Store& store() const { return *group_.options().store; }
  std::string key(int rank) const { return place_ + "/rank/" + std::to_string(rank); }
  std::shared_ptr<ProcessGroup> make(const GroupOptions& options) const {
    return make_group(options.size == 1 ? "serial" : group_.name(), options);
  }

  // Which of those in `missing` have written nothing yet. Looks at those to be left out as well: they may disagree.
  std::vector<int> read(std::vector<int> missing) {
    std::erase_if(missing, [this](int rank) { return agrees(rank); });
    for (const int rank : ranks_) agrees(rank);
    return missing;
  }

  bool agrees(int rank) {
    const auto theirs = store().get(key(rank), std::chrono::nanoseconds(0));
    if (!theirs) return false;
    if (*theirs == list(ranks_)) return true;
    group_.end_departure();  // on all that stay: each reads what differs
    auto say = [](int who, const std::string& what) { return "rank " + std::to_string(who) + " leaves out " + what; };
    std::string one = say(group_.rank(), list(ranks_)), other = say(rank, *theirs);
    if (rank < group_.rank()) std::swap(one, other);
    throw Error(ErrorCode::mismatch, "group " + group_.name() + ", without: " + one + " and " + other +
                                         "; all that stay must name the same ranks");
  }

  [[noreturn]] void report(const std::vector<int>& missing) const {
    throw Error(ErrorCode::timeout,
                here(group_, ranks_) + "missing " + (missing.size() == 1 ? "rank " : "ranks ") + list(missing) +
                    " after " + std::to_string(std::chrono::duration<double>(time_.whole()).count()).substr(0, 6) +
                    " s. Name those that are gone, too, and call it on all that stay.");
  }

  StoredGroup& group_;
  std::vector<int> ranks_;
  std::vector<int> staying_;
  TimeBudget time_;
  std::string place_;
};

}  // namespace

std::shared_ptr<ProcessGroup> without(const std::shared_ptr<ProcessGroup>& group, std::vector<int> ranks,
                                      std::chrono::nanoseconds start_timeout) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  check(*group, ranks);
  if (const auto parts = groups_of_round_robin(*group); !parts.empty()) {
    const TimeBudget time(start_timeout);
    std::vector<std::shared_ptr<ProcessGroup>> made;
    for (const auto& part : parts) made.push_back(without(part, ranks, time.left()));
    return make_round_robin_group(std::move(made));
  }
  if (auto* stored = dynamic_cast<StoredGroup*>(group.get())) return Departure(*stored, ranks, start_timeout).run();
  if (group->size() == 1) return make_group("serial", {.timeout = group->timeout()});
  throw Error(
      ErrorCode::invalid_argument,
      here(*group, ranks) + "it knows no store to meet in; make a new torch.distributed group of the ranks that stay");
}

std::vector<int> lost_ranks(const ProcessGroup& group) {
  std::set<int> lost;
  for (const auto& part : groups_of_round_robin(group)) {
    const auto of_part = lost_ranks(*part);
    lost.insert(of_part.begin(), of_part.end());
  }
  if (const auto* stored = dynamic_cast<const StoredGroup*>(&group)) return stored->lost();
  if (lost.empty() && group.size() > 1 && groups_of_round_robin(group).empty()) {
    throw Error(ErrorCode::invalid_argument,
                "group " + group.name() + ": which ranks are lost only groups that met in a store know");
  }
  return {lost.begin(), lost.end()};
}

std::shared_ptr<Store> store_of(const ProcessGroup& group) {
  const auto* stored = dynamic_cast<const StoredGroup*>(&group);
  return stored ? stored->options().store : nullptr;
}

}  // namespace unisono

#include "comm/emulated_hosts.h"

#include <optional>
#include <string>
#include <utility>

#include "comm/group_engine.h"

namespace unisono::testing {
namespace {

// Keys of one host beside those of others.
class PrefixStore final : public Store {
 public:
  PrefixStore(std::shared_ptr<Store> inner, std::string prefix)
      : inner_(std::move(inner)), prefix_(std::move(prefix)) {}
  void set(const std::string& key, const std::string& value) override { inner_->set(prefix_ + key, value); }
  std::optional<std::string> get(const std::string& key, std::chrono::nanoseconds timeout) override {
    return inner_->get(prefix_ + key, timeout);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override { return inner_->add(prefix_ + key, amount); }

 private:
  std::shared_ptr<Store> inner_;
  std::string prefix_;
};

}  // namespace

std::vector<std::vector<int>> hosts_of(int size, int first) {
  const int on_first = size <= 2 ? 1 : size <= first ? 2 : first;
  std::vector<std::vector<int>> hosts(1);
  for (int rank = 0; rank < size; ++rank) {
    if (rank >= on_first && (rank - on_first) % 2 == 0) hosts.emplace_back();
    hosts.back().push_back(rank);
  }
  return hosts;
}

std::unique_ptr<Engine> shared_memory_among(const char*, const GroupOptions& options) {
  return make_group_engine(make_group("shm", options), options.store, options.prefix + "/notices");
}

std::unique_ptr<Engine> make_emulated_hosts(const std::vector<std::vector<int>>& hosts, const GroupOptions& options,
                                            const EngineAmong& among) {
  HostLayout layout = layout_of(hosts, options.rank);
  const auto engine = [&](const char* part, const std::string& name, std::size_t rank, std::size_t size) {
    GroupOptions own = options;
    own.rank = static_cast<int>(rank);
    own.size = static_cast<int>(size);
    own.prefix = options.prefix + "/" + name;
    return among(part, own);
  };
  HierarchyParts parts;
  parts.flat = engine("all", "all", static_cast<std::size_t>(options.rank), layout.ranks());
  if (layout.place < layout.narrowest())
    parts.across = engine("across", "across" + std::to_string(layout.place), layout.position(layout.place, layout.host),
                          layout.hosts.size());
  if (layout.place == 0) parts.leaders = engine("leaders", "leaders", layout.host, layout.hosts.size());
  auto store =
      std::make_shared<PrefixStore>(options.store, options.prefix + "/host" + std::to_string(layout.host) + "/");
  return make_hierarchy_engine(std::move(layout), std::move(parts), std::move(store));
}

}  // namespace unisono::testing

#include "comm/hierarchy/hierarchy_group.h"

#include <unisono/hosts.h>

#include <random>
#include <utility>

#include "comm/issuer/exchange_texts.h"
#include "comm/issuer/issued_group.h"

namespace unisono {

std::unique_ptr<Engine> make_hierarchy_engine(HostLayout layout, HierarchyParts parts, std::shared_ptr<Store> store) {
  if (layout.own().size() > 1) {
    GroupOptions options{.rank = static_cast<int>(layout.place),
                         .size = static_cast<int>(layout.own().size()),
                         .store = std::move(store)};
    options.timeout = parts.flat->info().timeout;
    for (auto& [name, group] :
         {std::pair{"collect", &parts.collect}, {"spread", &parts.spread}, {"headers", &parts.headers}}) {
      options.prefix = std::string("unisono/hierarchy/") + name;
      *group = make_group("shm", options);
    }
  }
  return std::make_unique<HierarchyEngine>(std::move(layout), std::move(parts));
}

std::shared_ptr<ProcessGroup> make_hierarchy(HostLayout layout, HierarchyParts parts, std::shared_ptr<Store> store) {
  return std::make_shared<IssuedGroup>(make_hierarchy_engine(std::move(layout), std::move(parts), std::move(store)));
}

std::shared_ptr<ProcessGroup> make_over_hosts(std::unique_ptr<Engine> flat, const MakeEngine& make,
                                              const OpenHostStore& open, std::chrono::nanoseconds timeout) {
  const int rank = flat->info().rank;
  const auto tell = [&](const std::string& text) { return exchange_texts(*flat, text, timeout); };
  HostLayout layout =
      layout_of(find_hosts([&](const std::string&, const std::string& text) { return tell(text); }), rank);
  if (layout.hosts.size() == 1 || layout.widest() == 1) return std::make_shared<IssuedGroup>(std::move(flat));
  HierarchyParts parts;
  for (std::size_t place = 0; place < layout.narrowest(); ++place) {
    auto engine = make("across/" + std::to_string(place), layout.carriers(place));
    if (engine) parts.across = std::move(engine);
  }
  parts.leaders = make("leaders", layout.carriers(0));
  const auto names = tell(std::to_string(std::random_device()()) + "-" + std::to_string(layout.own()[0]));
  auto store =
      layout.own().size() > 1 ? open(names[static_cast<std::size_t>(layout.own()[0])], layout.place == 0) : nullptr;
  parts.flat = std::move(flat);
  return make_hierarchy(std::move(layout), std::move(parts), std::move(store));
}

}  // namespace unisono

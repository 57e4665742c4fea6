// Calls with a priority: that all ranks decide alike who goes first.
#include "comm/issuer/service_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace unisono {
namespace {

// A rank without threads: makes calls and ends them when the driver says, and takes part in exchanges of headers.
struct Rank {
  ServiceOrder order;
  std::size_t made = 0;    // calls submitted
  std::size_t agreed = 0;  // calls all ranks have made
  std::set<std::int64_t> moving;
  std::vector<std::int64_t> started;
  bool in_exchange = false;
  bool offers_call = false;
  std::int64_t says = 0;
};

// Random timing, as an issuer would live through it: every rank starts the same calls in the same order, and all of
// them.
TEST(ServiceOrder, AllRanksDecideAlikeWhateverTheTiming) {
  for (unsigned seed = 0; seed < 400; ++seed) {
    std::mt19937 random(seed);
    const std::size_t calls = 1 + random() % 12;
    std::vector<Rank> ranks(1 + random() % 4);
    std::vector<std::int32_t> priority(calls);
    for (auto& p : priority) p = 1 + static_cast<std::int32_t>(random() % 5);
    const auto serve = [](Rank& r) {
      while (const auto next = r.order.next()) {
        r.started.push_back(*next);
        r.moving.insert(*next);
      }
      ASSERT_LE(r.moving.size(), static_cast<std::size_t>(ServiceOrder::kMoving));
    };
    int steps = 0;
    const auto finished = [&](const Rank& r) { return r.started.size() == calls && r.moving.empty(); };
    while (!std::all_of(ranks.begin(), ranks.end(), finished)) {
      ASSERT_LT(++steps, 100'000) << "seed " << seed << ": stuck";
      Rank& r = ranks[random() % ranks.size()];
      switch (random() % 3) {
        case 0:
          r.made += r.made < calls;
          break;
        case 1: {  // a call may end on one rank long before it does on another, but not before all have started it
          if (r.moving.empty()) break;
          const auto call = *std::next(r.moving.begin(), static_cast<std::ptrdiff_t>(random() % r.moving.size()));
          const auto has = [&](const Rank& x) { return std::count(x.started.begin(), x.started.end(), call) > 0; };
          if (!std::all_of(ranks.begin(), ranks.end(), has)) break;
          r.moving.erase(call);
          r.order.ended_here();
          break;
        }
        default:
          if (!r.in_exchange && (r.made > r.agreed || r.order.wants_word())) {
            r.in_exchange = true;
            r.offers_call = r.made > r.agreed;
            r.says = r.order.ended();
          }
      }
      if (!std::all_of(ranks.begin(), ranks.end(), [](const Rank& x) { return x.in_exchange; })) continue;
      std::int64_t least = ranks[0].says;
      bool all_offer = true;
      for (const Rank& x : ranks) least = std::min(least, x.says), all_offer = all_offer && x.offers_call;
      for (Rank& x : ranks) {
        x.in_exchange = false;
        x.order.learn(least);
        if (all_offer) x.order.add(static_cast<std::int64_t>(x.agreed), priority[x.agreed]), ++x.agreed;
        serve(x);
      }
    }
    for (const Rank& x : ranks) ASSERT_EQ(x.started, ranks[0].started) << "seed " << seed;
  }
}

}  // namespace
}  // namespace unisono

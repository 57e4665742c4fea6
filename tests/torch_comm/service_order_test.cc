// Calls with a priority over a c10d group: who goes first, and that all ranks decide it alike.
#include "comm/c10d/service_order.h"

#include <gtest/gtest.h>
#include <unisono/c10d.h>
#include <unisono/torch_backend.h>

#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/c10d_group.h"
#include "comm/shm/shm_group.h"

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

/// What a test lets through of one rank's all-reduces, and in which order they were issued.
struct Gate {
  std::mutex mutex;
  std::vector<std::int64_t> issued;  // numbers of elements
  std::deque<c10::intrusive_ptr<c10::ivalue::Future>> held;

  void open_next() {
    c10::intrusive_ptr<c10::ivalue::Future> future;
    {
      const std::lock_guard lock(mutex);
      ASSERT_FALSE(held.empty());
      future = held.front();
      held.pop_front();
    }
    future->markCompleted(c10::IValue(std::vector<at::Tensor>{}));
  }
  std::size_t issued_so_far() {
    const std::lock_guard lock(mutex);
    return issued.size();
  }
};

class GatedWork final : public c10d::Work {
 public:
  explicit GatedWork(c10::intrusive_ptr<c10::ivalue::Future> future) : future_(std::move(future)) {}
  bool isCompleted() override { return future_->completed(); }
  bool wait(std::chrono::milliseconds) override {
    future_->wait();
    return true;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// A slow link: all-reduces do nothing and end when the test lets them; everything else is our backend's.
class GatedBackend final : public c10d::Backend {
 public:
  GatedBackend(c10::intrusive_ptr<c10d::Backend> inner, Gate& gate)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), gate_(gate) {}
  const std::string getBackendName() const override { return "gated"; }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions&) override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    const std::lock_guard lock(gate_.mutex);
    gate_.issued.push_back(tensors[0].numel());
    gate_.held.push_back(future);
    return c10::make_intrusive<GatedWork>(std::move(future));
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& out, std::vector<at::Tensor>& in,
                                           const c10d::AllgatherOptions& options) override {
    return inner_->allgather(out, in, options);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& out, at::Tensor& in,
                                                 const c10d::AllgatherOptions& options) override {
    return inner_->_allgather_base(out, in, options);
  }

 private:
  c10::intrusive_ptr<c10d::Backend> inner_;
  Gate& gate_;
};

// Calls of 1, 2, 3 ... elements are made in this order, three more than may move at once; whenever one has ended on
// both ranks the highest priority of those that wait goes next.
TEST(Priority, HigherOnesOvertakeThoseThatWait) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
  std::vector<Gate> gates(2);
  std::vector<std::thread> threads;
  std::vector<std::shared_ptr<ProcessGroup>> groups(2);
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      GroupOptions options{.rank = r, .size = 2, .store = make_store(store)};
      auto inner = make_torch_backend(make_shm_group(options));
      auto group = c10::make_intrusive<c10d::ProcessGroup>(store, r, 2);
      group->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM,
                        c10::make_intrusive<GatedBackend>(inner, gates[static_cast<std::size_t>(r)]));
      group->setDefaultBackend(c10d::ProcessGroup::CUSTOM);
      groups[static_cast<std::size_t>(r)] = std::make_shared<C10dGroup>(Engine(std::move(group)));
    });
  }
  for (auto& thread : threads) thread.join();
  constexpr std::size_t kMoving = ServiceOrder::kMoving, kCalls = kMoving + 3;
  std::vector<float> memory(kCalls);
  std::vector<Work> works;
  std::vector<std::int32_t> priority(kMoving, 1);
  priority.insert(priority.end(), {3, 1, 5});
  const auto wait_for = [&](std::size_t n) {
    for (Gate& gate : gates) {
      while (gate.issued_so_far() < n) std::this_thread::yield();
    }
  };
  for (std::size_t call = 0; call < kCalls; ++call) {
    if (call == kMoving) wait_for(kMoving);
    for (auto& group : groups) {
      AllReduceOptions options;
      options.priority = priority[call];
      works.push_back(group->all_reduce({memory.data(), call + 1, Dtype::f32}, options));
    }
  }
  // A barrier has no priority: it passes, and shows that all are known on both ranks.
  for (auto& group : groups) works.push_back(group->barrier());
  for (std::size_t i = works.size() - 2; i < works.size(); ++i) works[i].wait();
  // One rank alone has ended a call: nothing new may start.
  gates[0].open_next();
  EXPECT_EQ(gates[0].issued_so_far(), kMoving);
  gates[1].open_next();
  for (std::size_t n = kMoving + 1; n <= kCalls; ++n) {
    wait_for(n);
    for (Gate& gate : gates) gate.open_next();
  }
  for (std::size_t left = 1; left < kMoving; ++left) {
    for (Gate& gate : gates) gate.open_next();
  }
  for (Work& work : works) work.wait();
  std::vector<std::int64_t> expected;
  for (std::int64_t call = 1; call <= ServiceOrder::kMoving; ++call) expected.push_back(call);
  for (std::int64_t call : {3, 1, 2}) expected.push_back(ServiceOrder::kMoving + call);
  EXPECT_EQ(gates[0].issued, expected);
  EXPECT_EQ(gates[1].issued, expected);
}

}  // namespace
}  // namespace unisono

// Calls with a priority over a c10d group: who goes first.
#include <gtest/gtest.h>
#include <unisono/c10d.h>
#include <unisono/torch_backend.h>

#include <algorithm>
#include <deque>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/c10d/engine.h"
#include "comm/issuer/issued_group.h"
#include "comm/issuer/service_order.h"
#include "comm/shm/shm_group.h"

namespace unisono {
namespace {

constexpr std::size_t kLong = 16 << 10;  // floats: data of their own, that do not travel with the headers

/// What a test lets through of one rank's all-reduces, and in which order they were issued.
struct Gate {
  std::mutex mutex;
  std::vector<std::int64_t> issued;  // numbers of elements beyond kLong
  std::deque<c10::intrusive_ptr<c10::ivalue::Future>> held;
  std::vector<at::Tensor> tensors;  // what the all-reduces were given

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
    gate_.issued.push_back(tensors[0].numel() - static_cast<std::int64_t>(kLong));
    gate_.held.push_back(future);
    gate_.tensors.push_back(tensors[0]);
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

std::vector<std::shared_ptr<ProcessGroup>> gated_groups(std::vector<Gate>& gates) {
  const c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
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
      groups[static_cast<std::size_t>(r)] =
          std::make_shared<IssuedGroup>(std::make_unique<C10dEngine>(std::move(group)));
    });
  }
  for (auto& thread : threads) thread.join();
  return groups;
}

// A call fails at once, and an engine that cannot be stopped ends long after it.
TEST(LateEngine, WritesToMemoryOfItsOwn) {
  std::vector<Gate> gates(2);
  auto groups = gated_groups(gates);
  std::vector<std::vector<float>> memory(2, std::vector<float>(kLong, 1.0f));
  std::vector<Work> works;
  for (std::size_t r = 0; r < 2; ++r) works.push_back(groups[r]->all_reduce({memory[r].data(), kLong, Dtype::f32}));
  for (Gate& gate : gates) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (gate.issued_so_far() < 1 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  }
  for (auto& group : groups) group->abort(Error(ErrorCode::peer_lost, "enough"));
  for (Work& work : works) EXPECT_THROW(work.wait(), Error);
  for (Gate& gate : gates) {
    gate.tensors.at(0).fill_(7);
    gate.open_next();
  }
  groups.clear();
  for (const auto& data : memory)
    EXPECT_EQ(std::count(data.begin(), data.end(), 1.0f), static_cast<std::ptrdiff_t>(kLong));
}

// Calls of 1, 2, 3 ... elements and kLong more are made in this order, three more than may move at once; whenever one
// has ended on both ranks the highest priority of those that wait goes next.
TEST(Priority, HigherOnesOvertakeThoseThatWait) {
  std::vector<Gate> gates(2);
  auto groups = gated_groups(gates);
  constexpr std::size_t kMoving = ServiceOrder::kMoving, kCalls = kMoving + 3;
  std::vector<float> memory(kLong + kCalls);
  std::vector<Work> works;
  std::vector<std::int32_t> priority(kMoving, 1);
  priority.insert(priority.end(), {3, 1, 5});
  const auto wait_for = [&](std::size_t n) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    for (Gate& gate : gates) {
      while (gate.issued_so_far() < n) {
        if (std::chrono::steady_clock::now() > end)
          throw std::runtime_error("call " + std::to_string(n) + " was never issued");
        std::this_thread::yield();
      }
    }
  };
  for (std::size_t call = 0; call < kCalls; ++call) {
    if (call == kMoving) wait_for(kMoving);
    for (auto& group : groups) {
      AllReduceOptions options;
      options.priority = priority[call];
      works.push_back(group->all_reduce({memory.data(), kLong + call + 1, Dtype::f32}, options));
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

// Whether these headers of Gloo fit the Gloo inside torch: what src/comm/c10d/engines/gloo.cc does, on two ranks that
// are threads, and a sum. Ends with 0, with 1 for a wrong sum or timeout, with 2 for an exception, by a signal when it
// crashes or hangs.

#include <ATen/ops/full.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <vector>

namespace {

constexpr int kRanks = 2;
constexpr std::chrono::seconds kTimeout{20};

c10::intrusive_ptr<c10d::Backend> make(const c10::intrusive_ptr<c10d::Store>& store, int rank) {
  auto options = c10d::ProcessGroupGloo::Options::create_default(kTimeout);
  return c10::make_intrusive<c10d::ProcessGroupGloo>(store, rank, kRanks, std::move(options));
}

int sum(const c10::intrusive_ptr<c10d::Store>& store, int rank) try {
  const auto backend = make(store, rank);
  backend->setTimeout(kTimeout / 2);
  std::vector<at::Tensor> data{at::full({1000}, rank + 1.0)};
  backend->allreduce(data)->wait();
  const bool right = (data[0] == 3).all().item<bool>();
  return right && backend->getBackendOptions()->timeout == kTimeout / 2 ? 0 : 1;
} catch (const std::exception& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 2;
}

}  // namespace

int main() {
  alarm(60);
  setenv("GLOO_SOCKET_IFNAME", "lo", 1);  // the machine that builds may have no other
  const auto store = c10::make_intrusive<c10d::HashStore>();
  int results[kRanks];
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back([&, rank] { results[rank] = sum(store, rank); });
  for (auto& rank : ranks) rank.join();
  return results[0] | results[1];
}

#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unisono/c10d.h>
#include <unisono/unisono.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <vector>

namespace unisono::testing {

using namespace std::chrono_literals;

/// Runs `body` on `n` ranks, each a thread of this process with its own member of one shared-memory group.
/// Returns each rank's failure, empty where there was none.
inline std::vector<std::string> failures_of(int n, const std::function<void(std::shared_ptr<ProcessGroup>)>& body,
                                            std::chrono::nanoseconds timeout = 60s) {
  auto store = make_store(c10::make_intrusive<c10d::HashStore>());
  std::vector<std::string> failures(static_cast<std::size_t>(n));
  std::vector<std::thread> threads;
  for (int r = 0; r < n; ++r) {
    threads.emplace_back([&, r] {
      try {
        GroupOptions options{.rank = r, .size = n, .store = store, .timeout = timeout};
        body(make_group(n == 1 ? "serial" : "shm", options));
      } catch (const std::exception& e) {
        failures[static_cast<std::size_t>(r)] = e.what();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return failures;
}

inline void on_ranks(int n, const std::function<void(std::shared_ptr<ProcessGroup>)>& body) {
  const auto failures = failures_of(n, body);
  for (int r = 0; r < n; ++r) EXPECT_EQ(failures[static_cast<std::size_t>(r)], "") << "rank " << r;
}

/// The fixture of most cases: Linear(4 -> 1, no bias), x full of rank + 1, so that the local gradient is rank + 1.
struct Fix {
  explicit Fix(const std::shared_ptr<ProcessGroup>& group)
      : model(torch::nn::LinearOptions(4, 1).bias(false)), x(torch::full({1, 4}, group->rank() + 1.0)) {}
  torch::nn::Linear model;
  torch::Tensor x;
  double grad() const { return model->weight.grad().defined() ? model->weight.grad()[0][0].item<double>() : NAN; }
};

inline bool same_bits(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         std::memcmp(a.contiguous().data_ptr(), b.contiguous().data_ptr(), a.nbytes()) == 0;
}

}  // namespace unisono::testing

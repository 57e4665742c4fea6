#include "differential/rank_pool.h"

#include <ATen/Parallel.h>
#include <unisono/c10d.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

namespace unisono::differential {

RankPool::~RankPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void RankPool::serve(std::size_t rank) {
  at::set_num_threads(1);
  std::uint64_t done = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || (round_ != done && rank < wanted_); });
    if (stop_) return;
    done = round_;
    const auto job = job_;
    lock.unlock();
    job(rank);
    lock.lock();
    if (--running_ == 0) changed_.notify_all();
  }
}

void RankPool::each(int world, std::function<void(std::size_t)> job) {
  std::unique_lock lock(mutex_);
  wanted_ = running_ = static_cast<std::size_t>(world);
  job_ = std::move(job);
  ++round_;
  while (threads_.size() < wanted_) threads_.emplace_back([this, rank = threads_.size()] { serve(rank); });
  changed_.notify_all();
  changed_.wait(lock, [&] { return running_ == 0; });
}

std::string RankPool::make_groups(int world) {
  auto store = make_store(c10::make_intrusive<c10d::HashStore>());
  auto& groups = groups_[world];
  groups.assign(static_cast<std::size_t>(world), nullptr);
  std::vector<std::string> failures(groups.size());
  each(world, [&](std::size_t rank) {
    try {
      GroupOptions options{.rank = static_cast<int>(rank), .size = world, .store = store, .timeout = timeout_};
      groups[rank] = make_group(world == 1 ? "serial" : "shm", options);
    } catch (const std::exception& e) {
      failures[rank] = e.what();
    }
  });
  for (const auto& failure : failures) {
    if (failure.empty()) continue;
    renew(world);
    return failure;
  }
  return {};
}

std::string RankPool::run(int world, const std::function<bool(const std::shared_ptr<ProcessGroup>&)>& body) {
  if (!groups_.contains(world)) {
    if (std::string failure = make_groups(world); !failure.empty()) return failure;
  }
  const auto groups = groups_[world];
  std::vector<char> usable(groups.size());
  each(world, [&](std::size_t rank) { usable[rank] = body(groups[rank]); });
  for (char u : usable) {
    if (!u) renew(world);
  }
  return {};
}

}  // namespace unisono::differential

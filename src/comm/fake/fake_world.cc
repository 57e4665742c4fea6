#include "comm/fake/fake_state.h"

namespace unisono {

FakeWorld::FakeWorld(int size, std::chrono::nanoseconds timeout) : state_(std::make_shared<State>()) {
  if (size < 1) throw Error(ErrorCode::invalid_argument, "a fake world of " + std::to_string(size) + " ranks");
  const auto n = static_cast<std::size_t>(size);
  state_->size = size;
  state_->timeout = timeout;
  state_->made.resize(n);
  state_->lost.resize(n);
  for (int r = 0; r < size; ++r) state_->groups.push_back(make_fake_group(state_, r));
}

FakeWorld::~FakeWorld() {
  std::vector<std::shared_ptr<ProcessGroup>> groups;  // go after the lock
  std::lock_guard lock(state_->mutex);
  groups.swap(state_->groups);
}

int FakeWorld::size() const noexcept { return state_->size; }

std::shared_ptr<ProcessGroup> FakeWorld::group(int rank) {
  std::lock_guard lock(state_->mutex);
  return state_->groups.at(static_cast<std::size_t>(rank));
}

void FakeWorld::hold() {
  std::lock_guard lock(state_->mutex);
  state_->holding = true;
}

void FakeWorld::release(std::int64_t sequence) {
  std::lock_guard lock(state_->mutex);
  state_->round(sequence).released = true;
  state_->advance(sequence);
}

void FakeWorld::release_all() {
  std::lock_guard lock(state_->mutex);
  state_->holding = false;
  for (std::size_t k = 0; k < state_->rounds.size(); ++k) state_->advance(static_cast<std::int64_t>(k));
}

void FakeWorld::fail_at(std::int64_t sequence, const Error& cause) {
  std::lock_guard lock(state_->mutex);
  state_->failures.emplace(sequence, cause);
}

void FakeWorld::lose(int rank) {
  std::lock_guard lock(state_->mutex);
  state_->lost.at(static_cast<std::size_t>(rank)) = true;
  for (std::size_t k = 0; k < state_->rounds.size(); ++k) state_->advance(static_cast<std::int64_t>(k));
}

void FakeWorld::wait_until_made(std::int64_t sequence) const {
  std::unique_lock lock(state_->mutex);
  const auto all_there = [&] {
    for (std::int64_t made : state_->made) {
      if (made <= sequence) return false;
    }
    return true;
  };
  if (state_->changed.wait_for(lock, state_->timeout, all_there)) return;
  std::string missing;
  for (int r = 0; r < state_->size; ++r) {
    if (state_->made[static_cast<std::size_t>(r)] > sequence) continue;
    missing += "; rank " + std::to_string(r) + " has not made it, " + state_->last_call(r);
  }
  throw Error(ErrorCode::timeout, "unisono fake world, waiting for call " + std::to_string(sequence) + missing);
}

std::vector<FakeCall> FakeWorld::calls(int rank) const {
  std::lock_guard lock(state_->mutex);
  std::vector<FakeCall> out;
  const auto r = static_cast<std::size_t>(rank);
  for (std::int64_t k = 0; k < state_->made.at(r); ++k) {
    out.push_back(state_->rounds[static_cast<std::size_t>(k)].entries[r]->call);
  }
  return out;
}

std::vector<std::int64_t> FakeWorld::ended() const {
  std::lock_guard lock(state_->mutex);
  return state_->ended;
}

}  // namespace unisono

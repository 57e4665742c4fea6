#include "comm/shm/engine.h"

#include <sched.h>

#include <algorithm>
#include <thread>

#include "base/clock.h"
#include "comm/shm/event.h"

namespace unisono::shm {
namespace {

// ns of busy waiting when every rank has a core; short, because two ranks may find themselves on one core all the same.
constexpr std::int64_t kSpin = 1'500;
constexpr std::int64_t kYield = 300'000;     // ns until which the core is offered to others
constexpr std::int64_t kSlice = 50'000'000;  // ns of sleep until the next look at the peers

void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

Team team_of(const Attachment& attachment, int rank) {
  const int size = static_cast<int>(attachment.processes.size());
  Team team{ControlSegment(attachment.control->data(), size), rank, size, {}};
  for (const auto& staging : attachment.staging) team.staging.push_back(staging->data());
  return team;
}

}  // namespace

bool Call::poll() {
  if (!has_ended()) engine_->poll();
  return has_ended();
}

void Call::wait() {
  if (!has_ended()) engine_->wait(*this);
}

Engine::Engine(std::string name, int rank, Attachment attachment, bool eager)
    : name_(std::move(name)),
      spin_ns_(attachment.processes.size() <= std::thread::hardware_concurrency() ? kSpin : 0),
      attachment_(std::move(attachment)),
      team_(team_of(attachment_, rank)),
      peers_(rank, attachment_.processes),
      progress_(eager) {}

std::shared_ptr<Call> Engine::issue(Request request) {
  auto call = std::make_shared<Call>(shared_from_this(), std::move(request));
  call->issued_ns_ = now_ns();
  call->deadline_ns_ = call->issued_ns_ + bounded(call->request_.options.timeout).count();
  Lock lock(mutex_);
  throw_if_failed();
  call->sequence_ = next_++;
  queue_.push_back(call);
  pending_.fetch_add(1);
  advance(lock);
  unlock_and_sweep(lock);
  if (!call->has_ended()) progress_.note(call->issued_ns_);
  return call;
}

void Engine::poll() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  advance(lock);
  unlock_and_sweep(lock);
}

// Waits like a good neighbour: busy for a moment, then offering the core, then asleep.
void Engine::wait(Call& call) {
  drivers_.fetch_add(1);
  std::int64_t since = 0;
  while (!call.has_ended()) {
    bool moved = false;
    {
      Lock lock(mutex_);
      moved = advance(lock);
      unlock_and_sweep(lock);
    }
    if (call.has_ended()) break;
    const std::int64_t now = now_ns();
    if (moved || since == 0) since = now;
    if (now - since < spin_ns_) {
      relax();
    } else if (now - since < kYield) {
      sched_yield();
    } else {
      drive_a_little(std::clamp<std::int64_t>(call.deadline_ns_ - now, 1'000'000, kSlice), &call);
    }
  }
  drivers_.fetch_sub(1);
}

void Engine::drive_a_little(std::int64_t ns, const Call* waited) {
  sleepers_here_.fetch_add(1);
  {
    Sleeper sleeper(team_.segment.head().event);
    Lock lock(mutex_);
    const bool awake = advance(lock) || queue_.empty() || (waited != nullptr && waited->has_ended());
    unlock_and_sweep(lock);
    if (!awake) sleeper.sleep(ns);
  }
  sleepers_here_.fetch_sub(1);
}

// Goes as far as it can without waiting. Returns whether anything moved.
bool Engine::advance(Lock& lock) {
  bool moved = enter_calls();
  while (!busy_ && !queue_.empty() && step(*queue_.front(), lock)) {
    moved = true;
    enter_calls();
  }
  if (moved || queue_.empty()) return moved;
  return look_for_trouble(now_ns());
}

bool Engine::enter_calls() {
  bool moved = false;
  while (!failed_ && next_to_enter_ < next_) {
    Call& call = *queue_[next_to_enter_ - queue_.front()->sequence_];
    if (call.sequence_ >= kSlots && !all_done(call.sequence_ - kSlots)) break;
    lay_down(call);
    if (failed_) break;
    ++next_to_enter_;
    team_.segment.words(team_.rank).entered.store(next_to_enter_);
    call.stage_ = Stage::entered;
    const auto state = enter(team_.segment.gate(call.sequence_), gate_target(call.sequence_, team_.size));
    auto& event = team_.segment.head().event;
    if (state != GateState::open && anybody_sleeps(event)) wake_all(event);
    moved = true;
  }
  return moved;
}

bool Engine::step(Call& head, Lock& lock) {
  switch (head.stage_) {
    case Stage::entered: {
      const auto gate = team_.segment.gate(head.sequence_).load();
      if (judge(gate, gate_target(head.sequence_, team_.size)) != GateState::full) return false;
      agree(head);
      return true;
    }
    case Stage::moving:
      return move_data(head, lock);
    case Stage::finishing:
      for (int r = 0; r < team_.size; ++r) {
        if (!ended_well(team_.segment.words(r).done.load(), head.sequence_)) return false;
      }
      retire(head, nullptr);
      return true;
    case Stage::queued:
    case Stage::ended:
      return false;
  }
  return false;
}

bool Engine::all_done(std::uint64_t sequence) const {
  for (int r = 0; r < team_.size; ++r) {
    if (!is_done(team_.segment.words(r).done.load(), sequence)) return false;
  }
  return true;
}

void Engine::publish_done(std::uint64_t sequence, bool failed) {
  team_.segment.words(team_.rank).done.store(done_word(sequence, failed));
  auto& event = team_.segment.head().event;
  if (anybody_sleeps(event) && (failed || all_done(sequence))) wake_all(event);
}

// The call leaves the queue. What it held is let go of once the lock is free: owners may run anybody's code.
void Engine::retire(Call& call, std::exception_ptr error) {
  const auto it = std::find_if(queue_.begin(), queue_.end(), [&](const auto& c) { return c.get() == &call; });
  for (auto* owner : {&call.request_.in.owner, &call.request_.out.owner}) {
    if (*owner) trash_.push_back(std::move(*owner));
  }
  if (call.place_.allocation) trash_.push_back(std::move(call.place_.allocation));
  std::shared_ptr<Call> keep = std::move(*it);
  queue_.erase(it);
  call.stage_ = Stage::ended;
  call.error_ = std::move(error);
  call.ended_.store(true, std::memory_order_release);
  pending_.fetch_sub(1);
  if (sleepers_here_.load() > 0) wake_all(team_.segment.head().event);
  trash_.push_back(std::move(keep));
}

void Engine::unlock_and_sweep(Lock& lock) {
  std::vector<std::shared_ptr<void>> trash;
  trash.swap(trash_);
  lock.unlock();
}

}  // namespace unisono::shm

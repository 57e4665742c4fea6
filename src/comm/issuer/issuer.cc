#include "comm/issuer/issuer.h"

#include <pthread.h>

#include <algorithm>
#include <utility>

namespace unisono {
namespace {

using Clock = IssuedCall::Clock;
constexpr std::chrono::microseconds kSlice =
    std::chrono::milliseconds(50);  // between looks at deadlines and at the notice board
// An eager engine is looked at without a pause for so long after something has moved, then at longer and longer
// intervals.
constexpr std::chrono::microseconds kEager(200);

}  // namespace

void Issuer::Signal::raise() {
  const std::lock_guard lock(mutex);
  raised = true;
  changed.notify_all();
}

Issuer::Issuer(std::unique_ptr<Engine> engine, Describe describe)
    : engine_(std::move(engine)),
      describe_(std::move(describe)),
      board_(engine_->notice_board()),
      short_(engine_->info().size),
      looked_(Clock::now()),
      moved_(looked_),
      thread_([this] { run(); }) {}

Issuer::~Issuer() {
  {
    const std::lock_guard lock(signal_->mutex);
    stop_ = true;
    signal_->changed.notify_all();
  }
  thread_.join();
}

void Issuer::submit(const CallPtr& call) {
  const std::lock_guard lock(signal_->mutex);
  if (cause_) throw *cause_;
  call->header.sequence = next_sequence_++;
  submitted_.push_back(call);
  signal_->raised = true;
  signal_->changed.notify_all();
}

void Issuer::poison(const Error& cause) {
  const std::lock_guard lock(signal_->mutex);
  if (!cause_) cause_ = cause;
  signal_->raised = true;
  signal_->changed.notify_all();
}

// Some engines tell nobody when they are done.
bool Issuer::must_poll() const {
  const auto silent = [](const std::optional<EngineOp>& op) { return op && !op->when_done; };
  const auto any = [&](const auto& calls) {
    return std::any_of(calls.begin(), calls.end(), [&](const CallPtr& call) { return silent(call->op); });
  };
  return silent(exchange_) || any(moving_) || any(agreed_) || any(halfway_);
}

std::chrono::microseconds Issuer::pause() {
  const EngineInfo& info = engine_->info();
  if (!info.eager) return info.pause;
  const auto still = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - moved_);
  return still < kEager ? std::chrono::microseconds(0) : std::min(info.pause, still / 8);
}

void Issuer::run() {
  pthread_setname_np(pthread_self(), engine_->info().thread);
  bool told = false;
  std::unique_lock lock(signal_->mutex);
  while (true) {
    const auto something = [this] { return signal_->raised || (stop_ && idle() && submitted_.empty()); };
    if (idle()) {
      signal_->changed.wait(lock, something);
    } else if (const auto rest = must_poll() ? pause() : kSlice; rest.count() > 0) {
      signal_->changed.wait_for(lock, rest, something);
    } else {
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
    if (!submitted_.empty()) moved_ = Clock::now();
    signal_->raised = false;
    for (auto& call : submitted_) {
      newest_ = call->header.sequence;
      waiting_.push_back(std::move(call));
    }
    submitted_.clear();
    const auto cause = cause_;
    if (!cause && stop_ && idle()) return;
    lock.unlock();
    if (!cause) step();
    lock.lock();
    if (!cause_) continue;
    const Error now = *cause_;
    lock.unlock();
    fail_all(now);
    if (!std::exchange(told, true) && board_) board_->post_failure(now);
    lock.lock();
    if (stop_ && idle() && submitted_.empty()) return;
  }
}

// Whatever goes wrong here is the first cause of the group's failure.
void Issuer::step() {
  const IssuedCall* current = nullptr;
  try {
    move_on(current);
    while (begin_something(current)) move_on(current);
    current = nullptr;
    look_around();
  } catch (const Error& error) {
    poison(error);
  } catch (const std::exception& error) {
    poison(current ? translate(*current, error) : Error(ErrorCode::internal, error.what()));
  }
}

// What is begun next depends on what all ranks know alone, so that all begin everything in one order. False while that
// has to wait.
bool Issuer::begin_something(const IssuedCall*& current) {
  if (!halfway_.empty()) {
    current = halfway_.front().get();
    return second_half();
  }
  if (!agreed_.empty()) {
    current = agreed_.front().get();
    if (!know_record(*agreed_.front())) return false;
    place(agreed_.front());
    current = nullptr;
    agreed_.pop_front();
    if (agreed_.empty()) serve(current);
    return true;
  }
  if (exchange_) {
    current = subject_.get();
    if (!ended(*current, *exchange_)) return false;
    read_headers();
    current = nullptr;
    subject_.reset();  // it would keep the call's memory
    if (agreed_.empty()) serve(current);
    return true;
  }
  if (waiting_.empty() && following_.empty() && !order_.wants_word()) return false;
  subject_ = !following_.empty() ? following_.front() : waiting_.empty() ? held_.begin()->second : waiting_.front();
  current = subject_.get();
  send_headers();
  return true;
}

void Issuer::listen(EngineOp& op) {
  moved_ = Clock::now();
  if (op.when_done) op.when_done([signal = signal_] { signal->raise(); });
}

// Whether it has ended with all that follows it.
bool Issuer::ended(const IssuedCall& call, EngineOp& op) {
  while (op.done()) {
    check_engine(call, op);
    if (!op.then) return true;
    const auto then = std::move(op.then);
    op = then(1);
    listen(op);
  }
  return false;
}

// The engine's own wait throws its error, and orders device streams.
void Issuer::check_engine(const IssuedCall& call, EngineOp& op) {
  try {
    op.check();
  } catch (const std::exception& raised) {
    throw translate(call, raised);
  }
}

}  // namespace unisono

#include "comm/issuer/issuer.h"

#include <pthread.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace unisono {
namespace {

using Clock = IssuedCall::Clock;
constexpr std::chrono::microseconds kSlice =
    std::chrono::milliseconds(50);  // between looks at deadlines and at the notice board
// An eager engine is looked at without a pause for so long after something has moved, then at longer and longer intervals.
constexpr std::chrono::microseconds kEager(200);

bool withheld(const IssuedCall& call) {
  return std::any_of(call.headers.begin(), call.headers.end(),
                     [](const CallHeader& header) { return header.withhold != 0; });
}

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

// Calls whose data moves. Of staged operations those of an earlier call go first in every stage.
void Issuer::move_on(const IssuedCall*& current) {
  int least = std::numeric_limits<int>::max();  // the stage of the staged calls before this one
  bool first = true;                            // none before this one is under way, but for those with a priority
  for (std::size_t i = 0; i < moving_.size();) {
    IssuedCall& call = *moving_[i];
    current = &call;
    while (call.op->then && call.op->stage < least && call.op->done()) {
      check_engine(call, *call.op);
      const int stage = call.op->stage + 1;
      const auto then = std::move(call.op->then);
      call.op = then(divisor_of(call));
      call.op->stage = stage;
      listen(*call.op);
    }
    if (call.op->staged) least = std::min(least, call.op->stage);
    const bool in_order = call.phase == IssuedCall::Phase::agreed;  // moves nothing: it ends when those before it have
    const bool last = first && (following_.empty() || following_.front()->header.sequence > call.header.sequence);
    if (call.op->then || !call.op->done() || (in_order && !last)) {
      first = first && call.header.priority != 0;
      ++i;
      continue;
    }
    complete(call);
    moving_.erase(moving_.begin() + static_cast<std::ptrdiff_t>(i));
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
    agreed_.pop_front();
    if (agreed_.empty()) serve();
    return true;
  }
  if (exchange_) {
    current = subject_.get();
    if (!ended(*current, *exchange_)) return false;
    read_headers();
    subject_.reset();  // it would keep the call's memory
    if (agreed_.empty()) serve();
    return true;
  }
  if (waiting_.empty() && following_.empty() && !order_.wants_word()) return false;
  subject_ = !following_.empty() ? following_.front() : waiting_.empty() ? held_.begin()->second : waiting_.front();
  current = subject_.get();
  send_headers();
  return true;
}

// A call that all ranks have made: without a priority its data moves at once, else when its turn has come.
void Issuer::place(const CallPtr& call) {
  const bool moves = call->header.operation != Operation::barrier && call->header.operation != Operation::allocate;
  if (withheld(*call) || !moves || call->header.count == 0) {
    call->op = EngineOp{.done = [] { return true; }, .check = [] {}};
    moving_.push_back(call);
  } else if (!call->given.empty()) {
    finish(*call);
  } else if (short_.is_short(call->data)) {
    call->phase = IssuedCall::Phase::data;
    following_.push_back(call);
  } else if (call->header.priority == 0) {
    start_data(call);
  } else {
    call->phase = IssuedCall::Phase::held;
    held_.emplace(call->header.sequence, call);
    order_.add(call->header.sequence, call->header.priority);
  }
}

void Issuer::serve() {
  while (const auto sequence = order_.next()) {
    const auto turn = held_.find(*sequence);
    start_data(turn->second);
    held_.erase(turn);
  }
}

void Issuer::start_data(const CallPtr& call) {
  call->phase = IssuedCall::Phase::data;
  if (call->inputs_ready) call->inputs_ready();
  const auto parts = engine_->parts_of(call->data);
  if (parts.size() == 1) return start_one(call);
  call->parts_left = parts.size();
  for (const DataCall& data : parts) {
    auto part = std::make_shared<IssuedCall>();
    part->header = call->header;
    part->combined = call->combined;
    part->tag = call->tag;
    part->deadline = call->deadline;
    part->timeout = call->timeout;
    part->phase = IssuedCall::Phase::data;
    part->data = data;
    part->whole = call;
    start_one(part);
  }
}

void Issuer::start_one(const CallPtr& call) {
  call->op = engine_->start(call->data, call->left());
  listen(*call->op);
  if (call->op->then && !call->op->staged) {
    halfway_.push_back(call);
  } else {
    moving_.push_back(call);
  }
}

// False while the first half is under way.
bool Issuer::second_half() {
  const CallPtr call = halfway_.front();
  if (!call->op->done()) return false;
  check_engine(*call, *call->op);
  const auto then = std::move(call->op->then);
  call->op = then(divisor_of(*call));
  listen(*call->op);
  moving_.push_back(call);
  halfway_.pop_front();
  return true;
}

void Issuer::complete(IssuedCall& call) {
  check_engine(call, *call.op);
  if (call.op->finish) call.op->finish(divisor_of(call));
  call.op.reset();
  moved_ = Clock::now();
  if (call.phase == IssuedCall::Phase::agreed) return call.succeed(withheld(call), {});
  if (call.whole && --call.whole->parts_left > 0) return;
  if (call.header.priority != 0) order_.ended_here();
  (call.whole ? *call.whole : call).succeed(false, engine_->fence(call.data.out.device));
}

double Issuer::divisor_of(const IssuedCall& call) const {
  if (call.header.divide_by_sum >= 0) return call.combined.sums[static_cast<std::size_t>(call.header.divide_by_sum)];
  return call.header.op == ReduceOp::avg ? engine_->info().size : 1;
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

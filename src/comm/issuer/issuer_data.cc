// A call that all ranks have made: when its data moves, and until it has.
#include <algorithm>
#include <limits>
#include <utility>

#include "comm/issuer/issuer.h"

namespace unisono {
namespace {

using Clock = IssuedCall::Clock;

bool withheld(const IssuedCall& call) {
  return std::any_of(call.headers.begin(), call.headers.end(),
                     [](const CallHeader& header) { return header.withhold != 0; });
}

}  // namespace

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

void Issuer::serve(const IssuedCall*& current) {
  while (const auto sequence = order_.next()) {
    const auto turn = held_.find(*sequence);
    current = turn->second.get();
    start_data(turn->second);
    current = nullptr;
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

}  // namespace unisono

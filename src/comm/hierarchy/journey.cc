#include "comm/hierarchy/journey.h"

#include <utility>

namespace unisono {
namespace {

using Kept = std::shared_ptr<const Journey>;

EngineOp nothing() {
  return {.done = [] { return true; }, .check = [] {}, .staged = true};
}

EngineOp spread(const Kept& journey) {
  EngineOp op = journey->spread ? local(journey->spread()) : nothing();
  op.finish = [journey](double divisor) {
    if (journey->finish) journey->finish(divisor);
  };
  return op;
}

// `op`, and when it has ended the way home.
EngineOp second_crossing(const Kept& journey, EngineOp op) {
  op.staged = true;
  op.then = [journey, finish = std::exchange(op.finish, nullptr)](double divisor) {
    if (finish) finish(divisor);
    return spread(journey);
  };
  return op;
}

EngineOp cross(const Kept& journey, double divisor) {
  EngineOp op = journey->cross ? journey->cross(divisor) : nothing();
  if (op.then && !op.staged) throw Error(ErrorCode::internal, "an operation between hosts whose halves share a way");
  op.staged = true;
  op.then = [journey, then = std::move(op.then), finish = std::exchange(op.finish, nullptr)](double d) {
    if (then) return second_crossing(journey, then(d));
    if (finish) finish(d);
    return second_crossing(journey, nothing());
  };
  return op;
}

}  // namespace

EngineOp local(Work work) {
  EngineOp op;
  op.staged = true;
  op.local = true;
  op.done = [work]() mutable { return work.poll(); };
  op.check = [work]() mutable { work.wait(); };
  return op;
}

CallOptions local_options(const char* what, std::chrono::milliseconds timeout) {
  CallOptions out;
  out.timeout = timeout;
  out.tag.what = what;
  return out;
}

EngineOp begin(Journey journey) {
  const auto kept = std::make_shared<const Journey>(std::move(journey));
  EngineOp op = kept->collect ? local(kept->collect()) : nothing();
  op.then = [kept](double divisor) { return cross(kept, divisor); };
  return op;
}

}  // namespace unisono

#include "comm/c10d/issuer.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

namespace unisono {
namespace {

using Clock = C10dCall::Clock;
constexpr auto kSlice = std::chrono::milliseconds(50);   // between looks at deadlines and at the notice board
constexpr auto kGrace = std::chrono::milliseconds(500);  // for the engine to end a call at its deadline by itself

std::chrono::milliseconds left(const C10dCall& call) {
  const auto rest = std::chrono::ceil<std::chrono::milliseconds>(call.deadline - Clock::now());
  return std::max(rest, std::chrono::milliseconds(1));
}

bool mentions(const std::string& text, std::initializer_list<const char*> words) {
  return std::any_of(words.begin(), words.end(), [&](const char* word) { return text.find(word) != std::string::npos; });
}

std::string list(const std::vector<int>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  return out;
}

}  // namespace

void Issuer::Signal::raise() {
  const std::lock_guard lock(mutex);
  raised = true;
  changed.notify_all();
}

Issuer::Issuer(Engine engine, Describe describe)
    : engine_(std::move(engine)), describe_(std::move(describe)),
      board_(engine_.group()->getStore(), engine_.group()->getRank(), engine_.group()->getSize()), looked_(Clock::now()),
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

// Engines without futures tell nobody when they are done.
bool Issuer::must_poll() const {
  const auto silent = [](const CallPtr& call) { return call->op && !call->op->future; };
  return std::any_of(moving_.begin(), moving_.end(), silent) || std::any_of(waiting_.begin(), waiting_.end(), silent);
}

void Issuer::run() {
  pthread_setname_np(pthread_self(), "uni-c10d");
  bool told = false;
  std::unique_lock lock(signal_->mutex);
  while (true) {
    const auto something = [this] { return signal_->raised || (stop_ && idle() && submitted_.empty()); };
    if (idle()) {
      signal_->changed.wait(lock, something);
    } else {
      signal_->changed.wait_for(lock, must_poll() ? std::chrono::milliseconds(1) : kSlice, something);
    }
    signal_->raised = false;
    for (auto& call : submitted_) waiting_.push_back(std::move(call));
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
    if (!std::exchange(told, true)) board_.post_failure(now);
    lock.lock();
    if (stop_ && idle() && submitted_.empty()) return;
  }
}

// Whatever goes wrong here is the first cause of the group's failure.
void Issuer::step() {
  const C10dCall* current = nullptr;
  try {
    for (std::size_t i = 0; i < moving_.size();) {
      current = moving_[i].get();
      if (!moving_[i]->op->done()) {
        ++i;
        continue;
      }
      complete(*moving_[i]);
      moving_.erase(moving_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    while (true) {
      if (waiting_.empty() && order_.wants_word()) waiting_.push_back(word());
      if (waiting_.empty()) break;
      const CallPtr call = waiting_.front();
      current = call.get();
      const Advance advanced = advance(*call);
      if (advanced == Advance::blocked) break;
      if (advanced == Advance::agreed) {
        waiting_.pop_front();
        place(call);
      }
      serve();
    }
    current = nullptr;
    look_around();
  } catch (const Error& error) {
    poison(error);
  } catch (const std::exception& error) {
    poison(current ? translate(*current, error) : Error(ErrorCode::internal, error.what()));
  }
}

// Moves the first waiting call on until all ranks have agreed on it, or have shown that not all have made it yet.
Issuer::Advance Issuer::advance(C10dCall& call) {
  if (call.phase == C10dCall::Phase::queued) begin(call);
  if (!call.op->done()) return Advance::blocked;
  check_engine(call);
  if (call.phase == C10dCall::Phase::header) {
    read_headers(call);
    if (call.phase == C10dCall::Phase::queued) return Advance::postponed;
  }
  if (call.phase == C10dCall::Phase::record) {
    if (!call.op->done()) return Advance::blocked;
    check_engine(call);
    read_records(call);
  }
  return Advance::agreed;
}

// A call whose headers agree: without a priority its data moves at once, else when its turn has come.
void Issuer::place(const CallPtr& call) {
  call->op.reset();
  if (call->header.is_word != 0) return;
  const bool withheld =
      std::any_of(call->headers.begin(), call->headers.end(), [](const CallHeader& header) { return header.withhold != 0; });
  const bool moves = call->header.operation != Operation::barrier && call->header.operation != Operation::allocate;
  if (withheld || !moves || call->header.count == 0) {
    call->succeed(withheld, {});
  } else if (call->header.priority == 0) {
    start_data(call);
  } else {
    call->phase = C10dCall::Phase::held;
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

// Tells the others how many calls have ended here when no call of ours is due that could.
Issuer::CallPtr Issuer::word() const {
  const C10dCall& held = *held_.begin()->second;
  auto call = std::make_shared<C10dCall>();
  call->header.sequence = held.header.sequence;
  call->header.is_word = 1;
  call->tag = held.tag;
  call->timeout = held.timeout;
  call->deadline = held.deadline;
  return call;
}

void Issuer::begin(C10dCall& call) {
  call.header.ended = order_.ended();
  const auto packed = pack(call.record);
  call.header.words = static_cast<std::uint32_t>(call.record.words.size());
  call.header.sums = static_cast<std::uint32_t>(call.record.sums.size());
  if (call.header.record_is_inline()) std::copy(packed.begin(), packed.end(), call.header.record.begin());
  std::vector<std::uint8_t> block(CallHeader::kSize);
  std::memcpy(block.data(), &call.header, sizeof(CallHeader));
  call.phase = C10dCall::Phase::header;
  await(call, engine_.gather_bytes(block.data(), block.size(), left(call)));
}

// The next phase is `record` when the record has to follow, `queued` when some rank had only a word to say.
void Issuer::read_headers(C10dCall& call) {
  const auto bytes = Engine::fetch(*call.op);
  call.headers.resize(bytes.size() / CallHeader::kSize);
  for (std::size_t rank = 0; rank < call.headers.size(); ++rank)
    std::memcpy(&call.headers[rank], bytes.data() + rank * CallHeader::kSize, sizeof(CallHeader));
  const auto less = [](const CallHeader& a, const CallHeader& b) { return a.ended < b.ended; };
  order_.learn(std::min_element(call.headers.begin(), call.headers.end(), less)->ended);
  if (std::any_of(call.headers.begin(), call.headers.end(), [](const CallHeader& h) { return h.is_word != 0; })) {
    if (call.header.is_word == 0) call.phase = C10dCall::Phase::queued;
    return;
  }
  if (auto difference = find_difference(call.headers, engine_.name())) throw Error(ErrorCode::mismatch, *difference);
  last_entered_ = describe(call.header);
  if (!call.header.record_is_inline()) {
    const auto packed = pack(call.record);
    call.phase = C10dCall::Phase::record;
    await(call, engine_.gather_bytes(packed.data(), packed.size() * sizeof(packed[0]), left(call)));
    return;
  }
  std::vector<ControlRecord> records;
  for (const auto& header : call.headers) records.push_back(unpack(header.record.data(), header.words, header.sums));
  call.combined = combine(records);
}

void Issuer::read_records(C10dCall& call) {
  const auto bytes = Engine::fetch(*call.op);
  const std::size_t length = std::size_t{call.header.words} + call.header.sums;
  std::vector<std::uint64_t> all(length * call.headers.size());
  std::memcpy(all.data(), bytes.data(), bytes.size());
  std::vector<ControlRecord> records;
  for (std::size_t rank = 0; rank < call.headers.size(); ++rank)
    records.push_back(unpack(all.data() + rank * length, call.header.words, call.header.sums));
  call.combined = combine(records);
}

void Issuer::start_data(const CallPtr& call) {
  call->phase = C10dCall::Phase::data;
  call->inputs_ready.make_current_stream_wait();
  await(*call, engine_.start(call->data, left(*call)));
  moving_.push_back(call);
}

void Issuer::await(C10dCall& call, EngineOp op) {
  call.op = std::move(op);
  if (call.op->future) call.op->future->addCallback([signal = signal_](c10::ivalue::Future&) { signal->raise(); });
}

// The engine's own wait throws its error, and orders device streams.
void Issuer::check_engine(C10dCall& call) {
  try {
    call.op->work->wait();
  } catch (const std::exception& raised) {
    throw translate(call, raised);
  }
}

void Issuer::complete(C10dCall& call) {
  check_engine(call);
  double divisor = 1;
  if (call.header.op == ReduceOp::avg) divisor = engine_.group()->getSize();
  if (call.header.divide_by_sum >= 0) divisor = call.combined.sums[static_cast<std::size_t>(call.header.divide_by_sum)];
  if (call.op->finish) call.op->finish(divisor);
  call.op.reset();
  if (call.header.priority != 0) order_.ended_here();
  call.succeed(false, StreamFence(call.data.out.device));
}

// Now and then while calls are under way: has a peer failed, is anything overdue, and tell the others where this rank waits.
void Issuer::look_around() {
  const auto now = Clock::now();
  if (idle() || now - looked_ < kSlice) {
    if (idle()) looked_ = now;
    return;
  }
  looked_ = now;
  if (auto failure = board_.failure()) throw *failure;
  if (!waiting_.empty() && std::exchange(posted_sequence_, waiting_[0]->header.sequence) != waiting_[0]->header.sequence)
    board_.post_waiting(posted_sequence_);
  const auto check = [&](const CallPtr& call) {
    if (now > call->deadline + kGrace) throw overdue(*call, "");
  };
  std::for_each(moving_.begin(), moving_.end(), check);
  std::for_each(waiting_.begin(), waiting_.end(), check);
  for (const auto& [sequence, call] : held_) check(call);
}

void Issuer::fail_all(const Error& cause) {
  const auto fail = [&](C10dCall& call) {
    call.fail(cause);
    if (call.op) abandoned_.push_back(std::move(*call.op));
    call.op.reset();
  };
  for (auto& call : moving_) fail(*call);
  for (auto& call : waiting_) fail(*call);
  for (auto& [sequence, call] : held_) fail(*call);
  held_.clear();
  moving_.clear();
  waiting_.clear();
}

// Calls are made in one order, so a rank that has not entered this one made the one before it last.
Error Issuer::overdue(const C10dCall& call, const std::string& engine_text) {
  const double seconds = std::chrono::duration<double>(call.timeout).count();
  std::string text = describe_(call) + ": not ended after " + std::to_string(seconds).substr(0, 6) + " s: ";
  const auto absent = call.phase == C10dCall::Phase::data ? std::vector<int>{} : board_.absent(call.header.sequence);
  if (absent.empty()) {
    text += "a peer does not answer";
  } else {
    text += list(absent) + (absent.size() == 1 ? " has" : " have") + " not entered this call; the last call there was " +
            (last_entered_.empty() ? "none" : last_entered_);
  }
  if (!engine_text.empty()) text += " (" + engine_text + ")";
  return Error(ErrorCode::timeout, text + ". Look there for the cause, or raise the timeout. The group is unusable now.");
}

Error Issuer::translate(const C10dCall& call, const std::exception& raised) {
  const std::string text(raised.what(), std::strcspn(raised.what(), "\n"));
  const auto* ours = dynamic_cast<const Error*>(&raised);  // an engine of our own behind c10d
  if ((ours && ours->code() == ErrorCode::timeout) || (!ours && (Clock::now() >= call.deadline || mentions(text, {"imed out", "imeout"}))))
    return overdue(call, text);
  if (ours) return Error(ours->code(), describe_(call) + ": " + text);
  if (mentions(text, {"onnection", "closed", "reset", "roken pipe", "ransport endpoint"}))
    return Error(ErrorCode::peer_lost, describe_(call) + ": a peer died or left the group (" + text + "). The group is unusable now.");
  return Error(ErrorCode::internal, describe_(call) + ": the engine failed: " + text);
}

}  // namespace unisono

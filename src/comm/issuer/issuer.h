#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "comm/issuer/header_block.h"
#include "comm/issuer/issued_call.h"
#include "comm/issuer/notice_board.h"
#include "comm/issuer/service_order.h"
#include "comm/issuer/short_call.h"

namespace unisono {

/// The thread of a group over an engine. An engine's collectives must be issued in one order on all ranks, and the data
/// of a call may only move when its header exchange has shown that all ranks agree; so one thread issues everything:
///
///   headers of calls k to l, (their records, where large), data of calls k to l, headers of calls l+1 ..., ...
///
/// It does not wait for the data before the next headers; data of several calls is in flight at once. The data of calls
/// with a priority waits for its turn, see ServiceOrder; that of short calls travels with headers, see ShortCalls.
class Issuer {
 public:
  /// How messages about a call begin: "unisono c10d/gloo group, rank 0 of 2, all_reduce 17 (...)".
  using Describe = std::function<std::string(const IssuedCall&)>;

  Issuer(std::unique_ptr<Engine> engine, Describe describe);
  /// *Blocks* until calls in flight have ended, at most until their deadlines.
  ~Issuer();
  Issuer(const Issuer&) = delete;
  Issuer& operator=(const Issuer&) = delete;

  const Engine& engine() const { return *engine_; }
  /// Numbers the call and queues it. *Throws* the first cause when the group is poisoned.
  void submit(const std::shared_ptr<IssuedCall>& call);
  void poison(const Error& cause);
  /// Whether the caller is the thread itself: letting go of a call's buffers may run anybody's code.
  bool is_this_thread() const { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  using CallPtr = std::shared_ptr<IssuedCall>;
  using Received = std::shared_ptr<const std::vector<std::uint8_t>>;
  // Engines call back from their own threads, possibly after the issuer is gone.
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    bool raised = false;
    void raise();
  };

  void run();
  std::chrono::microseconds pause();
  bool must_poll() const;
  bool idle() const {
    return waiting_.empty() && agreed_.empty() && following_.empty() && held_.empty() && halfway_.empty() &&
           moving_.empty() && !exchange_;
  }
  void step();
  void move_on(const IssuedCall*& current);
  bool begin_something(const IssuedCall*& current);
  void send_headers();
  std::vector<std::size_t> bytes_following() const;
  void read_headers();
  void read_calls(const std::vector<HeaderBlock::Read>& blocks, const Received& received);
  bool ended(const IssuedCall& call, EngineOp& op);
  void finish(IssuedCall& call);
  bool know_record(IssuedCall& call);
  void place(const CallPtr& call);
  void serve(const IssuedCall*& current);
  void start_data(const CallPtr& call);
  void start_one(const CallPtr& call);
  bool second_half();
  double divisor_of(const IssuedCall& call) const;
  void listen(EngineOp& op);
  void complete(IssuedCall& call);
  void check_engine(const IssuedCall& call, EngineOp& op);
  void look_around();
  void fail_all(const Error& cause);
  Error translate(const IssuedCall& call, const std::exception& raised);
  Error lost(const IssuedCall& call, const std::string& engine_text);
  Error overdue(const IssuedCall& call, const std::string& engine_text);
  std::optional<Error> posted_failure() const { return board_ ? board_->failure() : std::nullopt; }

  std::unique_ptr<Engine> engine_;
  Describe describe_;
  std::unique_ptr<NoticeBoard> board_;  // null where the engine has none
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  // Guarded by signal_->mutex.
  std::deque<CallPtr> submitted_;
  std::optional<Error> cause_;
  std::int64_t next_sequence_ = 0;
  bool stop_ = false;
  // The thread's own.
  std::deque<CallPtr> waiting_;       // not known to have been made by all ranks
  std::optional<EngineOp> exchange_;  // of the headers of the first of them
  CallPtr subject_;                   // the call that is named when the exchange fails
  std::deque<CallPtr> agreed_;        // made by all ranks; their records or data are next
  ShortCalls short_;
  std::deque<CallPtr> following_;         // short ones: their data goes with the next headers
  std::map<std::int64_t, CallPtr> held_;  // their data waits for its turn
  ServiceOrder order_;
  std::deque<CallPtr> halfway_;  // in the first of two halves; nothing else is begun meanwhile
  std::vector<CallPtr> moving_;
  std::vector<EngineOp> abandoned_;  // of failed calls: the engine may still use their memory
  IssuedCall::Clock::time_point looked_;
  IssuedCall::Clock::time_point moved_;  // when something last began or ended
  std::int64_t newest_ = -1;             // call that was made here
  std::int64_t posted_sequence_ = -1;    // the newest when this rank last said that it waits
  std::string last_entered_;             // the newest call that every rank has entered
  std::thread thread_;
};

}  // namespace unisono

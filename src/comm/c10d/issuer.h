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

#include "comm/c10d/c10d_call.h"
#include "comm/c10d/header_block.h"
#include "comm/c10d/notice_board.h"
#include "comm/c10d/service_order.h"

namespace unisono {

/// The thread "uni-c10d" of a c10d group. Collectives of one c10d group must be issued in one order on all ranks, and
/// the data of a call may only move when its header exchange has shown that all ranks agree; so one thread issues
/// everything:
///
///   headers of calls k to l, (their records, where large), data of calls k to l, headers of calls l+1 ..., ...
///
/// It does not wait for the data before the next headers; data of several calls is in flight at once. The data of calls
/// with a priority waits for its turn, see ServiceOrder.
class Issuer {
 public:
  /// How messages about a call begin: "unisono c10d/gloo group, rank 0 of 2, all_reduce 17 (...)".
  using Describe = std::function<std::string(const C10dCall&)>;

  Issuer(Engine engine, Describe describe);
  /// *Blocks* until calls in flight have ended, at most until their deadlines.
  ~Issuer();
  Issuer(const Issuer&) = delete;
  Issuer& operator=(const Issuer&) = delete;

  const Engine& engine() const { return engine_; }
  /// Numbers the call and queues it. *Throws* the first cause when the group is poisoned.
  void submit(const std::shared_ptr<C10dCall>& call);
  void poison(const Error& cause);

 private:
  using CallPtr = std::shared_ptr<C10dCall>;
  // Engines call back from their own threads, possibly after the issuer is gone.
  struct Signal {
    std::mutex mutex;
    std::condition_variable changed;
    bool raised = false;
    void raise();
  };

  void run();
  bool must_poll() const;
  bool idle() const {
    return waiting_.empty() && agreed_.empty() && held_.empty() && halfway_.empty() && moving_.empty() && !exchange_;
  }
  void step();
  void move_on(const C10dCall*& current);
  bool begin_something(const C10dCall*& current);
  void send_headers();
  void read_headers();
  bool know_record(C10dCall& call);
  void place(const CallPtr& call);
  void serve();
  void start_data(const CallPtr& call);
  void start_one(const CallPtr& call);
  bool second_half();
  double divisor_of(const C10dCall& call) const;
  void listen(EngineOp& op);
  void complete(C10dCall& call);
  void check_engine(const C10dCall& call, EngineOp& op);
  void look_around();
  void fail_all(const Error& cause);
  Error translate(const C10dCall& call, const std::exception& raised);
  Error overdue(const C10dCall& call, const std::string& engine_text);

  Engine engine_;
  Describe describe_;
  NoticeBoard board_;
  std::shared_ptr<Signal> signal_ = std::make_shared<Signal>();
  // Guarded by signal_->mutex.
  std::deque<CallPtr> submitted_;
  std::optional<Error> cause_;
  std::int64_t next_sequence_ = 0;
  bool stop_ = false;
  // The thread's own.
  std::deque<CallPtr> waiting_;           // not known to have been made by all ranks
  std::optional<EngineOp> exchange_;      // of the headers of the first of them
  CallPtr subject_;                       // the call that is named when the exchange fails
  std::deque<CallPtr> agreed_;            // made by all ranks; their records or data are next
  std::map<std::int64_t, CallPtr> held_;  // their data waits for its turn
  ServiceOrder order_;
  std::deque<CallPtr> halfway_;  // in the first of two halves; nothing else is begun meanwhile
  std::vector<CallPtr> moving_;
  std::vector<EngineOp> abandoned_;  // of failed calls: the engine may still use their memory
  C10dCall::Clock::time_point looked_;
  std::int64_t posted_sequence_ = -1;
  std::string last_entered_;  // the newest call that every rank has entered
  std::thread thread_;
};

}  // namespace unisono

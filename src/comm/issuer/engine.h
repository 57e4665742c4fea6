#pragma once

#include <unisono/buffer.h>
#include <unisono/error.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "comm/issuer/call_header.h"
#include "comm/issuer/notice_board.h"

namespace unisono {

/// One operation in flight, with what must happen when it has ended. What the engine reads or writes meanwhile is kept
/// alive by what these functions hold.
///
/// An operation may be followed by another, `then`. If it is `staged`, what follows uses ways of its own (another
/// communicator): it must begin in the order of the calls, whatever else is in flight. If not, it uses the same:
/// nothing else may begin in between.
struct EngineOp {
  std::function<bool()> done;                              ///< whether it has ended, well or not; never waits
  std::function<void()> check;                             ///< *throws* the engine's error; orders device streams
  std::function<void(double divisor)> finish = nullptr;    ///< may be empty
  std::function<EngineOp(double divisor)> then = nullptr;  ///< what follows; may be empty
  /// Has a function called when the operation ends, from any thread. Empty: the engine tells nobody and is polled.
  std::function<void(std::function<void()>)> when_done = nullptr;
  std::function<std::vector<std::uint8_t>()> gathered = nullptr;  ///< of `gather_bytes`: all ranks' blocks
  bool staged = false;
  bool local = false;  ///< ends soon after `abort`; what it reads or writes may be the call's own
  int stage = 0;
};

/// The data part of a call.
struct DataCall {
  Operation operation = Operation::barrier;
  Buffer out;
  Buffer in;
  ReduceOp op = ReduceOp::sum;
  int root = 0;
  bool may_round = false;
};

/// A call on `out` alone in parts of `length` elements.
std::vector<DataCall> split(const DataCall& call, std::size_t length);

/// Makes the present stream of the calling thread wait for a point in another; empty where there are no streams.
using StreamFence = std::function<void()>;

struct EngineInfo {
  std::string name;  ///< of the group, in messages: "c10d/gloo"
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};
  std::chrono::milliseconds grace{500};  ///< for the engine to end a call at its deadline by itself, where it does that
  const char* thread = "uni-engine";     ///< name of the thread that issues; 15 characters at most
  /// The longest pause between two looks at operations that tell nobody when they end. Engines that only move while
  /// somebody looks (MPI) want `eager`: no pause at all right after something has moved.
  std::chrono::microseconds pause{100};
  bool eager = false;
};

/// What moves the data of a group whose calls an `Issuer` issues: an outside communication library. The issuer has seen
/// to it that all ranks make the same call, in the same order, before the engine hears of it. See
/// docs/adding_a_backend.md.
/// *Threads*: one, the issuer's; but for `serves`, `fence` and the constructor.
class Engine {
 public:
  using Milliseconds = std::chrono::milliseconds;

  explicit Engine(EngineInfo info) : info_(std::move(info)) {}
  virtual ~Engine() = default;
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const EngineInfo& info() const { return info_; }

  virtual bool serves(Device::Kind kind) const { return kind == Device::Kind::cpu; }
  /// A point in the present stream of the calling thread.
  virtual StreamFence fence(const Device&) const { return {}; }
  /// What ranks tell each other beside the calls; null when the engine has no way.
  virtual std::unique_ptr<NoticeBoard> notice_board() { return nullptr; }
  /// What to start in place of `call`, one after the other: usually itself.
  virtual std::vector<DataCall> parts_of(const DataCall& call) const { return {call}; }
  /// Starts a call that moves data (no barrier, no allocate, not without elements). `avg` is a sum; `finish` and `then`
  /// are given the divisor. An operation may outlive its call, which fails as soon as any rank does; so the call's CPU
  /// memory is only written in `finish`, and without an owner only read before this returns and in `then`; unless the
  /// operation is `local`. *Blocks*: never. *Throws* what `check` throws.
  virtual EngineOp start(const DataCall& call, Milliseconds timeout) = 0;
  /// Gathers equal blocks of bytes of all ranks; copies `block` before it returns. One at a time; it may have a `then`,
  /// which may begin whatever else is in flight.
  virtual EngineOp gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) = 0;
  /// Ranks that are known to have ended or left, as this one sees it now.
  virtual std::vector<int> lost() const { return {}; }
  /// Ends what is in flight, where it can be ended. Nothing is started after it.
  virtual void abort(const Error&) {}

 private:
  EngineInfo info_;
};

}  // namespace unisono

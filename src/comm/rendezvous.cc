#include "comm/rendezvous.h"

#include <algorithm>
#include <vector>

#include "base/clock.h"
#include "comm/process_identity.h"

namespace unisono {
namespace {

using Clock = std::chrono::steady_clock;
constexpr std::chrono::nanoseconds kSlice = std::chrono::milliseconds(50);  // how long a duplicate may stay unnoticed
constexpr std::chrono::nanoseconds kWritten = std::chrono::seconds(10);     // between a claim and the claimant's name

class Joining {
 public:
  Joining(Store& store, int rank, int size, std::string prefix, std::chrono::nanoseconds timeout)
      : store_(store),
        rank_(rank),
        size_(size),
        prefix_(std::move(prefix)),
        timeout_(timeout),
        deadline_(deadline_after(timeout)),
        self_(ProcessIdentity::self()) {}

  std::string run() {
    if (rank_ == 0) {
      open_round();
    } else {
      while (!try_join()) await_newer_round();
    }
    for (int peer = 0; peer < size_; ++peer) await_peer(peer);
    return round_key(round_);
  }

 private:
  std::string round_key(std::int64_t round) const { return prefix_ + "/round/" + std::to_string(round); }
  std::string rank_key(std::int64_t round, int rank) const {
    return round_key(round) + "/rank/" + std::to_string(rank);
  }
  std::chrono::nanoseconds left() const {
    return std::max<std::chrono::nanoseconds>(deadline_ - Clock::now(), std::chrono::nanoseconds(0));
  }

  ProcessIdentity identity(std::int64_t round, int rank) {
    auto text = store_.get(rank_key(round, rank), std::min(left(), kWritten));
    if (!text) report_missing({rank});
    return ProcessIdentity::parse(*text);
  }

  void open_round() {
    const std::int64_t newest = store_.add(prefix_ + "/rounds", 0);
    if (newest > 0) {
      const auto text = store_.get(rank_key(newest, 0), std::min(left(), kSlice));
      if (text) {
        const auto other = ProcessIdentity::parse(*text);
        if (!(other == self_) && other.alive()) claimed_twice(newest, other);
      }
    }
    round_ = store_.add(prefix_ + "/rounds", 1);
    store_.set(rank_key(round_, 0), self_.to_string());
    if (round_ == newest + 1) return;
    claimed_twice(round_ - 1, identity(round_ - 1, 0));  // two came at the same moment
  }

  bool try_join() {
    round_ = store_.add(prefix_ + "/rounds", 0);
    if (round_ == 0) return false;
    const auto first = store_.get(rank_key(round_, 0), std::min(left(), kSlice));
    opened_ = first.has_value();
    if (!opened_ || !ProcessIdentity::parse(*first).alive()) return false;
    if (store_.add(rank_key(round_, rank_) + "/claims", 1) == 1) {
      store_.set(rank_key(round_, rank_), self_.to_string());
      return true;
    }
    const auto other = identity(round_, rank_);
    if (!(other == self_) && other.alive()) claimed_twice(round_, other);
    return false;
  }

  // Returns when there is something new to look at, and now and then without: counting up and writing the name are two
  // steps, and a rank 0 killed between them leaves a round that never opens.
  void await_newer_round() {
    for (int slices = 0; slices < 20; ++slices) {
      if (left().count() == 0) report_missing({0});
      if (store_.get(rank_key(round_ + 1, 0), std::min(left(), kSlice))) return;
      if (!opened_ && round_ > 0 && store_.get(rank_key(round_, 0), std::chrono::nanoseconds(0))) return;
    }
  }

  void await_peer(int peer) {
    while (!store_.get(rank_key(round_, peer), std::min(left(), kSlice))) {
      check_failure();
      if (left().count() == 0) report_missing(missing());
    }
    check_failure();
  }

  std::vector<int> missing() {
    std::vector<int> out;
    for (int peer = 0; peer < size_; ++peer)
      if (!store_.get(rank_key(round_, peer), std::chrono::nanoseconds(0))) out.push_back(peer);
    return out;
  }

  void check_failure() {
    const auto text = store_.get(round_key(round_) + "/failed", std::chrono::nanoseconds(0));
    if (!text) return;
    store_.add(round_key(round_) + "/told", 1);
    if (rank_ == 0) let_others_read();
    throw Error(ErrorCode::invalid_argument, *text);
  }

  // Rank 0 may host the store, which goes with it: the others get a second to read why.
  void let_others_read() {
    for (int slices = 0; slices < 20 && store_.add(round_key(round_) + "/told", 0) < size_; ++slices) {
      store_.get(round_key(round_) + "/nothing", kSlice);
    }
  }

  [[noreturn]] void claimed_twice(std::int64_t round, const ProcessIdentity& other) {
    const std::string text =
        "unisono: rank " + std::to_string(rank_) + " of " + std::to_string(size_) + " is claimed by " + other.shown() +
        " and by " + self_.shown() +
        ". Start each rank once; if one of them is left over from another run, end it or give this "
        "run a store of its own (another MASTER_PORT or UNISONO_STORE) or a prefix of its own.";
    store_.set(round_key(round) + "/failed", text);
    if (round != round_) store_.set(round_key(round_) + "/failed", text);
    throw Error(ErrorCode::invalid_argument, text);
  }

  [[noreturn]] void report_missing(const std::vector<int>& ranks) {
    std::string list;
    for (int peer : ranks) list += (list.empty() ? "" : ", ") + std::to_string(peer);
    throw Error(ErrorCode::timeout, "unisono: rank " + std::to_string(rank_) + " waited " +
                                        std::to_string(std::chrono::duration<double>(timeout_).count()).substr(0, 6) +
                                        " s for " + std::to_string(size_) + " ranks: missing rank" +
                                        (ranks.size() > 1 ? "s " : " ") + list + ". Start " +
                                        (ranks.size() > 1 ? "them" : "it") +
                                        " with the same store (and UNISONO_JOB and UNISONO_SECRET, where set), lower "
                                        "the world size, or raise start_timeout.");
  }

  Store& store_;
  int rank_;
  int size_;
  std::string prefix_;
  std::chrono::nanoseconds timeout_;
  Clock::time_point deadline_;
  ProcessIdentity self_;
  std::int64_t round_ = 0;
  bool opened_ = false;  // whether rank 0 of round_ has written its name
};

}  // namespace

std::string join_round(Store& store, int rank, int size, const std::string& prefix, std::chrono::nanoseconds timeout) {
  return Joining(store, rank, size, prefix, timeout).run();
}

}  // namespace unisono

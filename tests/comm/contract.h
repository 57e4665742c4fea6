#pragma once

#include <gtest/gtest.h>
#include <unisono/make_group.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "comm/reference.h"

// What every transport must do, as one suite. A transport is described in a few lines (contract_shm_test.cc is one) and
// instantiates all of it.

namespace unisono::testing {

/// Makes one rank's group; called once per rank, in the rank's thread or process.
using Maker = std::function<std::shared_ptr<ProcessGroup>(const GroupOptions&)>;

struct Transport {
  std::string name;
  int max_ranks = 8;
  /// A new world of `size` ranks, in this process.
  std::function<Maker(int size, std::chrono::nanoseconds timeout)> world;
  /// Whether ranks may be processes; then the maker of `world` is called in each.
  bool processes = false;
  /// Whether the others learn which process was killed, not only that one was.
  bool names_the_dead = true;
  /// Where ranks are processes that all run this program: which one this is; -1 where they are threads. Then `world` is
  /// called by every process, and `meeting` makes a way to wait for one another outside of any group.
  int own_rank = -1;
  std::function<std::function<void()>(int size)> meeting = nullptr;
  /// Whether sanitizers have much to find in it; else they get fewer and smaller worlds.
  bool delicate = false;
  /// Whether a call's data may lie in allocated memory on some ranks only.
  bool mixes_places = true;
  /// Small ones where sums are an engine's own: their order and what becomes of a NaN are its business.
  Numbers numbers = Numbers::any;
};

inline std::ostream& operator<<(std::ostream& out, const Transport& t) { return out << t.name; }

/// Far more than any call takes on a slow and busy machine; nothing ends later than this even when all goes wrong.
inline constexpr std::chrono::nanoseconds kPatience = std::chrono::seconds(100);

using RankBody = std::function<void(ProcessGroup&)>;

/// Runs `body` on `size` ranks of a new world, each a thread. What a rank throws is a test failure, and the group is
/// aborted so that the others end.
void run_ranks(const Transport& transport, int size, const RankBody& body);
/// The same with `groups` groups over the same ranks, made one after the other.
void run_ranks(const Transport& transport, int size, int groups,
               const std::function<void(const std::vector<std::shared_ptr<ProcessGroup>>&)>& body);

/// Where the ranks of a test wait for one another outside of any group.
class Meeting {
 public:
  Meeting(const Transport& transport, int size);
  /// *Blocks* until all ranks are there; throws when they do not come.
  void meet() { meet_(); }

 private:
  std::function<void()> meet_;
};

/// How a call failed.
struct Failure {
  ErrorCode code = ErrorCode::internal;
  std::string text;
};
/// What `call` throws; nothing when it does not.
std::optional<Failure> failure_of(const std::function<void()>& call);

/// *Throws* std::runtime_error naming the first byte that differs.
void require_same(const Bytes& expected, const void* actual, const std::string& where);
void require(bool condition, const std::string& what);

Buffer buffer_of(Bytes& bytes, Dtype dtype);

/// Where a rank's data lies.
enum class Place { allocated, ordinary, mixed };
inline std::vector<Place> places_of(const Transport& transport) {
  std::vector<Place> places = {Place::allocated, Place::ordinary};
  if (transport.mixes_places) places.push_back(Place::mixed);
  return places;
}

/// Memory of one rank to lay buffers in: part of an allocation of the group at 64-byte steps, or of the heap. Mixed is
/// the one on even ranks and the other on odd ones.
class Arena {
 public:
  Arena(ProcessGroup& group, std::size_t bytes);
  /// A buffer of its own with these bytes. All ranks must make the same calls.
  Buffer put(const Bytes& bytes, Dtype dtype, Place place);
  /// Forgets all buffers.
  void clear();

 private:
  bool even_rank_;
  Buffer shared_;
  std::size_t used_ = 0;
  std::vector<std::unique_ptr<Bytes>> heap_;
};

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

/// World sizes to try: 1 to 8, fewer under a sanitizer (what is left out is printed), none that the transport cannot.
std::vector<int> world_sizes(const Transport& transport);

class Contract : public ::testing::TestWithParam<Transport> {
 protected:
  /// Skips, saying why, when the transport has too few ranks.
  bool needs(int ranks);
};

/// A seeded random sequence of mixed calls with random yields, checked against the reference; throws when anything is
/// wrong.
void chaos(const Transport& transport, ProcessGroup& group, std::uint64_t seed, int calls);

/// Transports whose ranks may be processes, by name; for the child program.
void register_for_processes(const Transport& transport);

#define UNISONO_INSTANTIATE_CONTRACT(Name, transport)                     \
  INSTANTIATE_TEST_SUITE_P(Name, Contract, ::testing::Values(transport)); \
  [[maybe_unused]] const bool k##Name##Registered = [] {                  \
    register_for_processes(transport);                                    \
    return true;                                                          \
  }()

}  // namespace unisono::testing

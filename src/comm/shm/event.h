#pragma once

#include <cstdint>

#include "comm/shm/layout.h"

namespace unisono::shm {

// Sleeping and waking over processes. A sleeper first counts itself in, then looks once more at what it waits for, then
// sleeps on the version it saw; a waker first writes what changed, then looks whether anybody sleeps. Both use
// sequentially consistent operations, so one of them sees the other. std::atomic::wait never wakes another process.

class Sleeper {
 public:
  explicit Sleeper(EventWords& event) : event_(event) {
    event_.sleepers.fetch_add(1);
    seen_ = event_.version.load();
  }
  ~Sleeper() { event_.sleepers.fetch_sub(1); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  /// Until something happens or `ns` nanoseconds have passed; may return for no reason.
  void sleep(std::int64_t ns);

 private:
  EventWords& event_;
  std::uint32_t seen_;
};

/// Wakes all sleepers, if there are any.
inline bool anybody_sleeps(const EventWords& event) { return event.sleepers.load() > 0; }
void wake_all(EventWords& event);

}  // namespace unisono::shm

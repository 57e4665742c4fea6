#pragma once

#include <exception>
#include <memory>
#include <thread>

#include "comm/c10d/recorded_group.h"

namespace unisono {

/// While it lives, what a forward and backward of this rank would send over the companion group is sent, with nothing
/// in it, by the thread "uni-join": where it stands among the messages of the group itself is not the same on all
/// ranks. Does nothing where nobody has asked for the companion.
class ReplayedForward {
 public:
  explicit ReplayedForward(std::shared_ptr<ProcessGroup> group);
  /// *Blocks* until it is sent. After an exception the companion is aborted, for the others may not come.
  ~ReplayedForward();
  ReplayedForward(const ReplayedForward&) = delete;
  ReplayedForward& operator=(const ReplayedForward&) = delete;

 private:
  void run();

  std::shared_ptr<ProcessGroup> group_;
  std::shared_ptr<RecordedGroup> second_;
  int exceptions_ = std::uncaught_exceptions();
  std::thread thread_;
};

}  // namespace unisono

#include "nn/replayed_forward.h"

#include <pthread.h>

#include <string>
#include <utility>

namespace unisono {

ReplayedForward::ReplayedForward(std::shared_ptr<ProcessGroup> group)
    : group_(std::move(group)), second_(recorded_companion(group_)) {
  if (second_) thread_ = std::thread([this] { run(); });
}

ReplayedForward::~ReplayedForward() {
  if (!second_) return;
  if (std::uncaught_exceptions() > exceptions_) {
    second_->abort(Error(ErrorCode::peer_lost, "a join has failed on rank " + std::to_string(group_->rank())));
  }
  thread_.join();
}

void ReplayedForward::run() {
  pthread_setname_np(pthread_self(), "uni-join");
  try {
    second_->replay();
  } catch (const Error& error) {
    group_->abort(error);  // whoever waits there learns why
  }
}

}  // namespace unisono

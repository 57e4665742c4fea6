#pragma once

#include <unisono/make_group.h>

#include <memory>
#include <utility>

#include "comm/c10d/meeting_place.h"

namespace unisono {

/// A store that goes when the ranks of a group have met in it, and what it lay in with it.
class PassingStore final : public Store {
 public:
  explicit PassingStore(MeetingPlace place) : place_(std::move(place)) {}
  /// *Collective* over the ranks that use it, by `group`, which they have made. A file that goes while another rank
  /// still closes it would hold that rank up for minutes.
  void end(ProcessGroup& group) {
    group.barrier().wait();  // nobody reads it any more
    place_.store = nullptr;
    group.barrier().wait();
    place_.cleanup = nullptr;
  }

  void set(const std::string& key, const std::string& value) override { open().set(key, value); }
  std::optional<std::string> get(const std::string& key, std::chrono::nanoseconds timeout) override {
    return open().get(key, timeout);
  }
  std::int64_t add(const std::string& key, std::int64_t amount) override { return open().add(key, amount); }

 private:
  Store& open() const {
    if (place_.store) return *place_.store;
    throw Error(ErrorCode::invalid_argument,
                "the launcher names no address, so the ranks of this group met in a file that is gone; start them with "
                "MASTER_ADDR and MASTER_PORT or UNISONO_STORE=file:PATH, which stay");
  }
  MeetingPlace place_;
};

}  // namespace unisono

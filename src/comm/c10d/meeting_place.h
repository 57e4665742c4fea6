#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "comm/environment/environment.h"

namespace unisono {

/// The store an environment names, and what has to go away with it.
struct MeetingPlace {
  std::shared_ptr<Store> store;
  std::shared_ptr<void> cleanup =
      nullptr;  ///< removes the job's private directory; one rank lets go of it when all ranks are there
};

/// Opens or connects to it. *Blocks* until the host of a TCPStore answers.
/// *Throws* `timeout` ("missing rank 0"), `invalid_argument` for a port in use by something else or an unusable path.
MeetingPlace open_meeting_place(const Environment& environment, std::chrono::nanoseconds timeout);

/// A store for the ranks of one host, who all know `name`, which nobody else uses: a file in a private directory.
/// `cleanup` where this rank `removes` it.
MeetingPlace open_host_place(const std::string& name, bool removes, std::chrono::nanoseconds timeout);

}  // namespace unisono

#pragma once

#include <unisono/make_group.h>

#include <memory>
#include <vector>

#include "comm/process_identity.h"
#include "comm/shm/mapping.h"

namespace unisono::shm {

/// What a rank holds once all ranks have found each other.
struct Attachment {
  std::shared_ptr<Mapping> control;
  std::vector<std::shared_ptr<Mapping>> staging;  ///< one per rank; no page exists yet
  std::vector<std::shared_ptr<Mapping>> inboxes;  ///< one per rank, see inbox.h
  std::vector<ProcessIdentity> processes;         ///< one per rank
};

/// Finds the other ranks through the store and maps their memory. *Blocks* until all have done so.
/// *Throws* `invalid_argument` (a rank claimed twice, ranks on different hosts or with different sizes, no room),
/// `timeout` naming the missing ranks, `peer_lost`.
Attachment attach(const GroupOptions& options);

}  // namespace unisono::shm

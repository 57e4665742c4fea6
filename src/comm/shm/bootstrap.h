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

/// Maps the memory of the ranks, who have met in a round whose keys begin with `options.prefix`. *Blocks* until all
/// have done so.
/// *Throws* `invalid_argument` (ranks on different hosts or with different sizes, no room),
/// `timeout` naming the missing ranks, `peer_lost`.
Attachment attach(const GroupOptions& options);

}  // namespace unisono::shm

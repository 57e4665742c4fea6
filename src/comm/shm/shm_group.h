#pragma once

#include <unisono/make_group.h>

#include <memory>

namespace unisono {

struct ShmOptions {
  /// Calls are carried out by the progress thread as soon as they are made: for callers that neither wait nor poll.
  /// Costs a wake-up per call.
  bool eager_progress = false;
};

/// Ranks on one host, over shared memory. See docs/shm.md. *Throws* as `make_group` does.
std::shared_ptr<ProcessGroup> make_shm_group(const GroupOptions& options, const ShmOptions& shm = {});

/// Why this machine cannot serve shm groups with these options; empty when it can. Contacts nobody.
std::string why_not_shm(const GroupOptions& options);

}  // namespace unisono

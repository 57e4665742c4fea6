#pragma once

#include <unisono/process_group.h>

#include <string>
#include <string_view>

#include "base/fork.h"

namespace unisono {

// Checks of arguments that are wrong on their own, the same for every transport. They throw `invalid_argument`, touch
// nothing and do not poison the group. `device` is the kind of memory the transport serves.

/// Who speaks in an error.
struct Member {
  const std::string& name;  ///< of the group
  int rank;
  int size;
};

/// "unisono shm group, rank 1 of 2, all_reduce 17 (step 3, bucket 0, gradients)": how every message about a call
/// begins. A sequence number below 0 is left out, as is a tag without content.
std::string describe_call(const ProcessGroup& group, std::string_view operation, std::int64_t sequence,
                          const CallTag& tag = {});
std::string describe_call(const Member& member, std::string_view operation, std::int64_t sequence,
                          const CallTag& tag = {});

/// *Throws* `invalid_argument` in a process that was forked since `mark`, the group's own, was made.
void check_not_forked(const ProcessGroup& group, const ForkMark& mark);

void check_all_reduce(const ProcessGroup& group, const Buffer& data, const AllReduceOptions& options,
                      Device::Kind device = Device::Kind::cpu);
void check_broadcast(const ProcessGroup& group, const Buffer& data, int root, const CallOptions& options,
                     Device::Kind device = Device::Kind::cpu);
void check_all_gather(const ProcessGroup& group, const Buffer& out, const Buffer& in, const CallOptions& options,
                      Device::Kind device = Device::Kind::cpu);
void check_reduce_scatter(const ProcessGroup& group, const Buffer& out, const Buffer& in,
                          const AllReduceOptions& options, Device::Kind device = Device::Kind::cpu);
void check_all_to_all(const ProcessGroup& group, const Buffer& out, const Buffer& in, const CallOptions& options,
                      Device::Kind device = Device::Kind::cpu);
/// `peer` may be negative, for any rank, where `any` allows it.
void check_message(const ProcessGroup& group, std::string_view operation, const Buffer& data, int peer, bool any,
                   std::chrono::nanoseconds timeout, Device::Kind device = Device::Kind::cpu);
void check_barrier(const ProcessGroup& group, const CallOptions& options);

}  // namespace unisono

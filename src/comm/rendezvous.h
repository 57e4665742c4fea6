#pragma once

#include <unisono/make_group.h>

#include <chrono>
#include <string>

namespace unisono {

/// Gathers the ranks of one run in a store that may hold what earlier runs left behind.
///
/// Rank 0 opens a new *round*: it counts `rounds` up and writes who it is. The others join the newest round whose rank
/// 0 still runs and in which their own place is free; keys of a run that was killed belong to a round whose rank 0
/// is dead and are passed over. A group that the same processes make again is simply the next round. Two living
/// processes that claim one rank find each other's name in the round, write it down as the round's failure, and every
/// rank that waits in it reads that.
///
/// *Blocks* until all ranks are in the round. Returns the prefix for this round's keys.
/// *Throws* `timeout` naming the missing ranks, `invalid_argument` for a rank claimed twice naming both processes.
std::string join_round(Store& store, int rank, int size, const std::string& prefix, std::chrono::nanoseconds timeout);

}  // namespace unisono

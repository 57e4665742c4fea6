#pragma once

#include "comm/c10d/engine.h"

namespace unisono {

/// An all-reduce (CPU memory: of any kind, else a sum of f16 or bf16) made of an engine's all_to_all and all_gather:
/// every rank gets its slice of everybody's data, sums it, and hands the sum round. As many bytes as a ring's, and the
/// sums are ours: a balanced binary tree over ranks, f16 and bf16 added in f32 and rounded once, while 16 bits travel.
/// (Engines add 16-bit numbers in 16 bits, or not at all.)
///
/// The operation that is returned is the first half (between two ranks: the whole); its `then`, given the divisor, sums
/// and starts the second. Between the two a rank must start nothing else, so that all ranks start everything in one
/// order.
EngineOp tree_all_reduce(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const DataCall& call,
                         std::chrono::milliseconds timeout);

/// Any reduction of CPU memory by all_to_all, every rank reducing its own block: the same bytes as an engine's own, in
/// our order. (Gloo's own is an all-reduce of everything, and ends only when somebody waits for it.)
EngineOp tree_reduce_scatter(const c10::intrusive_ptr<c10d::ProcessGroup>& group, const DataCall& call,
                             std::chrono::milliseconds timeout);

}  // namespace unisono

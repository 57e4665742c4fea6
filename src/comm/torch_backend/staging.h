#pragma once

#include <ATen/core/Tensor.h>
#include <unisono/buffer.h>
#include <unisono/dtype.h>

#include <functional>
#include <vector>

#include "comm/torch_backend/torch_work.h"

namespace c10d {
struct ReduceOp;
}

namespace unisono {

/// A dense CPU tensor that a call can read or write directly.
/// *Throws* `invalid_argument` naming `operation` for tensors on another device and sparse ones.
void check_dense_cpu(const at::Tensor& tensor, const char* operation);

/// The tensor itself when its elements lie in order, else a copy of it that does.
at::Tensor contiguous_input(const at::Tensor& tensor, const char* operation);

/// The tensor itself when its elements lie in order, else memory that is copied to it when the call ends. `read` says
/// whether the call also reads it.
at::Tensor contiguous_output(TorchWork::Call& call, const at::Tensor& tensor, const char* operation, bool read);

/// A contiguous tensor's memory for calls that only move it; elements that ranks cannot calculate with travel as bytes.
Buffer moved_buffer(const at::Tensor& contiguous, const char* operation);

/// Whether all have the same number of elements.
bool of_one_size(const std::vector<at::Tensor>& tensors);
/// *Throws* `invalid_argument` unless all have `like`'s size and dtype.
void check_alike(const std::vector<at::Tensor>& tensors, const at::Tensor& like, const char* operation);

/// One flat output that is cut and copied to `tensors` when the call ends; all must have `like`'s size and dtype.
at::Tensor flat_output(TorchWork::Call& call, const std::vector<at::Tensor>& tensors, const at::Tensor& like,
                       const char* operation);
/// All tensors one after the other; all must have `like`'s size and dtype.
at::Tensor flat_input(const std::vector<at::Tensor>& tensors, const at::Tensor& like, const char* operation);

/// The only tensor of a list; c10d passes lists for several devices per process, which are no more.
const at::Tensor& only(const std::vector<at::Tensor>& tensors, const char* operation);

/// *Throws* `invalid_argument` unless there is one tensor per rank.
void check_count(std::size_t count, int size, const char* operation);

/// The only list of lists; c10d passes one per device of the process. *Throws* `invalid_argument` unless it has a
/// tensor per rank.
const std::vector<at::Tensor>& only_list(const std::vector<std::vector<at::Tensor>>& lists, int size,
                                         const char* operation);

/// *Throws* `invalid_argument` unless there are as many of both.
void check_pairs(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs, const char* operation);

/// PREMUL_SUM is a sum of what `multiplied` has multiplied.
/// *Throws* `invalid_argument` for complex numbers with anything but sum and average.
ReduceOp reduce_op_of(const c10d::ReduceOp& op, const at::Tensor& tensor, const char* operation);

/// The tensor times the factor of PREMUL_SUM, in place or as a copy; the tensor itself for other operations.
at::Tensor multiplied(const at::Tensor& tensor, const c10d::ReduceOp& op, bool in_place);

}  // namespace unisono

#pragma once

#include <unisono/process_group.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace unisono {

enum class Operation : std::uint8_t {
  all_reduce,
  broadcast,
  all_gather,
  reduce_scatter,
  all_to_all,
  barrier,
  allocate
};
const char* to_string(Operation operation) noexcept;

/// What every rank sends ahead of a call: a fingerprint. Plain bytes.
struct CallHeader {
  std::uint64_t magic = 0x6f6e6f73696e75;
  std::int64_t sequence = 0;
  std::uint64_t count = 0;  // elements; bytes for allocate
  std::int64_t step = -1;
  std::int32_t bucket = -1;
  std::int32_t root = -1;
  std::int32_t divide_by_sum = -1;
  std::int32_t priority = 0;
  std::uint32_t words = 0;
  std::uint32_t sums = 0;
  Operation operation = Operation::barrier;
  Dtype dtype = Dtype::u8;
  ReduceOp op = ReduceOp::sum;
  std::uint8_t withhold = 0;
  std::uint8_t record_follows = 0;  // the control record is too large to come along
  std::uint8_t may_round = 0;
  std::uint8_t data_comes = 0;  // a short call's, in the same block
  Device::Kind device = Device::Kind::cpu;
  std::array<char, 48> what{};
};
static_assert(std::has_unique_object_representations_v<CallHeader>);

/// A control record as it travels; both directions.
std::vector<std::uint64_t> pack(const ControlRecord& record);
ControlRecord unpack(const std::uint64_t* data, std::size_t words, std::size_t sums);

/// Words by or; sums as a balanced binary tree over ranks, so that every rank gets the same bits.
ControlRecord combine(const std::vector<ControlRecord>& records);

/// "all_reduce(sum, 2 x f32, gradients, step 3, bucket 1) as call 17".
std::string describe(const CallHeader& header);

/// Empty when all ranks made the same call; else one sentence that is the same on every rank, naming the first two that
/// differ.
std::optional<std::string> find_difference(const std::vector<CallHeader>& headers, const std::string& group);

}  // namespace unisono

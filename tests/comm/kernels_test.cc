#include <gtest/gtest.h>

#include <cstring>

#include "comm/reduce_kernels.h"
#include "comm/reduce_kernels_isa.h"
#include "comm/reference.h"

namespace unisono::testing {
namespace {

std::vector<Isa> machine_isas() {
  std::vector<Isa> all = {Isa::baseline};
  if (best_isa() != Isa::baseline) all.push_back(best_isa());
  return all;
}

void expect_same(const Bytes& expected, const void* actual, Dtype dtype, const std::string& where) {
  const auto* bytes = static_cast<const unsigned char*>(actual);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(expected[i], bytes[i]) << where << ", element " << i / size_of(dtype) << ", byte " << i % size_of(dtype);
  }
}

std::vector<Bytes> inputs_of(Dtype dtype, std::size_t n, std::size_t count) {
  std::vector<Bytes> inputs;
  for (std::size_t r = 0; r < n; ++r) inputs.push_back(make_elements(dtype, count, 100 * count + r));
  return inputs;
}

void run_in_place(Isa isa, std::vector<Bytes>& ranks, std::size_t count, Dtype dtype, ReduceOp op, double divisor) {
  std::vector<const void*> in;
  std::vector<void*> out;
  for (Bytes& b : ranks) in.push_back(b.data()), out.push_back(b.data());
  tree_reduce_on(isa, in, out, count, dtype, op, divisor);
}

std::string label(Isa isa, Dtype dtype, ReduceOp op, std::size_t n, std::size_t count, double divisor) {
  return (isa == Isa::baseline ? "baseline " : "best ") + std::string(to_string(dtype)) + " " +
         std::string(to_string(op)) + " n=" + std::to_string(n) + " count=" + std::to_string(count) +
         " divisor=" + std::to_string(divisor);
}

class KernelGrid : public ::testing::TestWithParam<Dtype> {};

/// Every op, 1 to 9 inputs, odd counts, both in place and to one separate output: the bits of the recursive tree.
TEST_P(KernelGrid, BitsOfTheTree) {
  const Dtype dtype = GetParam();
  for (ReduceOp op : kOps) {
    if (op == ReduceOp::avg || !is_defined(op, dtype)) continue;
    for (std::size_t n = 1; n <= 9; ++n) {
      for (std::size_t count : {1ul, 3ul, 17ul, 129ul, 1025ul, 2051ul}) {
        if (n > 5 && count == 2051) continue;
        const std::vector<double> divisors = op == ReduceOp::sum && is_defined(ReduceOp::avg, dtype)
                                                 ? std::vector{1.0, 2.0, 3.0, 0.1, 0.0}
                                                 : std::vector{1.0};
        for (double divisor : divisors) {
          const auto inputs = inputs_of(dtype, n, count);
          const Bytes expected = reduce_reference(inputs, dtype, op, divisor);
          for (Isa isa : machine_isas()) {
            const std::string where = label(isa, dtype, op, n, count, divisor);
            auto ranks = inputs;
            run_in_place(isa, ranks, count, dtype, op, divisor);
            for (const Bytes& b : ranks) expect_same(expected, b.data(), dtype, where + " in place");
            std::vector<const void*> in;
            for (const Bytes& b : inputs) in.push_back(b.data());
            Bytes apart(expected.size() + 64, 0xab);
            void* out[] = {apart.data()};
            tree_reduce_on(isa, in, out, count, dtype, op, divisor);
            expect_same(expected, apart.data(), dtype, where + " apart");
            for (std::size_t i = expected.size(); i < apart.size(); ++i) ASSERT_EQ(0xab, apart[i]) << "past the end";
            if (::testing::Test::HasFatalFailure()) return;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Dtypes, KernelGrid, ::testing::ValuesIn(kDtypes),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(Kernels, ManyInputs) {
  for (std::size_t n : {16ul, 17ul, 33ul, 63ul, 100ul}) {
    const auto inputs = inputs_of(Dtype::f32, n, 1100);
    const Bytes expected = reduce_reference(inputs, Dtype::f32, ReduceOp::sum, 1);
    for (Isa isa : machine_isas()) {
      auto ranks = inputs;
      run_in_place(isa, ranks, 1100, Dtype::f32, ReduceOp::sum, 1);
      for (const Bytes& b : ranks) expect_same(expected, b.data(), Dtype::f32, "n=" + std::to_string(n));
    }
  }
}

/// The same elements cut in two at any place give the same bits: what slices over ranks rely on.
TEST(Kernels, SlicingDoesNotMatter) {
  const std::size_t count = 1500;
  for (Dtype dtype : kDtypes) {
    const auto inputs = inputs_of(dtype, 3, count);
    const Bytes expected = reduce_reference(inputs, dtype, ReduceOp::sum, 1);
    for (std::size_t cut : {1ul, 7ul, 64ul, 1023ul, 1024ul, 1499ul}) {
      auto ranks = inputs;
      for (auto [begin, n] : {std::pair{std::size_t{0}, cut}, std::pair{cut, count - cut}}) {
        std::vector<const void*> in;
        std::vector<void*> out;
        for (Bytes& b : ranks)
          in.push_back(b.data() + begin * size_of(dtype)), out.push_back(b.data() + begin * size_of(dtype));
        tree_reduce(in, out, n, dtype, ReduceOp::sum, 1);
      }
      for (const Bytes& b : ranks) expect_same(expected, b.data(), dtype, "cut at " + std::to_string(cut));
    }
  }
}

TEST(Kernels, OneInputWithoutDivisionIsACopy) {
  for (Dtype dtype : kDtypes) {
    const auto inputs = inputs_of(dtype, 1, 333);
    auto ranks = inputs;
    run_in_place(best_isa(), ranks, 333, dtype, ReduceOp::sum, 1);
    expect_same(inputs[0], ranks[0].data(), dtype, "in place");
  }
}

TEST(Kernels, NoElementsTouchNothing) {
  Bytes a(8, 1), b(8, 2);
  const void* in[] = {a.data(), b.data()};
  void* out[] = {a.data(), b.data()};
  for (double divisor : {1.0, 0.0}) tree_reduce(in, out, 0, Dtype::f32, ReduceOp::sum, divisor);
  EXPECT_EQ(Bytes(8, 1), a);
  EXPECT_EQ(Bytes(8, 2), b);
}

/// 1 and three times 2^-9: added one by one in bf16 nothing would remain of the small ones.
TEST(Kernels, Bf16AccumulatesInF32) {
  std::vector<std::uint16_t> values = {0x3f80, 0x3b00, 0x3b00, 0x3b00};
  std::vector<const void*> in;
  for (auto& v : values) in.push_back(&v);
  std::uint16_t result = 0;
  void* out[] = {&result};
  tree_reduce(in, out, 1, Dtype::bf16, ReduceOp::sum, 1);
  EXPECT_EQ(0x3f81, result);  // 1 + 3 x 2^-9 lies closer to 1 + 2^-7 than to 1
}

}  // namespace
}  // namespace unisono::testing

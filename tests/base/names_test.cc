#include <gtest/gtest.h>
#include <unisono/dtype.h>
#include <unisono/error.h>

#include <set>

#include "comm/reference.h"

namespace unisono::testing {
namespace {

TEST(Names, DtypesHaveSizesAndDistinctNames) {
  const std::vector<std::size_t> sizes = {4, 8, 2, 2, 1, 1, 4, 8, 1};
  std::set<std::string_view> names;
  for (std::size_t i = 0; i < kDtypes.size(); ++i) {
    EXPECT_EQ(sizes[i], size_of(kDtypes[i])) << to_string(kDtypes[i]);
    names.insert(to_string(kDtypes[i]));
  }
  EXPECT_EQ(kDtypes.size(), names.size());
  EXPECT_EQ("f32", to_string(Dtype::f32));
  EXPECT_EQ("bool", to_string(Dtype::boolean));
  EXPECT_EQ(0u, size_of(static_cast<Dtype>(77)));
}

TEST(Names, OpsAreDefinedWhereTheyMakeSense) {
  for (Dtype dtype : kDtypes) {
    const bool floating = dtype == Dtype::f32 || dtype == Dtype::f64 || dtype == Dtype::f16 || dtype == Dtype::bf16;
    for (ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
      EXPECT_TRUE(is_defined(op, dtype)) << to_string(op) << " " << to_string(dtype);
    }
    EXPECT_EQ(floating, is_defined(ReduceOp::avg, dtype)) << to_string(dtype);
    for (ReduceOp op : {ReduceOp::bit_and, ReduceOp::bit_or, ReduceOp::bit_xor}) {
      EXPECT_EQ(!floating, is_defined(op, dtype)) << to_string(op) << " " << to_string(dtype);
    }
  }
  EXPECT_FALSE(is_defined(ReduceOp::sum, static_cast<Dtype>(77)));
  EXPECT_FALSE(is_defined(static_cast<ReduceOp>(77), Dtype::f32));
}

TEST(Names, ErrorsCarryTheirCode) {
  const Error error(ErrorCode::peer_lost, "rank 1 is gone");
  EXPECT_EQ(ErrorCode::peer_lost, error.code());
  EXPECT_STREQ("rank 1 is gone", error.what());
  EXPECT_EQ("peer_lost", to_string(error.code()));
  EXPECT_EQ("timeout", to_string(ErrorCode::timeout));
}

}  // namespace
}  // namespace unisono::testing

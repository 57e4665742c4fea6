#include <gtest/gtest.h>
#include <unisono/error.h>

#include <numeric>

#include "reducer/bucket_plan.h"

namespace unisono {
namespace {

std::vector<std::size_t> reversed(std::size_t n) {
  std::vector<std::size_t> order(n);
  std::iota(order.rbegin(), order.rend(), std::size_t{0});
  return order;
}

TEST(BucketPlan, ClosesABucketWhenItsSizeReachesTheCap) {
  std::vector<GradientSpec> g(5, {.bytes = 40});
  const auto plan = plan_buckets(g, reversed(5), {80, 80});
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan[0].members, (std::vector<std::size_t>{4, 3}));
  EXPECT_EQ(plan[1].members, (std::vector<std::size_t>{2, 1}));
  EXPECT_EQ(plan[2].members, (std::vector<std::size_t>{0}));
  EXPECT_EQ(plan[0].offsets, (std::vector<std::size_t>{0, 64}));
  EXPECT_EQ(plan[0].bytes, 128u);
}

TEST(BucketPlan, CapZeroIsOneBucketPerGradient) {
  std::vector<GradientSpec> g(4, {.bytes = 4});
  EXPECT_EQ(plan_buckets(g, reversed(4), {0, 0}).size(), 4u);
}

TEST(BucketPlan, TheFirstBucketIsSmallOnlyWithoutAGivenCap) {
  const std::size_t mib = 1 << 20;
  EXPECT_EQ(BucketCaps::from({}).first, 1 * mib);
  EXPECT_EQ(BucketCaps::from({}).rest, 25 * mib);
  EXPECT_EQ(BucketCaps::from({.bucket_cap_mb = 25}).first, 25 * mib);
  EXPECT_EQ(BucketCaps::from({.bucket_cap_mb = 0.5}).rest, mib / 2);
  EXPECT_EQ(BucketCaps::from({.naive = true}).rest, 0u);
  EXPECT_THROW(BucketCaps::from({.bucket_cap_mb = -1}), Error);
  EXPECT_THROW(BucketCaps::from({.bucket_cap_mb = NAN}), Error);
}

TEST(BucketPlan, KeepsDtypesAndDevicesApartAndLaunchesByLastMember) {
  std::vector<GradientSpec> g{{.bytes = 40},
                              {.bytes = 40, .dtype = Dtype::f64},
                              {.bytes = 40},
                              {.bytes = 40, .device = {Device::Kind::cuda, 1}},
                              {.bytes = 40, .dtype = Dtype::f64}};
  const auto plan = plan_buckets(g, reversed(5), {1000, 1000});
  ASSERT_EQ(plan.size(), 3u);
  EXPECT_EQ(plan[0].members, (std::vector<std::size_t>{3}));
  EXPECT_EQ(plan[1].members, (std::vector<std::size_t>{4, 1}));
  EXPECT_EQ(plan[2].members, (std::vector<std::size_t>{2, 0}));
}

TEST(BucketPlan, TakesAnyOrder) {
  std::vector<GradientSpec> g(4, {.bytes = 64});
  const std::vector<std::size_t> order{1, 3, 0, 2};
  const auto plan = plan_buckets(g, order, {128, 128});
  ASSERT_EQ(plan.size(), 2u);
  EXPECT_EQ(plan[0].members, (std::vector<std::size_t>{1, 3}));
  EXPECT_EQ(plan[1].members, (std::vector<std::size_t>{0, 2}));
}

}  // namespace
}  // namespace unisono

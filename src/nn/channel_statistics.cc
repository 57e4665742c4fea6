#include "nn/channel_statistics.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <array>

namespace unisono {
namespace {

// Either channel after channel (N blocks of C runs of S values), or all channels of one place side by side (N * S rows
// of C).
struct Layout {
  std::int64_t batch;
  std::int64_t channels;
  std::int64_t places;
  bool side_by_side;

  explicit Layout(const at::Tensor& t)
      : batch(t.size(0)), channels(t.size(1)), places(1), side_by_side(t.dim() == 2 || !t.is_contiguous()) {
    for (std::int64_t d = 2; d < t.dim(); ++d) places *= t.size(d);
  }
  std::int64_t rows() const { return batch * places; }
  std::int64_t grain() const {
    return std::max<std::int64_t>(1, at::internal::GRAIN_SIZE / std::max<std::int64_t>(1, rows()));
  }
};

constexpr int kLanes = 8;  // independent sums, so that one addition need not wait for the one before

// Adds value(i, c), an array of K numbers, over the values of each channel. A channel is one thread's from end to end.
template <int K, typename F>
std::array<std::vector<double>, K> sum_channels(const Layout& l, const F& value) {
  std::array<std::vector<double>, K> sums;
  for (auto& s : sums) s.assign(static_cast<std::size_t>(l.channels), 0.0);
  at::parallel_for(0, l.channels, l.grain(), [&](std::int64_t begin, std::int64_t end) {
    if (l.side_by_side) {
      for (std::int64_t row = 0; row < l.rows(); ++row) {
        for (std::int64_t c = begin; c < end; ++c) {
          const std::array<double, K> v = value(row * l.channels + c, c);
          for (int k = 0; k < K; ++k) sums[k][static_cast<std::size_t>(c)] += v[k];
        }
      }
      return;
    }
    for (std::int64_t c = begin; c < end; ++c) {
      double lanes[K][kLanes] = {};
      for (std::int64_t n = 0; n < l.batch; ++n) {
        const std::int64_t first = (n * l.channels + c) * l.places;
        for (std::int64_t i = 0; i < l.places; ++i) {
          const std::array<double, K> v = value(first + i, c);
          for (int k = 0; k < K; ++k) lanes[k][i % kLanes] += v[k];
        }
      }
      for (int k = 0; k < K; ++k) {
        for (int width = kLanes / 2; width > 0; width /= 2) {
          for (int i = 0; i < width; ++i) lanes[k][i] += lanes[k][i + width];
        }
        sums[k][static_cast<std::size_t>(c)] = lanes[k][0];
      }
    }
  });
  return sums;
}

// Calls visit(i, c) for every value.
template <typename F>
void for_each_value(const Layout& l, const F& visit) {
  const std::int64_t runs = l.side_by_side ? l.rows() : l.batch * l.channels;
  const std::int64_t length = l.side_by_side ? l.channels : l.places;
  const std::int64_t grain = std::max<std::int64_t>(1, at::internal::GRAIN_SIZE / std::max<std::int64_t>(1, length));
  at::parallel_for(0, runs, grain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t run = begin; run < end; ++run) {
      for (std::int64_t i = 0; i < length; ++i) visit(run * length + i, l.side_by_side ? i : run % l.channels);
    }
  });
}

void combine_into(ChannelStatistics& a, const ChannelStatistics& b) {
  if (b.count == 0) return;
  if (a.count == 0) {
    a = b;
    return;
  }
  const double n = a.count + b.count;
  for (std::size_t c = 0; c < a.sum.size(); ++c) {
    const double distance = b.sum[c] / b.count - a.sum[c] / a.count;
    a.squares[c] += b.squares[c] + distance * distance * (a.count * b.count / n);
    a.sum[c] += b.sum[c];
  }
  a.count = n;
}

}  // namespace

std::vector<double> ChannelStatistics::pack() const {
  std::vector<double> words{count};
  words.insert(words.end(), sum.begin(), sum.end());
  words.insert(words.end(), squares.begin(), squares.end());
  return words;
}

ChannelStatistics ChannelStatistics::unpack(const double* words, std::int64_t channels) {
  const double* sums = words + 1;
  return {words[0], {sums, sums + channels}, {sums + channels, sums + 2 * channels}};
}

ChannelStatistics statistics_of(const at::Tensor& input) {
  const Layout layout(input);
  ChannelStatistics out;
  out.count = static_cast<double>(layout.rows());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "sync_batch_norm", [&] {
    const scalar_t* x = input.const_data_ptr<scalar_t>();
    out.sum = sum_channels<1>(
        layout, [x](std::int64_t i, std::int64_t) { return std::array<double, 1>{static_cast<double>(x[i])}; })[0];
    std::vector<double> mean = out.sum;
    for (double& m : mean) m /= std::max(out.count, 1.0);
    const double* means = mean.data();
    out.squares = sum_channels<1>(layout, [x, means](std::int64_t i, std::int64_t c) {
      const double distance = static_cast<double>(x[i]) - means[c];
      return std::array<double, 1>{distance * distance};
    })[0];
  });
  return out;
}

ChannelStatistics combined(std::vector<ChannelStatistics> parts) {
  for (std::size_t step = 1; step < parts.size(); step *= 2) {
    for (std::size_t i = 0; i + step < parts.size(); i += 2 * step) combine_into(parts[i], parts[i + step]);
  }
  return std::move(parts[0]);
}

std::pair<std::vector<double>, std::vector<double>> gradient_sums(const at::Tensor& gradient, const at::Tensor& input,
                                                                  const at::Tensor& mean) {
  std::pair<std::vector<double>, std::vector<double>> out;
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "sync_batch_norm_backward", [&] {
    using stat_t = at::opmath_type<scalar_t>;
    const scalar_t* x = input.const_data_ptr<scalar_t>();
    const scalar_t* dy = gradient.const_data_ptr<scalar_t>();
    const stat_t* means = mean.const_data_ptr<stat_t>();
    auto sums = sum_channels<2>(Layout(input), [=](std::int64_t i, std::int64_t c) {
      const double g = static_cast<double>(dy[i]);
      return std::array<double, 2>{g, g * (static_cast<double>(x[i]) - static_cast<double>(means[c]))};
    });
    out = {std::move(sums[0]), std::move(sums[1])};
  });
  return out;
}

at::Tensor input_gradient(const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& mean,
                          const at::Tensor& shift, const at::Tensor& slope, const at::Tensor& invstd,
                          const at::Tensor& weight) {
  at::Tensor result = at::empty_like(input);
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, input.scalar_type(), "sync_batch_norm_backward", [&] {
    using stat_t = at::opmath_type<scalar_t>;
    const scalar_t* x = input.const_data_ptr<scalar_t>();
    const scalar_t* dy = gradient.const_data_ptr<scalar_t>();
    const stat_t* m = mean.const_data_ptr<stat_t>();
    const stat_t* sh = shift.const_data_ptr<stat_t>();
    const stat_t* sl = slope.const_data_ptr<stat_t>();
    const stat_t* is = invstd.const_data_ptr<stat_t>();
    const stat_t* w = weight.const_data_ptr<stat_t>();
    scalar_t* dx = result.mutable_data_ptr<scalar_t>();
    for_each_value(Layout(input), [=](std::int64_t i, std::int64_t c) {
      const stat_t along = (static_cast<stat_t>(x[i]) - m[c]) * sl[c];
      dx[i] = static_cast<scalar_t>((static_cast<stat_t>(dy[i]) - sh[c] - along) * is[c] * w[c]);
    });
  });
  return result;
}

}  // namespace unisono

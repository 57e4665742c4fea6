#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <string>
#include <vector>

#include "differential/draw.h"

namespace unisono::differential {

/// What one node of a model does to the hidden state, a matrix of floats [2, width].
enum class Layer {
  linear,  // weight and, by `flag`, a bias
  shared,  // the weight of an earlier linear node once more
  branch,  // one of two weights, by a bit of the forward's mask
  scalar,  // a parameter without dimensions
  empty,   // a parameter without elements
  f64,     // a factor of that type, and so on
  bf16,
  f16,
  complex,
  transposed,     // a weight whose strides are those of a transpose
  channels_last,  // four dimensions; its gradient arrives in another layout
  checkpoint,     // a reentrant one: a backward runs inside the backward
  recheckpoint,   // the same over the weight of an earlier linear node, which then fires twice
  undefined,      // a function whose backward gives its parameter no gradient
  unused,         // a parameter that no forward touches
  frozen,         // requires no grad from the start
};
const char* name_of(Layer layer);

struct Node {
  Layer layer = Layer::linear;
  int of = -1;        // of a shared or recheckpoint node: the linear one it takes the weight from
  int gate = -1;      // the bit of the mask that lets it take part (of a branch: that chooses); -1: always
  bool flag = false;  // linear: with a bias; complex: conjugated
};

/// A chain with shared weights, skipped nodes and a side exit. The first and the last node are linear and never
/// skipped, so that every backward reaches a parameter.
struct ModelSpec {
  int width = 3;
  std::vector<Node> nodes;
  int exit = 0;  // the node after which the side loss is taken

  bool has(Layer layer) const;
  bool reentrant() const { return has(Layer::checkpoint) || has(Layer::recheckpoint); }
};
ModelSpec draw_model(Draw& draw);
std::string describe(const ModelSpec& spec);

/// One forward.
struct Call {
  std::uint64_t data = 0;
  std::uint32_t mask = ~0u;
  bool nan = false;            // the input is NaN
  int throw_in_forward = -1;   // after this node
  int throw_in_backward = -1;  // before the gradient passes into this node
  bool plain = false;          // checkpoints run as ordinary layers
};

/// What the throwing forwards and backwards throw.
inline constexpr const char* kOwnError = "the user's own error";

struct Losses {
  at::Tensor main;
  at::Tensor side;
};

class RandomModel : public torch::nn::Module {
 public:
  /// Values are drawn from `seed`.
  RandomModel(const ModelSpec& spec, std::uint64_t seed);
  std::vector<at::Tensor> forward(const Call& call);
  at::Tensor run(std::size_t node, const at::Tensor& hidden);
  /// Parameter indices of an `undefined` node were reached by a backward.
  bool reached_undefined = false;

 private:
  at::Tensor apply(std::size_t node, const at::Tensor& hidden, const Call& call);
  at::Tensor& add(std::size_t node, const char* name, at::Tensor value, bool requires_grad = true);

  ModelSpec spec_;
  Draw values_;
  std::vector<std::vector<at::Tensor>> own_;  // each node's parameters
};

/// Fills with numbers of -scale ... scale from `draw`, the same whatever the layout.
void fill(at::Tensor& tensor, Draw& draw, double scale);

/// Whether a backward of this call reaches a parameter's accumulator before it throws. `frozen`: indices in
/// registration order.
bool reaches_a_parameter(const ModelSpec& spec, const Call& call, bool side, const std::vector<bool>& frozen);

}  // namespace unisono::differential

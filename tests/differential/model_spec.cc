// Drawing and describing models.
#include <algorithm>
#include <array>

#include "differential/model.h"

namespace unisono::differential {
namespace {

constexpr std::array kNames = {"linear",       "shared",    "branch",  "scalar",     "empty",         "f64",
                               "bf16",         "f16",       "complex", "transposed", "channels_last", "checkpoint",
                               "recheckpoint", "undefined", "unused",  "frozen"};

}  // namespace

const char* name_of(Layer layer) { return kNames[static_cast<std::size_t>(layer)]; }

bool ModelSpec::has(Layer layer) const {
  return std::any_of(nodes.begin(), nodes.end(), [&](const Node& n) { return n.layer == layer; });
}

ModelSpec draw_model(Draw& draw) {
  ModelSpec spec;
  spec.width = 2 + draw.below(5);
  const int count = 2 + draw.below(8);
  const bool reentrant = draw.percent(30);
  std::vector<int> weights;  // nodes whose weight may be taken again
  for (int i = 0; i < count; ++i) {
    Node node;
    if (i > 0 && i + 1 < count) {
      node.layer = static_cast<Layer>(draw.below(static_cast<int>(kNames.size())));
      const bool checkpoint = node.layer == Layer::checkpoint || node.layer == Layer::recheckpoint;
      if (checkpoint && !reentrant) node.layer = Layer::linear;
      if (node.layer == Layer::shared || node.layer == Layer::recheckpoint) node.of = draw.of(weights);
      if (node.layer == Layer::branch || draw.percent(35)) node.gate = draw.below(6);
    }
    if (node.layer == Layer::linear || node.layer == Layer::complex) node.flag = draw.percent(50);
    if (node.layer == Layer::linear) weights.push_back(i);
    spec.nodes.push_back(node);
  }
  spec.exit = draw.below(count - 1);
  return spec;
}

std::string describe(const ModelSpec& spec) {
  std::string text = "width " + std::to_string(spec.width) + ", side exit after node " + std::to_string(spec.exit);
  for (std::size_t i = 0; i < spec.nodes.size(); ++i) {
    const Node& n = spec.nodes[i];
    text += "\n    node " + std::to_string(i) + ": " + name_of(n.layer);
    if (n.flag) text += n.layer == Layer::complex ? " of the conjugate" : " with bias";
    if (n.of >= 0) text += " of node " + std::to_string(n.of);
    if (n.gate >= 0) text += (n.layer == Layer::branch ? " by bit " : " when bit ") + std::to_string(n.gate);
  }
  return text;
}

}  // namespace unisono::differential

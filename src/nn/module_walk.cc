#include "nn/module_walk.h"

#include <torch/nn/modules/embedding.h>
#include <unisono/distributed_data_parallel.h>
#include <unisono/sync_batch_norm.h>

namespace unisono {
namespace {

// The module itself too, which modules() finds only where a shared_ptr owns it. `prefix`: "encoder.".
template <typename Layer, typename Visit>
void each_layer(Layer& module, const std::string& prefix, const Visit& visit) {
  visit(prefix, module);
  for (const auto& child : module.named_children()) {
    Layer& layer = *child.value();
    each_layer(layer, prefix + child.key() + ".", visit);
  }
}

}  // namespace

std::size_t parameters_key(const torch::nn::Module& module) {
  std::size_t key = 0;
  for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
    key = key * 1000003 + reinterpret_cast<std::size_t>(parameter.value().unsafeGetTensorImpl());
  }
  for (const auto& child : module.children()) key = key * 1000003 + parameters_key(*child);
  return key;
}

std::vector<std::string> sparse_parameters_of(const torch::nn::Module& module) {
  std::vector<std::string> names;
  each_layer(module, "", [&](const std::string& prefix, const torch::nn::Module& layer) {
    const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(&layer);
    const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(&layer);
    if ((embedding && embedding->options.sparse()) || (bag && bag->options.sparse()))
      names.push_back(prefix + "weight");
  });
  return names;
}

DistributedDataParallelOptions with_sparse_parameters(DistributedDataParallelOptions options,
                                                      const torch::nn::Module& module) {
  for (std::string& name : sparse_parameters_of(module)) options.sparse_parameters.push_back(std::move(name));
  return options;
}

void give_layers_group(torch::nn::Module& module, const ProcessGroup& from, const std::shared_ptr<ProcessGroup>& to) {
  each_layer(module, "", [&](const std::string&, torch::nn::Module& layer) {
    auto* norm = dynamic_cast<SyncBatchNormImpl*>(&layer);
    if (norm && norm->group().get() == &from) norm->set_group(to);
  });
}

}  // namespace unisono

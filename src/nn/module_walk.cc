#include "nn/module_walk.h"

#include <torch/nn/modules/embedding.h>
#include <unisono/distributed_data_parallel.h>

namespace unisono {

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
  for (const auto& entry : module.named_modules("", /*include_self=*/true)) {
    const torch::nn::Module* layer = entry.value().get();
    const auto* embedding = dynamic_cast<const torch::nn::EmbeddingImpl*>(layer);
    const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(layer);
    if ((embedding && embedding->options.sparse()) || (bag && bag->options.sparse())) {
      names.push_back(entry.key().empty() ? "weight" : entry.key() + ".weight");
    }
  }
  return names;
}

DistributedDataParallelOptions with_sparse_parameters(DistributedDataParallelOptions options,
                                                      const torch::nn::Module& module) {
  for (std::string& name : sparse_parameters_of(module)) options.sparse_parameters.push_back(std::move(name));
  return options;
}

}  // namespace unisono

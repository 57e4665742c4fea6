#include "nn/model_digest.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <sstream>

#include "base/kept_name.h"
#include "base/sha256.h"

namespace unisono {
namespace {

std::string join(at::IntArrayRef values) {
  std::string out = "[";
  for (std::size_t i = 0; i < values.size(); ++i) out += (i ? ", " : "") + std::to_string(values[i]);
  return out + "]";
}

std::string describe(const char* kind, std::size_t position, const NamedTensor& t) {
  std::string text = std::string(kind) + " " + std::to_string(position) + ": '" + t.name + "' ";
  if (!t.tensor.defined()) return text + "undefined";
  text += at::toString(t.tensor.scalar_type());
  text.append(" ").append(join(t.tensor.sizes()));
  if (t.tensor.layout() == at::kStrided) text += " strides " + join(t.tensor.strides());
  return text + (t.tensor.requires_grad() ? " requires grad" : " no grad");
}

std::string describe(const DistributedDataParallelOptions& o) {
  std::ostringstream text;
  text << std::boolalpha << "options: bucket_cap_mb ";
  if (o.bucket_cap_mb) {
    text << *o.bucket_cap_mb;
  } else {
    text << "default";
  }
  text << ", broadcast_buffers " << o.broadcast_buffers << ", init_sync " << o.init_sync << ", strict " << o.strict
       << ", naive " << o.naive << ", uneven_accumulation " << o.uneven_accumulation << ", buffer_policy "
       << (o.buffer_policy == BufferPolicy::mean ? "mean" : "rank0") << ", ignored";
  for (const std::string& name : o.parameters_and_buffers_to_ignore) text << " '" << name << "'";
  for (double cap : o.bucket_cap_mb_list) text << ", bucket cap " << cap;
  text << ", delayed";
  for (const std::string& name : o.delayed_parameters) text << " '" << name << "'";
  text << ", sparse";
  for (const std::string& name : o.sparse_parameters) text << " '" << name << "'";
  return text.str();
}

std::vector<std::string> split_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

}  // namespace

std::vector<std::string> describe_model(const std::vector<NamedTensor>& parameters,
                                        const std::vector<NamedTensor>& buffers,
                                        const DistributedDataParallelOptions& options) {
  std::vector<std::string> entries{describe(options)};
  for (std::size_t i = 0; i < parameters.size(); ++i) entries.push_back(describe("parameter", i, parameters[i]));
  for (std::size_t i = 0; i < buffers.size(); ++i) entries.push_back(describe("buffer", i, buffers[i]));
  return entries;
}

std::vector<std::string> gather_texts(const std::string& text, ProcessGroup& group, const char* what) {
  const auto world = static_cast<std::size_t>(group.size());
  CallOptions options;
  options.tag.what = what;
  std::int64_t length = static_cast<std::int64_t>(text.size());
  std::vector<std::int64_t> lengths(world);
  group.all_gather({lengths.data(), world, Dtype::i64}, {&length, 1, Dtype::i64}, options).wait();
  const auto longest = static_cast<std::size_t>(*std::max_element(lengths.begin(), lengths.end()));
  std::string mine = text;
  mine.resize(longest);
  std::string all(longest * world, '\0');
  group.all_gather({all.data(), all.size(), Dtype::u8}, {mine.data(), longest, Dtype::u8}, options).wait();
  std::vector<std::string> texts;
  for (std::size_t r = 0; r < world; ++r) {
    texts.push_back(all.substr(r * longest, static_cast<std::size_t>(lengths[r])));
  }
  return texts;
}

void require_same_entries(const std::vector<std::string>& entries, ProcessGroup& group, const std::string& whose,
                          const std::string& advice, std::size_t extra) {
  std::string text;
  for (const std::string& entry : entries) text += entry + "\n";
  const std::vector<std::string> texts = gather_texts(text, group, "description");
  const std::vector<std::string> first = split_lines(texts[0]);
  const auto line = [&](const std::vector<std::string>& lines, std::size_t i) {
    return i < lines.size() ? lines[i] : "nothing more (" + std::to_string(lines.size() - extra) + " tensors)";
  };
  for (std::size_t r = 1; r < texts.size(); ++r) {
    if (texts[r] == texts[0]) continue;
    const std::vector<std::string> other = split_lines(texts[r]);
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      const std::string a = line(first, i);
      const std::string b = line(other, i);
      if (a == b) continue;
      throw Error(ErrorCode::mismatch, "the " + whose + " of rank 0 and rank " + std::to_string(r) +
                                           " differ; the first difference: rank 0 has " + a + ", rank " +
                                           std::to_string(r) + " has " + b + ". " + advice);
    }
  }
}

void require_same_model(const std::vector<std::string>& entries, ProcessGroup& group, const char* what) {
  std::string text;
  for (const std::string& entry : entries) text += entry + "\n";
  Sha256 sha;
  sha.update(text.data(), text.size());
  const std::vector<std::string> digests = gather_texts(sha.hex(), group, what);
  if (std::all_of(digests.begin(), digests.end(), [&](const std::string& d) { return d == digests[0]; })) return;
  require_same_entries(entries, group, "modules", "Build the same module with the same options on every rank.", 1);
  throw Error(ErrorCode::internal, "model digests differ but descriptions do not; please report this");
}

const char* name_of_change(const std::string& parameter) { return kept_name("change of '" + parameter + "'"); }

std::string digest_of(const std::vector<NamedTensor>& parameters, const std::vector<NamedTensor>& buffers) {
  at::NoGradGuard no_grad;
  Sha256 sha;
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const NamedTensor& t : *tensors) {
      if (!t.tensor.defined()) continue;
      const at::Tensor bits = t.tensor.detach().cpu().contiguous();
      sha.update(bits.const_data_ptr(), bits.nbytes());
    }
  }
  return sha.hex();
}

}  // namespace unisono

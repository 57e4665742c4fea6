#include "comm/issuer/header_block.h"

#include <algorithm>

namespace unisono {

HeaderBlock::HeaderBlock(std::int64_t ended) : prefix_{ended, 0}, bytes_(kSize) { put(0, &prefix_, sizeof prefix_); }

bool HeaderBlock::add(CallHeader& header, const std::vector<std::uint64_t>& record) {
  const std::size_t record_bytes = record.size() * sizeof(record[0]);
  const bool fits = end_ + sizeof(CallHeader) + record_bytes <= kSize;
  if (!fits && prefix_.calls > 0) return false;
  header.record_follows = fits ? 0 : 1;
  put(end_, &header, sizeof header);
  end_ += sizeof header;
  if (fits && record_bytes > 0) {
    put(end_, record.data(), record_bytes);
    end_ += record_bytes;
  }
  ++prefix_.calls;
  put(0, &prefix_, sizeof prefix_);
  return true;
}

HeaderBlock::Read HeaderBlock::read(const std::uint8_t* bytes) {
  Prefix prefix;
  std::memcpy(&prefix, bytes, sizeof prefix);
  Read out{prefix.ended, {}, {}};
  std::size_t at = sizeof prefix;
  for (std::uint64_t call = 0; call < prefix.calls && at + sizeof(CallHeader) <= kSize; ++call) {
    CallHeader header;
    std::memcpy(&header, bytes + at, sizeof header);
    at += sizeof header;
    const std::size_t left = (kSize - at) / sizeof(std::uint64_t);
    const std::size_t words =
        header.record_follows ? 0 : std::min<std::size_t>(left, std::size_t{header.words} + header.sums);
    std::vector<std::uint64_t> record(words);
    if (words > 0) std::memcpy(record.data(), bytes + at, words * sizeof(record[0]));
    at += words * sizeof(record[0]);
    out.headers.push_back(header);
    out.records.push_back(std::move(record));
  }
  return out;
}

}  // namespace unisono

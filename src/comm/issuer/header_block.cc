#include "comm/issuer/header_block.h"

#include <algorithm>

#include "comm/issuer/short_call.h"

namespace unisono {

std::size_t HeaderBlock::size_with(const std::vector<std::size_t>& following, std::size_t room) {
  std::size_t size = kHeaders + padded(room);
  for (const std::size_t bytes : following) size += padded(bytes);
  return size;
}

HeaderBlock::HeaderBlock(std::int64_t ended, std::size_t size) : prefix_{ended, 0}, bytes_(size) {
  std::memcpy(bytes_.data(), &prefix_, sizeof prefix_);
}

void HeaderBlock::put(const void* from, std::size_t size) {
  if (size > 0) std::memcpy(bytes_.data() + end_, from, size);
  end_ += padded(size);
}

void HeaderBlock::follow(const void* data, std::size_t bytes) { put(data, bytes); }

bool HeaderBlock::add(CallHeader& header, const std::vector<std::uint64_t>& record, std::span<const std::byte> data) {
  const std::size_t record_bytes = record.size() * sizeof(record[0]), head = end_ + padded(sizeof header);
  const bool fits = head + padded(record_bytes) <= bytes_.size();
  if (!fits && prefix_.calls > 0) return false;
  header.record_follows = fits ? 0 : 1;
  header.data_comes =
      fits && !data.empty() && head + padded(record_bytes) + padded(data.size()) <= bytes_.size() ? 1 : 0;
  put(&header, sizeof header);
  if (fits) put(record.data(), record_bytes);
  if (header.data_comes != 0) put(data.data(), data.size());
  ++prefix_.calls;
  std::memcpy(bytes_.data(), &prefix_, sizeof prefix_);
  return true;
}

HeaderBlock::Read HeaderBlock::read(const std::uint8_t* bytes, std::size_t size,
                                    const std::vector<std::size_t>& following) {
  Prefix prefix;
  std::memcpy(&prefix, bytes, sizeof prefix);
  Read out;
  out.ended = prefix.ended;
  std::size_t at = sizeof prefix;
  for (const std::size_t length : following) {
    out.followed.push_back(bytes + at);
    at += padded(length);
  }
  for (std::uint64_t call = 0; call < prefix.calls && at + sizeof(CallHeader) <= size; ++call) {
    CallHeader header;
    std::memcpy(&header, bytes + at, sizeof header);
    at += padded(sizeof header);
    const std::size_t left = (size - std::min(size, at)) / sizeof(std::uint64_t);
    std::vector<std::uint64_t> record(
        header.record_follows != 0 ? 0 : std::min<std::size_t>(left, std::size_t{header.words} + header.sums));
    if (!record.empty()) std::memcpy(record.data(), bytes + at, record.size() * sizeof(record[0]));
    at += padded(record.size() * sizeof(record[0]));
    const std::size_t data =
        header.data_comes != 0 ? contribution_bytes(header.operation, header.count, header.dtype) : 0;
    out.data.push_back(data > 0 && data <= size && at <= size - data ? bytes + at : nullptr);
    at += padded(data);
    out.headers.push_back(header);
    out.records.push_back(std::move(record));
  }
  return out;
}

}  // namespace unisono

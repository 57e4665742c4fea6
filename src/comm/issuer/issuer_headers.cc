// Headers, records and short data: what ranks must know of each other's calls before data moves.
#include <algorithm>
#include <cstring>
#include <span>

#include "comm/issuer/issuer.h"

namespace unisono {

// Those of all calls that wait, as far as they fit; none when there is only data to send, or to say how many calls have
// ended here.
void Issuer::send_headers() {
  HeaderBlock block(order_.ended(), HeaderBlock::size_with(bytes_following(), short_.room()));
  for (const CallPtr& call : following_) block.follow(contribution(call->data), call->contribution_size());
  for (const CallPtr& call : waiting_) {
    call->header.words = static_cast<std::uint32_t>(call->record.words.size());
    call->header.sums = static_cast<std::uint32_t>(call->record.sums.size());
    std::span<const std::byte> data;
    if (short_.is_short(call->data))
      data = {static_cast<const std::byte*>(contribution(call->data)), call->contribution_size()};
    if (!block.add(call->header, pack(call->record), data)) break;
  }
  exchange_ = engine_->gather_bytes(block.bytes().data(), block.bytes().size(), subject_->left());
  listen(*exchange_);
}

void Issuer::read_headers() {
  const auto received = std::make_shared<const std::vector<std::uint8_t>>(exchange_->gathered());
  exchange_.reset();
  const auto following = bytes_following();
  const std::size_t size = HeaderBlock::size_with(following, short_.room());
  std::vector<HeaderBlock::Read> blocks;
  for (std::size_t at = 0; at < received->size(); at += size)
    blocks.push_back(HeaderBlock::read(received->data() + at, size, following));
  for (std::size_t i = 0; i < following.size(); ++i) {
    IssuedCall& call = *following_[i];
    call.received = received;
    for (const auto& block : blocks) call.given.push_back(block.followed[i]);
    finish(call);
  }
  following_.clear();
  read_calls(blocks, received);
}

std::vector<std::size_t> Issuer::bytes_following() const {
  std::vector<std::size_t> out;
  for (const CallPtr& call : following_) out.push_back(call->contribution_size());
  return out;
}

void Issuer::read_calls(const std::vector<HeaderBlock::Read>& blocks, const Received& received) {
  std::size_t made = waiting_.size();  // by all ranks
  std::int64_t ended = order_.ended();
  for (const auto& block : blocks) {
    made = std::min(made, block.headers.size());
    ended = std::min(ended, block.ended);
  }
  order_.learn(ended);
  std::size_t in_short_calls = 0;
  for (std::size_t i = 0; i < made; ++i) {
    const CallPtr call = waiting_.front();
    for (const auto& block : blocks) call->headers.push_back(block.headers[i]);
    if (auto difference = find_difference(call->headers, engine_->info().name)) {
      if (auto failure = posted_failure()) throw *failure;  // it met a call that a peer has given up
      throw Error(ErrorCode::mismatch, *difference);
    }
    last_entered_ = describe(call->header);
    if (call->header.record_follows == 0) {
      std::vector<ControlRecord> records;
      for (const auto& block : blocks) {
        records.push_back(unpack(block.records[i].data(), call->header.words, call->header.sums));
      }
      call->combined = combine(records);
    }
    if (short_.is_short(call->data)) in_short_calls += call->contribution_size();
    if (call->header.data_comes != 0) {
      call->received = received;
      for (const auto& block : blocks) call->given.push_back(block.data[i]);
    }
    call->phase = IssuedCall::Phase::agreed;
    agreed_.push_back(call);
    waiting_.pop_front();
  }
  short_.learn(in_short_calls);
}

// A short call whose data has come.
void Issuer::finish(IssuedCall& call) {
  finish_short(call.data, call.given, divisor_of(call));
  call.given.clear();
  call.received.reset();
  moved_ = IssuedCall::Clock::now();
  call.succeed(false, {});
}

// A record that did not come along with the header is gathered on its own. False while it is under way.
bool Issuer::know_record(IssuedCall& call) {
  if (call.header.record_follows == 0) return true;
  if (!call.op) {
    const auto packed = pack(call.record);
    call.op = engine_->gather_bytes(packed.data(), packed.size() * sizeof(packed[0]), call.left());
    listen(*call.op);
  }
  if (!ended(call, *call.op)) return false;
  const auto bytes = call.op->gathered();
  call.op.reset();
  const std::size_t length = std::size_t{call.header.words} + call.header.sums;
  std::vector<std::uint64_t> all(length * call.headers.size());
  std::memcpy(all.data(), bytes.data(), bytes.size());
  std::vector<ControlRecord> records;
  for (std::size_t rank = 0; rank < call.headers.size(); ++rank)
    records.push_back(unpack(all.data() + rank * length, call.header.words, call.header.sums));
  call.combined = combine(records);
  return true;
}

}  // namespace unisono

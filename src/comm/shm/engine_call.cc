#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "comm/shm/engine.h"
#include "comm/shm/fingerprint.h"
#include "comm/shm/records.h"

namespace unisono::shm {

// What a call goes through when all is well: lay down, enter, agree, combine the records, move the data.

namespace {

constexpr std::int64_t kGrace = 50'000'000;  // ns that a call which all have entered gets at least

}  // namespace

Fingerprint Engine::fingerprint_of(const Call& call) const {
  const Request& q = call.request_;
  Fingerprint f;
  f.sequence = call.sequence_;
  f.count = q.count;
  f.step = q.options.tag.step;
  f.bucket = q.options.tag.bucket;
  f.root = q.root;
  f.divide_by_sum = q.divide_by_sum;
  f.words = static_cast<std::uint32_t>(q.options.control.words.size());
  f.sums = static_cast<std::uint32_t>(q.options.control.sums.size());
  f.operation = q.operation;
  f.dtype = static_cast<std::uint8_t>(q.in.dtype);
  f.reduce_op = static_cast<std::uint8_t>(q.op);
  if (q.options.tag.what != nullptr) std::strncpy(f.what, q.options.tag.what, sizeof(f.what) - 1);
  return f;
}

// Everything the others must find once this rank has entered.
void Engine::lay_down(Call& call) {
  const Request& q = call.request_;
  Header& header = team_.segment.header(team_.rank, call.sequence_);
  header.fingerprint = fingerprint_of(call);
  header.withhold = q.options.withhold ? 1 : 0;

  Transfer& t = call.transfer_;
  t = {q.operation,
       static_cast<std::byte*>(q.out.data),
       static_cast<const std::byte*>(q.in.data),
       q.in.count,
       q.in.dtype,
       q.op == ReduceOp::avg ? ReduceOp::sum : q.op,
       q.op == ReduceOp::avg ? static_cast<double>(team_.size) : 1.0,
       q.root};
  if (t.scatters()) t.block /= static_cast<std::size_t>(team_.size);

  const std::size_t control = call.control_bytes();
  const std::size_t bytes = t.in_bytes(team_.size);
  const bool small = bytes <= small_capacity(control);
  if (!small && q.operation == Operation::all_reduce) call.place_ = allocations_->find(q.in.data, bytes);
  header.allocation = call.place_.allocation ? call.place_.allocation->id : 0;
  header.offset = call.place_.offset;
  if ((control > kInlineControl || (bytes > 0 && !call.place_.allocation)) && !reserve_staging()) return;
  if (q.operation == Operation::allocate) {
    std::memcpy(header.control, &q.card, sizeof(q.card));
  } else if (control > 0 && control <= kSlotBytes) {
    auto* area = slot_area(team_.staging[static_cast<std::size_t>(team_.rank)], call.sequence_);
    write_record(q.options.control, control <= kInlineControl ? header.control : area);
  }
  if (small && bytes > 0 && !q.options.withhold) lay_down_small(team_, call.sequence_, t, control);
  header.entered_ns = call.issued_ns_;
}

bool Engine::reserve_staging() {
  if (staging_reserved_) return true;
  auto& own = *attachment_.staging[static_cast<std::size_t>(team_.rank)];
  staging_reserved_ = own.reserve();
  if (!staging_reserved_) {
    fail(ErrorCode::invalid_argument,
         "group " + name_ + ", rank " + std::to_string(team_.rank) + ": no memory is left for " +
             std::to_string(kStagingBytes) + " bytes of staging memory",
         next_to_enter_);
  }
  own.close_descriptor();
  return staging_reserved_;
}

// All have entered: compare the fingerprints, combine the records, choose the path.
void Engine::agree(Call& call) {
  if (auto difference = find_mismatch(team_.segment, call.sequence_, name_)) {
    fail_head(Error(ErrorCode::mismatch, *difference));
    return;
  }
  call.deadline_ns_ = std::max(call.deadline_ns_, now_ns() + kGrace);
  call.stage_ = Stage::moving;
  call.arrivals_.reserve(static_cast<std::size_t>(team_.size));
  for (int r = 0; r < team_.size; ++r) {
    const Header& header = team_.segment.header(r, call.sequence_);
    call.arrivals_.push_back(header.entered_ns);
    call.withheld_ |= header.withhold != 0;
    if (call.request_.operation == Operation::allocate)
      std::memcpy(&call.cards_.emplace_back(), header.control, sizeof(AllocationCard));
  }
  plan_records(call);
}

void Engine::plan_records(Call& call) {
  const std::size_t bytes = call.control_bytes();
  if (bytes == 0) return plan_data(call);
  if (bytes <= kSlotBytes) {
    std::vector<const std::byte*> records;
    for (int r = 0; r < team_.size; ++r) {
      records.push_back(bytes <= kInlineControl
                            ? team_.segment.header(r, call.sequence_).control
                            : slot_area(team_.staging[static_cast<std::size_t>(r)], call.sequence_));
    }
    call.combined_ = combine_records(records, call.request_.options.control);
    return plan_data(call);
  }
  // Too large for a slot area: gathered in rounds first. The last record's place holds this rank's own to send.
  const auto n = static_cast<std::size_t>(team_.size);
  call.records_.resize((n + 1) * bytes);
  write_record(call.request_.options.control, call.records_.data() + n * bytes);
  call.path_ = Path::gather_records;
  Transfer t;
  t.operation = Operation::all_gather;
  t.out = call.records_.data();
  t.in = call.records_.data() + n * bytes;
  t.block = bytes;
  call.rounds_.emplace(team_, t, rounds_made_);
}

void Engine::plan_data(Call& call) {
  Transfer& t = call.transfer_;
  if (call.request_.divide_by_sum >= 0) {
    t.divisor = call.combined_.sums[static_cast<std::size_t>(call.request_.divide_by_sum)];
  }
  plan_path(call);
  if (call.path_ == Path::rounds) call.rounds_.emplace(team_, t, rounds_made_);
}

void Engine::plan_path(Call& call) {
  const Transfer& t = call.transfer_;
  call.path_ = Path::small;
  if (call.withheld_ || t.in_bytes(team_.size) <= small_capacity(call.control_bytes())) return;
  call.path_ = Path::in_place;
  const Header& first = team_.segment.header(0, call.sequence_);
  for (int r = 0; r < team_.size; ++r) {
    const Header& header = team_.segment.header(r, call.sequence_);
    const bool same = header.allocation == first.allocation && header.offset == first.offset;
    if (!same || header.allocation == 0 || header.offset % size_of(t.dtype) != 0) call.path_ = Path::rounds;
  }
}

// In place, peers write into each other's memory: only after it is sure that none of them has given up before.
bool Engine::ready_to_write(std::uint64_t sequence) const {
  for (int r = 0; sequence > 0 && r < team_.size; ++r) {
    if (!ended_well(team_.segment.words(r).done.load(), sequence - 1)) return false;
  }
  return true;
}

bool Engine::move_data(Call& call, Lock& lock) {
  const bool in_place = call.path_ == Path::in_place;
  if (in_place && !ready_to_write(call.sequence_)) return false;
  if (call.rounds_ && !reserve_staging()) return false;
  const Transfer& t = call.transfer_;
  busy_ = true;
  lock.unlock();
  bool moved = true;
  bool complete = true;
  if (call.rounds_) {
    moved = call.rounds_->run();
    complete = call.rounds_->complete();
  } else if (in_place) {
    std::vector<std::byte*> copies;
    for (const auto& copy : call.place_.allocation->copies) copies.push_back(copy->data() + call.place_.offset);
    reduce_in_place(team_, t, copies, call.place_.offset % kLine);
  } else if (!call.withheld_) {
    take_small(team_, call.sequence_, t, call.control_bytes());
  }
  lock.lock();
  busy_ = false;
  if (!complete) return moved;
  if (call.rounds_) rounds_made_ += call.rounds_->rounds();
  call.rounds_.reset();
  if (call.path_ == Path::gather_records) {
    std::vector<const std::byte*> records;
    for (int r = 0; r < team_.size; ++r)
      records.push_back(call.records_.data() + static_cast<std::size_t>(r) * call.control_bytes());
    call.combined_ = combine_records(records, call.request_.options.control);
    plan_data(call);
    return true;
  }
  publish_done(call.sequence_, false);
  if (in_place) {
    call.stage_ = Stage::finishing;
  } else {
    retire(call, nullptr);
  }
  return true;
}

}  // namespace unisono::shm

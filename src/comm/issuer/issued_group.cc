#include "comm/issuer/issued_group.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "comm/arguments.h"

namespace unisono {
namespace {

// Null where there is not so much.
std::shared_ptr<void> zeroed_pages(std::size_t bytes) {
  void* const pages = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) return nullptr;
  return {pages, [bytes](void* memory) { munmap(memory, bytes); }};
}

}  // namespace

IssuedGroup::IssuedGroup(std::unique_ptr<Engine> engine)
    : ProcessGroup(engine->info().rank, engine->info().size, engine->info().name, engine->info().timeout),
      issuer_(std::make_unique<Issuer>(
          std::move(engine), [name = name(), rank = rank(), size = size()](const IssuedCall& call) {
            return describe_call(Member{name, rank, size}, to_string(call.header.operation), call.header.sequence,
                                 call.tag);
          })) {}

IssuedGroup::~IssuedGroup() {
  if (mark_.forked()) {
    issuer_.release();  // leaked on purpose
  } else if (issuer_->is_this_thread()) {
    std::thread([issuer = std::move(issuer_)]() mutable { issuer.reset(); }).detach();
  }
}

Device::Kind IssuedGroup::served(const Buffer& buffer) const {
  if (issuer_->engine().serves(buffer.device.kind)) return buffer.device.kind;
  return buffer.device.kind == Device::Kind::cpu ? Device::Kind::cuda : Device::Kind::cpu;
}

Work IssuedGroup::submit(DataCall data, std::size_t count, const CallOptions& options, int divide_by_sum) {
  check_not_forked(*this, mark_);
  auto call = std::make_shared<IssuedCall>();
  call->header.operation = data.operation;
  call->header.count = count;
  call->header.dtype = data.out.dtype;
  call->header.op = data.op;
  call->header.device = data.out.device.kind;
  call->header.root = data.root;
  call->header.divide_by_sum = divide_by_sum;
  call->header.may_round = data.may_round ? 1 : 0;
  call->header.step = options.tag.step;
  call->header.bucket = options.tag.bucket;
  call->header.priority = options.priority;
  call->header.withhold = options.withhold ? 1 : 0;
  if (options.tag.what) std::strncpy(call->header.what.data(), options.tag.what, call->header.what.size() - 1);
  call->record = options.control;
  call->tag = options.tag;
  call->timeout = bounded(options.timeout.count() > 0 ? options.timeout : timeout());
  call->deadline = deadline_after(call->timeout);
  call->inputs_ready = issuer_->engine().fence(data.out.device);
  call->data = std::move(data);
  issuer_->submit(call);
  return Work(std::move(call));
}

Work IssuedGroup::all_reduce(Buffer data, const AllReduceOptions& options) {
  check_all_reduce(*this, data, options, served(data));
  const auto count = data.count;
  return submit({Operation::all_reduce, std::move(data), {}, options.op, 0, options.may_round}, count, options,
                options.divide_by_sum);
}

Work IssuedGroup::broadcast(Buffer data, int root, const CallOptions& options) {
  check_broadcast(*this, data, root, options, served(data));
  const auto count = data.count;
  return submit({Operation::broadcast, std::move(data), {}, ReduceOp::sum, root}, count, options);
}

Work IssuedGroup::all_gather(Buffer out, Buffer in, const CallOptions& options) {
  check_all_gather(*this, out, in, options, served(out));
  const auto count = in.count;
  return submit({Operation::all_gather, std::move(out), std::move(in)}, count, options);
}

Work IssuedGroup::reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) {
  check_reduce_scatter(*this, out, in, options, served(out));
  const auto count = out.count;
  return submit({Operation::reduce_scatter, std::move(out), std::move(in), options.op}, count, options,
                options.divide_by_sum);
}

Work IssuedGroup::all_to_all(Buffer out, Buffer in, const CallOptions& options) {
  check_all_to_all(*this, out, in, options, served(out));
  const auto count = in.count;
  return submit({Operation::all_to_all, std::move(out), std::move(in)}, count, options);
}

Work IssuedGroup::barrier(const CallOptions& options) {
  check_barrier(*this, options);
  return submit({Operation::barrier, {}, {}}, 0, options);
}

// Plain memory: no engine reduces better from any other. The exchange makes a failure of one rank everybody's.
Buffer IssuedGroup::allocate(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  const std::size_t rounded = std::max(kPage, (bytes + kPage - 1) / kPage * kPage);
  const auto memory = rounded >= bytes ? zeroed_pages(rounded) : nullptr;
  CallOptions options;
  options.control.words = {memory ? 0u : 1u};
  auto work = submit({Operation::allocate, {}, {}}, bytes, options);
  work.wait();
  if (work.control().words[0] != 0)
    throw Error(ErrorCode::invalid_argument,
                describe_call(*this, "allocate", -1) + ": " + std::to_string(bytes) + " bytes are not to be had on " +
                    (memory ? "another rank" : "this rank") + "; use fewer or smaller buckets");
  return {memory.get(), bytes, Dtype::u8, {}, memory};
}

void IssuedGroup::abort(const Error& cause) { issuer_->poison(cause); }

}  // namespace unisono

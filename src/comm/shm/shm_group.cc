#include "comm/shm/shm_group.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/time_budget.h"
#include "comm/arguments.h"
#include "comm/rendezvous.h"
#include "comm/shm/engine.h"
#include "comm/shm/mailbox.h"
#include "comm/shm/room.h"
#include "comm/stored_group.h"

namespace unisono {
namespace {

using shm::Allocation;
using shm::AllocationCard;
using shm::Mail;
using shm::Mapping;
using shm::Operation;
using shm::Request;

class ShmGroup final : public StoredGroup, public PointToPoint {
 public:
  ShmGroup(const GroupOptions& options, const std::string& place, std::shared_ptr<shm::Engine> engine,
           std::shared_ptr<shm::Mailbox> mailbox)
      : StoredGroup(options, "shm", place), engine_(std::move(engine)), mailbox_(std::move(mailbox)) {}
  // A forked child leaves the group to its parent: it leaks what it has, whose threads and locks are not its own.
  ~ShmGroup() override {
    if (mark_.forked()) {
      new auto(std::move(engine_));
      new auto(std::move(mailbox_));
      return;
    }
    mailbox_->close();
    engine_->close();
  }

  Work all_reduce(Buffer data, const AllReduceOptions& options) override {
    check_all_reduce(*this, data, options);
    const std::size_t count = data.count;
    return issue(
        {Operation::all_reduce, data, data, count, options.op, options.divide_by_sum, 0, with_deadline(options)});
  }

  Work broadcast(Buffer data, int root, const CallOptions& options) override {
    check_broadcast(*this, data, root, options);
    const std::size_t count = data.count;
    return issue({Operation::broadcast, data, data, count, ReduceOp::sum, -1, root, with_deadline(options)});
  }

  Work all_gather(Buffer out, Buffer in, const CallOptions& options) override {
    check_all_gather(*this, out, in, options);
    const std::size_t count = in.count;
    return issue(
        {Operation::all_gather, std::move(out), std::move(in), count, ReduceOp::sum, -1, 0, with_deadline(options)});
  }

  Work reduce_scatter(Buffer out, Buffer in, const AllReduceOptions& options) override {
    check_reduce_scatter(*this, out, in, options);
    const std::size_t count = in.count;
    return issue({Operation::reduce_scatter, std::move(out), std::move(in), count, options.op, options.divide_by_sum, 0,
                  with_deadline(options)});
  }

  Work all_to_all(Buffer out, Buffer in, const CallOptions& options) override {
    check_all_to_all(*this, out, in, options);
    const std::size_t count = in.count;
    return issue(
        {Operation::all_to_all, std::move(out), std::move(in), count, ReduceOp::sum, -1, 0, with_deadline(options)});
  }

  Work barrier(const CallOptions& options) override {
    check_barrier(*this, options);
    return issue({Operation::barrier, {}, {}, 0, ReduceOp::sum, -1, 0, with_deadline(options)});
  }

  Buffer allocate(std::size_t bytes) override;

  void abort(const Error& cause) override {
    if (!mark_.forked()) engine_->abort(cause);
  }
  std::vector<int> lost() const override { return engine_->lost(); }

  std::shared_ptr<Message> send(Buffer data, int to, std::int64_t tag, std::chrono::nanoseconds timeout) override {
    check_message(*this, "send", data, to, false, timeout);
    return post(Mail::Direction::send, std::move(data), to, tag, timeout);
  }
  std::shared_ptr<Message> receive(Buffer data, int from, std::int64_t tag, std::chrono::nanoseconds timeout) override {
    check_message(*this, "receive", data, from, true, timeout);
    return post(Mail::Direction::receive, std::move(data), from, tag, timeout);
  }

 private:
  CallOptions with_deadline(const CallOptions& options) const {
    CallOptions out = options;
    if (out.timeout.count() == 0) out.timeout = timeout();
    return out;
  }
  std::shared_ptr<Message> post(Mail::Direction direction, Buffer data, int peer, std::int64_t tag,
                                std::chrono::nanoseconds limit) {
    check_not_forked(*this, mark_);
    if (limit.count() == 0) limit = timeout();
    return mailbox_->submit(std::make_shared<Mail>(mailbox_, direction, std::move(data), peer, tag, limit));
  }
  Work issue(Request request) {
    check_not_forked(*this, mark_);
    return Work(engine_->issue(std::move(request)));
  }

  std::vector<AllocationCard> exchange(std::size_t bytes, const AllocationCard& card);
  void check_room(std::size_t bytes);
  void throw_if_any_failed(std::size_t bytes, const std::vector<AllocationCard>& cards) const;
  [[noreturn]] void refuse(std::size_t bytes, const std::string& why) const;

  std::shared_ptr<shm::Engine> engine_;
  std::shared_ptr<shm::Mailbox> mailbox_;
  ForkMark mark_;
};

void set_text(AllocationCard& card, const std::string& text) {
  std::strncpy(card.text, text.c_str(), sizeof(card.text) - 1);
}

std::vector<AllocationCard> ShmGroup::exchange(std::size_t bytes, const AllocationCard& card) {
  check_not_forked(*this, mark_);
  auto call = engine_->issue({Operation::allocate, {}, {}, bytes, ReduceOp::sum, -1, 0, with_deadline({}), card});
  call->wait();
  if (auto error = call->error()) std::rethrow_exception(error);
  return call->cards();
}

void ShmGroup::refuse(std::size_t bytes, const std::string& why) const {
  throw Error(ErrorCode::invalid_argument, "group " + name() + ", allocate of " + std::to_string(bytes) +
                                               " bytes on each of " + std::to_string(size()) + " ranks: " + why);
}

// Every rank tells its room before any takes memory, so all decide alike; the ranks share the host's.
void ShmGroup::check_room(std::size_t bytes) {
  const auto ranks = static_cast<std::uint64_t>(size());
  const shm::Room host = shm::room_of_host();
  const shm::Room own = shm::room_of_process();
  const bool own_is_less = own.bytes < host.bytes / ranks;
  AllocationCard card;
  card.room = own_is_less ? own.bytes : host.bytes / ranks;
  set_text(card, own_is_less ? own.limit : host.limit);
  const auto cards = exchange(bytes, card);
  for (std::size_t r = 0; r < cards.size(); ++r) {
    if (bytes <= cards[r].room) continue;
    refuse(bytes, "on rank " + std::to_string(r) + ", " + cards[r].text + " leaves room for " +
                      std::to_string(cards[r].room) + " bytes a rank");
  }
}

void ShmGroup::throw_if_any_failed(std::size_t bytes, const std::vector<AllocationCard>& cards) const {
  for (std::size_t r = 0; r < cards.size(); ++r) {
    if (cards[r].failed) refuse(bytes, "rank " + std::to_string(r) + ": " + cards[r].text);
  }
}

Buffer ShmGroup::allocate(std::size_t bytes) {
  check_room(bytes);
  std::shared_ptr<Mapping> own;
  AllocationCard card;
  try {
    own = Mapping::create(bytes);
    if (!own->reserve())
      throw Error(ErrorCode::invalid_argument, std::string("reserving memory: ") + std::strerror(errno));
    own->populate();
    card.fd = own->fd();
    card.mapping = own->id();
  } catch (const Error& e) {
    card.failed = 1;
    set_text(card, e.what());
  }
  const auto cards = exchange(bytes, card);
  auto allocation = std::make_shared<Allocation>();
  AllocationCard mapped;
  try {
    throw_if_any_failed(bytes, cards);
    for (int r = 0; r < size(); ++r) {
      const auto& theirs = cards[static_cast<std::size_t>(r)];
      allocation->copies.push_back(engine_->peers().is_here(r)
                                       ? Mapping::find(theirs.mapping)
                                       : Mapping::open(engine_->peers().process(r), theirs.fd, bytes));
      if (!allocation->copies.back()) throw Error(ErrorCode::peer_lost, "rank " + std::to_string(r) + " has given up");
    }
  } catch (const Error& e) {
    mapped.failed = 1;
    set_text(mapped, e.what());
  }
  const auto results = exchange(bytes, mapped);
  throw_if_any_failed(bytes, cards);
  throw_if_any_failed(bytes, results);
  own->close_descriptor();
  allocation->id = engine_->new_allocation_id();
  allocation->rank = rank();
  allocation->registry = engine_->allocations();
  engine_->allocations()->add(allocation);
  return {.data = own->data(), .count = bytes, .dtype = Dtype::u8, .owner = allocation};
}

}  // namespace

std::string why_not_shm(const GroupOptions& options) {
  if (options.size > shm::kMaxRanks) {
    return "it serves at most " + std::to_string(shm::kMaxRanks) + " ranks of one host, not " +
           std::to_string(options.size);
  }
  if (options.size > 1 && !options.store)
    return "a group of several ranks needs a store to meet in (GroupOptions::store)";
  const int pidfd = static_cast<int>(syscall(SYS_pidfd_open, getpid(), 0u));
  if (pidfd < 0) return std::string("pidfd_open: ") + std::strerror(errno) + " (Linux 5.3 or newer is needed)";
  close(pidfd);
  const int memfd = memfd_create("unisono-probe", MFD_CLOEXEC);
  if (memfd < 0) return std::string("memfd_create: ") + std::strerror(errno);
  const std::string path = "/proc/self/fd/" + std::to_string(memfd);
  const bool readable = access(path.c_str(), R_OK | W_OK) == 0;
  close(memfd);
  return readable ? "" : "/proc is not mounted or not readable; ranks open each other's memory through it";
}

std::shared_ptr<ProcessGroup> make_shm_group(const GroupOptions& options, const ShmOptions& shm_options) {
  if (const std::string reason = why_not_shm(options); !reason.empty()) {
    throw Error(ErrorCode::invalid_argument, "unisono shm group, rank " + std::to_string(options.rank) + " of " +
                                                 std::to_string(options.size) + ": " + reason);
  }
  GroupOptions joined = options;
  if (options.store) {
    const TimeBudget time(options.start_timeout);
    joined.prefix = join_round(*options.store, options.rank, options.size, options.prefix, options.start_timeout);
    joined.start_timeout = time.left();
  }
  const shm::Attachment attachment = shm::attach(joined);
  auto engine = std::make_shared<shm::Engine>("shm", options.rank, attachment, shm_options.eager_progress);
  engine->start();
  return std::make_shared<ShmGroup>(options, options.store ? joined.prefix : "", std::move(engine),
                                    std::make_shared<shm::Mailbox>("shm", options.rank, attachment));
}

}  // namespace unisono

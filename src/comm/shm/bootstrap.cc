#include "comm/shm/bootstrap.h"

#include <algorithm>
#include <new>
#include <optional>
#include <sstream>

#include "base/clock.h"
#include "comm/shm/cause.h"
#include "comm/shm/event.h"
#include "comm/shm/inbox.h"
#include "comm/shm/layout.h"
#include "comm/shm/peers.h"
#include "comm/shm/room.h"

namespace unisono::shm {
namespace {

// The ranks have met in a round (see comm/rendezvous.h), whose keys nobody else uses. Each writes a *card* to
// `card/RANK`: who it is and where its memory lies, or why it cannot start; everybody who still waits reads that there.

constexpr std::chrono::milliseconds kSlice{50};

struct Card {
  std::string failure;  ///< empty: ready
  int size = 0;
  ProcessIdentity process;
  int control_fd = -1;
  int staging_fd = -1;
  int inbox_fd = -1;
  // Mapping::id(), for ranks that are threads of one process.
  std::uint64_t control = 0;
  std::uint64_t staging = 0;
  std::uint64_t inbox = 0;
};

std::string write(const Card& c) {
  std::ostringstream out;
  out << c.process.to_string() << '\n'
      << c.size << ' ' << c.control_fd << ' ' << c.staging_fd << ' ' << c.inbox_fd << ' ' << c.control << ' '
      << c.staging << ' ' << c.inbox << '\n'
      << c.failure;
  return out.str();
}

Card read(const std::string& text) {
  std::istringstream in(text);
  std::string line;
  std::getline(in, line);
  Card c;
  c.process = ProcessIdentity::parse(line);
  in >> c.size >> c.control_fd >> c.staging_fd >> c.inbox_fd >> c.control >> c.staging >> c.inbox;
  in.ignore();
  std::getline(in, c.failure);
  return c;
}

class Bootstrap {
 public:
  explicit Bootstrap(const GroupOptions& options)
      : options_(options),
        deadline_ns_(now_ns() + bounded(options.start_timeout).count()),
        cards_(static_cast<std::size_t>(options.size)) {}

  Attachment run() {
    if (!options_.store) return run_alone();
    mine_.size = options_.size;
    mine_.process = ProcessIdentity::self();
    try {
      make_own_memory();
    } catch (const Error& e) {
      mine_.failure = e.what();
      options_.store->set(key(options_.rank), write(mine_));
      throw;
    }
    options_.store->set(key(options_.rank), write(mine_));
    gather_cards();
    return map_all();
  }

 private:
  // A world of one meets nobody.
  Attachment run_alone() {
    mine_.size = options_.size;
    mine_.process = ProcessIdentity::self();
    make_own_memory();
    cards_[0] = mine_;
    return map_all();
  }

  std::string key(int rank) const { return options_.prefix + "/shm/card/" + std::to_string(rank); }
  std::string here() const {
    return "unisono shm group, rank " + std::to_string(options_.rank) + " of " + std::to_string(options_.size) +
           ", start: ";
  }

  void make_own_memory() {
    const Room room = room_of_process();
    const std::uint64_t needed =
        std::max({ControlSegment::bytes(options_.size), kStagingBytes, Inbox::bytes(options_.size)});
    if (needed > room.bytes) {
      throw Error(ErrorCode::invalid_argument, here() + "a rank needs files of " + std::to_string(needed) +
                                                   " bytes and " + room.limit + " leaves " +
                                                   std::to_string(room.bytes));
    }
    if (options_.rank == 0) {
      control_ = Mapping::create(ControlSegment::bytes(options_.size));
      if (!control_->reserve())
        throw Error(ErrorCode::invalid_argument, here() + "no memory is left for the control segment");
      auto* head = new (control_->data()) SegmentHead();
      head->size = static_cast<std::uint32_t>(options_.size);
      head->magic = kMagic;
      mine_.control_fd = control_->fd();
      mine_.control = control_->id();
    }
    staging_ = Mapping::create(kStagingBytes);
    mine_.staging_fd = staging_->fd();
    mine_.staging = staging_->id();
    inbox_ = Mapping::create(Inbox::bytes(options_.size));
    if (!inbox_->reserve(Inbox::front_bytes(options_.size)))
      throw Error(ErrorCode::invalid_argument, here() + "no memory is left for the inbox");
    mine_.inbox_fd = inbox_->fd();
    mine_.inbox = inbox_->id();
  }

  // Looks at the card of `rank`, waiting at most `patience` for it. Throws when it tells of a failure.
  void look_for(int rank, std::chrono::nanoseconds patience) {
    const auto text = options_.store->get(key(rank), patience);
    if (!text) return;
    const Card c = read(*text);
    if (!c.failure.empty()) {
      throw Error(ErrorCode::invalid_argument,
                  here() + "rank " + std::to_string(rank) + ", " + c.process.shown() + ", cannot start: " + c.failure);
    }
    check_neighbour(rank, c);
    cards_[static_cast<std::size_t>(rank)] = c;
  }

  void check_neighbour(int rank, const Card& c) const {
    const std::string who = "rank " + std::to_string(rank) + ", " + c.process.shown() + ", ";
    if (c.process.place != mine_.process.place) {
      throw Error(ErrorCode::invalid_argument, here() + who + "runs on another host or in another pid namespace than " +
                                                   mine_.process.shown() +
                                                   "; shared memory serves ranks of one host only");
    }
    if (c.size != options_.size) {
      throw Error(ErrorCode::invalid_argument, here() + who + "says there are " + std::to_string(c.size) +
                                                   " ranks, and this rank says " + std::to_string(options_.size));
    }
  }

  void gather_cards() {
    std::vector<int> missing;
    do {
      missing.clear();
      for (int r = 0; r < options_.size; ++r) {
        if (!cards_[static_cast<std::size_t>(r)]) look_for(r, missing.empty() ? kSlice : std::chrono::milliseconds(1));
        if (!cards_[static_cast<std::size_t>(r)]) missing.push_back(r);
      }
      if (!missing.empty() && now_ns() > deadline_ns_) fail_missing(missing);
    } while (!missing.empty());
  }

  [[noreturn]] void fail_missing(const std::vector<int>& ranks) const {
    std::string list;
    for (const int r : ranks) list += (list.empty() ? "" : ", ") + std::to_string(r);
    throw Error(ErrorCode::timeout, here() + (ranks.size() == 1 ? "rank " : "ranks ") + list +
                                        " came and then did not show memory within " +
                                        std::to_string(options_.start_timeout.count() / 1'000'000) +
                                        " ms. Look there for an error.");
  }

  std::shared_ptr<Mapping> map_one(const Card& c, std::uint64_t id, int fd, std::size_t bytes) const {
    if (!(c.process == mine_.process)) return Mapping::open(c.process, fd, bytes);
    if (auto mapping = Mapping::find(id)) return mapping;
    throw Error(ErrorCode::peer_lost, here() +
                                          "a rank that is a thread of this process gave up while the ranks were "
                                          "starting. Look for its error");
  }

  Attachment map_all() {
    Attachment out;
    const Card& zero = *cards_[0];
    out.control = map_one(zero, zero.control, zero.control_fd, ControlSegment::bytes(options_.size));
    auto& head = ControlSegment(out.control->data(), options_.size).head();
    if (head.magic != kMagic || head.size != static_cast<std::uint32_t>(options_.size)) {
      throw Error(ErrorCode::internal,
                  here() + "the memory of rank 0, " + zero.process.shown() + ", is not a control segment");
    }
    try {
      for (const auto& c : cards_) {
        out.staging.push_back(map_one(*c, c->staging, c->staging_fd, kStagingBytes));
        out.inboxes.push_back(map_one(*c, c->inbox, c->inbox_fd, Inbox::bytes(options_.size)));
        out.processes.push_back(c->process);
      }
      await_all(head, out.processes);
    } catch (const Error& e) {
      const Cause cause = publish_cause(head.cause, {e, 0});
      wake_all(head.event);
      throw Error(cause.error);
    }
    if (options_.rank == 0) out.control->close_descriptor();
    return out;
  }

  void await_all(SegmentHead& head, const std::vector<ProcessIdentity>& processes) {
    Peers peers(options_.rank, processes);
    head.attached.fetch_add(1);
    wake_all(head.event);
    while (head.attached.load() < static_cast<std::uint32_t>(options_.size)) {
      if (const auto cause = read_cause(head.cause)) throw Error(cause->error);
      const std::uint64_t dead = peers.dead();
      for (int r = 0; r < options_.size; ++r) {
        if (dead >> r & 1) {
          throw Error(ErrorCode::peer_lost, here() + "rank " + std::to_string(r) + ", " +
                                                processes[static_cast<std::size_t>(r)].shown() +
                                                ", died while the ranks were starting");
        }
      }
      if (now_ns() > deadline_ns_) {
        throw Error(ErrorCode::timeout, here() + "only " + std::to_string(head.attached.load()) + " of " +
                                            std::to_string(options_.size) +
                                            " ranks have mapped each other's memory in time");
      }
      Sleeper sleeper(head.event);
      if (head.attached.load() < static_cast<std::uint32_t>(options_.size))
        sleeper.sleep(std::chrono::nanoseconds(kSlice).count());
    }
  }

  const GroupOptions& options_;
  const std::int64_t deadline_ns_;
  Card mine_;
  std::shared_ptr<Mapping> control_;
  std::shared_ptr<Mapping> staging_;
  std::shared_ptr<Mapping> inbox_;
  std::vector<std::optional<Card>> cards_;
};

}  // namespace

Attachment attach(const GroupOptions& options) { return Bootstrap(options).run(); }

}  // namespace unisono::shm

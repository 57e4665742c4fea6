#include "comm/shm/mailbox.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "comm/shm/event.h"

namespace unisono::shm {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kYield = 300'000;     // ns of a wait in which the core is offered to others, before sleeping
constexpr std::int64_t kSlice = 50'000'000;  // ns of sleep until the next look at the peers
constexpr std::chrono::milliseconds kTick(1);

std::uint64_t padded(std::uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

std::vector<Inbox> inboxes_of(const Attachment& attachment) {
  std::vector<Inbox> out;
  const int size = static_cast<int>(attachment.processes.size());
  for (const auto& inbox : attachment.inboxes) out.emplace_back(inbox->data(), size);
  return out;
}

// Between a ring at `position` of its stream and memory; the ring may wrap around once.
template <typename Copy>
void each_run(std::byte* ring, std::uint64_t position, std::size_t bytes, const Copy& copy) {
  const std::size_t at = position % kLaneBytes;
  const std::size_t first = std::min(bytes, kLaneBytes - at);
  if (first > 0) copy(ring + at, 0, first);
  if (bytes > first) copy(ring, first, bytes - first);
}

}  // namespace

Mailbox::Mailbox(std::string name, int rank, Attachment attachment)
    : name_(std::move(name)),
      rank_(rank),
      size_(static_cast<int>(attachment.processes.size())),
      attachment_(std::move(attachment)),
      segment_(attachment_.control->data(), size_),
      inboxes_(inboxes_of(attachment_)),
      peers_(rank, attachment_.processes),
      outgoing_(static_cast<std::size_t>(size_)),
      incoming_(static_cast<std::size_t>(size_)),
      lane_ready_(static_cast<std::size_t>(size_), false) {}

Mailbox::~Mailbox() { close(); }

void Mailbox::close() {
  Lock lock(mutex_);
  stop_ = true;
  if (pending_ > 0)
    fail(Error(ErrorCode::peer_lost,
               "group " + name_ + ": rank " + std::to_string(rank_) + " left the group with messages under way"));
  sweep(lock);
  changed_.notify_all();
  wake_all(inboxes_[static_cast<std::size_t>(rank_)].event());
  if (!thread_.joinable()) return;
  thread_.get_id() == std::this_thread::get_id() ? thread_.detach() : thread_.join();
}

std::shared_ptr<Mail> Mailbox::submit(const MailPtr& mail) {
  Lock lock(mutex_);
  if (const auto cause = read_cause(segment_.head().cause)) throw Error(cause->error);
  ++pending_;
  if (mail->direction_ == Mail::Direction::send) {
    outgoing_[static_cast<std::size_t>(mail->peer_)].push_back(mail);
  } else if (!take_from_aside(mail)) {
    receives_.push_back(mail);
  }
  advance();
  if (pending_ > 0) {
    if (!thread_.joinable()) thread_ = std::thread([self = shared_from_this()] { self->run(); });
    if (deep_) changed_.notify_all();
  }
  sweep(lock);
  return mail;
}

void Mailbox::poll() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return;
  advance();
  sweep(lock);
}

void Mailbox::wait(Mail& mail) {
  drivers_.fetch_add(1);
  std::int64_t since = now_ns();
  while (!mail.has_ended()) {
    Lock lock(mutex_);
    const bool moved = advance();
    sweep(lock);
    if (mail.has_ended()) break;
    const std::int64_t now = now_ns();
    if (moved) since = now;
    if (now - since < kYield) {
      sched_yield();
    } else {
      drive_a_little(std::clamp<std::int64_t>(mail.deadline_ns_ - now, kMillisecond, kSlice), &mail);
    }
  }
  drivers_.fetch_sub(1);
}

void Mailbox::drive_a_little(std::int64_t ns, const Mail* waited) {
  Sleeper sleeper(inboxes_[static_cast<std::size_t>(rank_)].event());
  Lock lock(mutex_);
  const bool awake = advance() || stop_ || pending_ == 0 || (waited != nullptr && waited->has_ended());
  sweep(lock);
  if (!awake) sleeper.sleep(ns);
}

void Mailbox::run() {
  pthread_setname_np(pthread_self(), "uni-mail");
  Lock lock(mutex_);
  while (!stop_) {
    if (pending_ == 0) {
      deep_ = true;
      changed_.wait(lock, [this] { return stop_ || pending_ > 0; });
      deep_ = false;
      changed_.wait_for(lock, kTick,
                        [this] { return stop_; });  // most are waited for at once: leave them to the waiter
    } else if (drivers_.load() > 0) {
      changed_.wait_for(lock, kTick, [this] { return stop_; });
    } else {
      lock.unlock();
      drive_a_little(kSlice, nullptr);
      lock.lock();
    }
  }
}

// Goes as far as it can without waiting. Returns whether anything moved.
bool Mailbox::advance() {
  if (pending_ == 0) return false;
  bool moved = false;
  try {
    for (int peer = 0; peer < size_; ++peer) {
      if (peer == rank_) continue;
      moved = push(peer) || moved;
      moved = pull(peer) || moved;
    }
    if (!moved) look_for_trouble(now_ns());
  } catch (const Error& error) {
    fail(error);
  } catch (const std::exception& error) {  // no memory to put a message aside
    fail(Error(ErrorCode::internal,
               "group " + name_ + ", rank " + std::to_string(rank_) + ", messages: " + error.what()));
  }
  return moved;
}

bool Mailbox::push(int to) {
  auto& queue = outgoing_[static_cast<std::size_t>(to)];
  if (queue.empty()) return false;
  const Inbox& inbox = inboxes_[static_cast<std::size_t>(to)];
  LaneWords& words = inbox.words(rank_);
  std::byte* ring = inbox.lane(rank_);
  if (!lane_ready_[static_cast<std::size_t>(to)]) {
    if (!attachment_.inboxes[static_cast<std::size_t>(to)]->reserve_part(inbox.lane_offset(rank_), kLaneBytes))
      throw Error(ErrorCode::invalid_argument, place_of(*queue.front()) + "there is no memory for a lane of " +
                                                   std::to_string(kLaneBytes) + " bytes");
    lane_ready_[static_cast<std::size_t>(to)] = true;
  }
  const std::uint64_t before = words.written.load();
  std::uint64_t written = before;
  std::uint64_t room = kLaneBytes - (written - words.read.load());
  while (!queue.empty() && room >= kLine) {
    const MailPtr mail = queue.front();
    if (!mail->begun_) {
      const MailHeader header{mail->tag_, mail->data_.count, static_cast<std::uint64_t>(mail->data_.dtype)};
      std::memcpy(ring + written % kLaneBytes, &header, sizeof(header));
      mail->begun_ = true;
      written += kLine;
      room -= kLine;
    }
    const std::uint64_t bytes = mail->data_.bytes();
    const std::uint64_t step = std::min(padded(bytes) - mail->moved_, room);
    const std::uint64_t real = std::min(step, bytes - std::min(bytes, mail->moved_));
    each_run(ring, written, real, [&](std::byte* part, std::size_t at, std::size_t length) {
      std::memcpy(part, mail->bytes() + mail->moved_ + at, length);
    });
    written += step;
    room -= step;
    mail->moved_ += step;
    if (mail->moved_ < padded(bytes)) break;
    queue.pop_front();
    end(mail, nullptr);
  }
  if (written == before) return false;
  words.written.store(written);
  if (anybody_sleeps(inbox.event())) wake_all(inbox.event());
  return true;
}

bool Mailbox::pull(int from) {
  const Inbox& inbox = inboxes_[static_cast<std::size_t>(rank_)];
  LaneWords& words = inbox.words(from);
  std::byte* ring = inbox.lane(from);
  Incoming& incoming = incoming_[static_cast<std::size_t>(from)];
  const std::uint64_t before = words.read.load();
  std::uint64_t read = before;
  std::uint64_t there = words.written.load() - read;
  while (there > 0) {
    if (!incoming.active) {
      MailHeader header;
      std::memcpy(&header, ring + read % kLaneBytes, sizeof(header));
      if (!begin_incoming(from, header)) break;
      read += kLine;
      there -= kLine;
    }
    const std::uint64_t bytes = incoming.header.count * size_of(static_cast<Dtype>(incoming.header.dtype));
    const std::uint64_t step = std::min(padded(bytes) - incoming.moved, there);
    const std::uint64_t real = std::min(step, bytes - std::min(bytes, incoming.moved));
    std::byte* target = (incoming.mail ? incoming.mail->bytes() : incoming.aside->data.data()) + incoming.moved;
    each_run(ring, read, real,
             [&](std::byte* part, std::size_t at, std::size_t length) { std::memcpy(target + at, part, length); });
    read += step;
    there -= step;
    incoming.moved += step;
    if (incoming.moved < padded(bytes)) break;
    incoming.active = false;
    if (incoming.mail) {
      end(std::exchange(incoming.mail, nullptr), nullptr);
    } else {
      incoming.aside->complete = true;
      if (const MailPtr mail = find_receive(from, incoming.header.tag)) {
        take_from_aside(mail);
      }
    }
  }
  if (read == before) return false;
  words.read.store(read);
  EventWords& senders = inboxes_[static_cast<std::size_t>(from)].event();
  if (anybody_sleeps(senders)) wake_all(senders);
  return true;
}

// False: the message stays in its lane for now.
bool Mailbox::begin_incoming(int from, const MailHeader& header) {
  Incoming& incoming = incoming_[static_cast<std::size_t>(from)];
  MailPtr mail = find_receive(from, header.tag);
  if (!mail && !somebody_waits_for(from)) return false;
  if (mail) {
    require_alike(*mail, from, header);
    receives_.remove(mail);
    mail->peer_ = from;
  } else {
    const std::size_t bytes = header.count * size_of(static_cast<Dtype>(header.dtype));
    incoming.aside = aside_.insert(aside_.end(), {from, header, std::vector<std::byte>(bytes), false});
  }
  incoming.mail = std::move(mail);
  incoming.header = header;
  incoming.moved = 0;
  incoming.active = true;
  return true;
}

bool Mailbox::take_from_aside(const MailPtr& mail) {
  const auto fits = [&](const Aside& aside) {
    return aside.complete && aside.header.tag == mail->tag_ && (mail->asked_ < 0 || mail->asked_ == aside.sender);
  };
  const auto found = std::find_if(aside_.begin(), aside_.end(), fits);
  if (found == aside_.end()) return false;
  require_alike(*mail, found->sender, found->header);
  if (!found->data.empty()) std::memcpy(mail->data_.data, found->data.data(), found->data.size());
  mail->peer_ = found->sender;
  receives_.remove(mail);
  aside_.erase(found);
  end(mail, nullptr);
  return true;
}

Mailbox::MailPtr Mailbox::find_receive(int from, std::int64_t tag) {
  for (const auto& mail : receives_)
    if (mail->tag_ == tag && (mail->asked_ < 0 || mail->asked_ == from)) return mail;
  return nullptr;
}

bool Mailbox::somebody_waits_for(int from) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [&](const MailPtr& mail) { return mail->asked_ < 0 || mail->asked_ == from; });
}

void Mailbox::end(const MailPtr& mail, std::exception_ptr error) {
  mail->error_ = std::move(error);
  mail->ended_.store(true, std::memory_order_release);
  --pending_;
  ended_.push_back(mail);
  EventWords& own = inboxes_[static_cast<std::size_t>(rank_)].event();
  if (anybody_sleeps(own)) wake_all(own);
}

// What messages held is let go of once the lock is free: owners may run anybody's code.
void Mailbox::sweep(Lock& lock) {
  std::vector<std::pair<MailPtr, std::shared_ptr<void>>> trash;
  for (auto& mail : ended_) trash.emplace_back(mail, std::move(mail->data_.owner));
  ended_.clear();
  lock.unlock();
}

}  // namespace unisono::shm

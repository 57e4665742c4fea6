#include "comm/shm/mailbox.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "comm/shm/event.h"

namespace unisono::shm {
namespace {

constexpr std::int64_t kMillisecond = 1'000'000;
constexpr std::int64_t kYield = 300'000;     // ns of a wait in which the core is offered to others, before sleeping
constexpr std::int64_t kSlice = 50'000'000;  // ns of sleep until the next look at the peers
constexpr std::chrono::milliseconds kTick(1);

std::vector<Inbox> inboxes_of(const Attachment& attachment) {
  std::vector<Inbox> out;
  const int size = static_cast<int>(attachment.processes.size());
  for (const auto& inbox : attachment.inboxes) out.emplace_back(inbox->data(), size);
  return out;
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
  } else {
    receives_.push_back(mail);
    try {
      take_from_aside(mail);
    } catch (const Error& error) {
      fail(error);
    }
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

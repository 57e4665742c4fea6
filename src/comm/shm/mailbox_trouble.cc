#include <unisono/error.h>

#include <vector>

#include "base/clock.h"
#include "comm/shm/cause.h"
#include "comm/shm/event.h"
#include "comm/shm/mailbox.h"

namespace unisono::shm {
namespace {

constexpr std::int64_t kLookAtPeers = 50'000'000;  // ns between looks at whether peers live
constexpr std::int64_t kLookAtMail = 1'000'000;    // ns between looks at all deadlines

std::string shown(std::uint64_t count, Dtype dtype) {
  return std::to_string(count) + " " + std::string(to_string(dtype));
}

}  // namespace

std::string Mailbox::place_of(const Mail& mail) const {
  const bool sends = mail.direction_ == Mail::Direction::send;
  const std::string peer = mail.asked_ < 0 ? "any rank" : "rank " + std::to_string(mail.asked_);
  return "group " + name_ + ", rank " + std::to_string(rank_) + (sends ? ", send of " : ", receive of ") +
         shown(mail.data_.count, mail.data_.dtype) + (sends ? " to " : " from ") + peer +
         (mail.tag_ < 0 ? ", a block of an all_to_all or of sparse tensors" : ", tag " + std::to_string(mail.tag_)) +
         ": ";
}

void Mailbox::require_alike(const Mail& mail, int from, const MailHeader& header) const {
  const auto dtype = static_cast<Dtype>(header.dtype);
  if (mail.data_.count == header.count && mail.data_.dtype == dtype) return;
  throw Error(ErrorCode::mismatch, place_of(mail) + "rank " + std::to_string(from) + " sent " +
                                       shown(header.count, dtype) +
                                       "; both sides must give tensors of one size and dtype");
}

bool Mailbox::has_mail_from(int sender) const {
  const LaneWords& words = inboxes_[static_cast<std::size_t>(rank_)].words(sender);
  return words.written.load() != words.read.load();
}

// Called when nothing moved.
void Mailbox::look_for_trouble(std::int64_t now) {
  if (const auto cause = read_cause(segment_.head().cause)) return fail(cause->error);
  if (now < next_scan_ns_) return;
  next_scan_ns_ = now + kLookAtMail;
  std::vector<MailPtr> all(receives_.begin(), receives_.end());
  for (const auto& queue : outgoing_) all.insert(all.end(), queue.begin(), queue.end());
  for (const auto& incoming : incoming_)
    if (incoming.mail) all.push_back(incoming.mail);
  for (const auto& mail : all) {
    if (now < mail->deadline_ns_) continue;
    const bool sends = mail->direction_ == Mail::Direction::send;
    throw Error(ErrorCode::timeout,
                place_of(*mail) + (sends ? "it has not been received within " : "no such message came within ") +
                    std::to_string((now - mail->issued_ns_) / 1'000'000) +
                    (mail->tag_ < 0 ? " ms. Do all ranks make the same call? Either all of them give "
                                      "split sizes to all_to_all_single, or none does."
                                    : " ms. Does the other side make the matching call, with the same tag?"));
  }
  if (now < next_look_ns_) return;
  next_look_ns_ = now + kLookAtPeers;
  const std::uint64_t dead = peers_.dead();
  std::uint64_t left = 0;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && segment_.words(r).left.load() != 0) left |= 1ull << r;
  const std::uint64_t others = ((size_ == 64 ? 0 : 1ull << size_) - 1) & ~(1ull << rank_);
  for (const auto& mail : all) {
    const bool any = mail->peer_ < 0;
    const std::uint64_t gone = any ? (dead | (left == others ? left : 0)) : (dead | left) & 1ull << mail->peer_;
    for (int r = 0; r < size_; ++r) {
      if (!(gone >> r & 1) || (mail->direction_ == Mail::Direction::receive && has_mail_from(r))) continue;
      throw Error(ErrorCode::peer_lost, place_of(*mail) + "rank " + std::to_string(r) + ", " +
                                            peers_.process(r).shown() +
                                            (dead >> r & 1 ? ", died. " : ", left the group. ") +
                                            "Look for its first error; the group can no longer be used.");
    }
  }
}

// Ends everything under way, and the group; the cause is the group's first.
void Mailbox::fail(const Error& error) {
  const Cause cause = publish_cause(segment_.head().cause, {error, 0});
  wake_all(segment_.head().event);
  for (const auto& inbox : inboxes_) wake_all(inbox.event());
  const auto why = std::make_exception_ptr(cause.error);
  for (auto& queue : outgoing_) {
    for (const auto& mail : queue) end(mail, why);
    queue.clear();
  }
  for (const auto& mail : receives_) end(mail, why);
  receives_.clear();
  for (auto& incoming : incoming_) {
    if (incoming.mail) end(incoming.mail, why);
    incoming = {};
  }
  aside_.clear();
}

}  // namespace unisono::shm

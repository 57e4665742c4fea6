// Messages between memory and lanes: out to a receiver, in from a sender, and those that nobody has asked for.
#include <algorithm>
#include <cstring>
#include <utility>

#include "comm/shm/event.h"
#include "comm/shm/mailbox.h"

namespace unisono::shm {
namespace {

std::uint64_t padded(std::uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// Between a ring at `position` of its stream and memory; the ring may wrap around once.
template <typename Copy>
void each_run(std::byte* ring, std::uint64_t position, std::size_t bytes, const Copy& copy) {
  const std::size_t at = position % kLaneBytes;
  const std::size_t first = std::min(bytes, kLaneBytes - at);
  if (first > 0) copy(ring + at, 0, first);
  if (bytes > first) copy(ring, first, bytes - first);
}

}  // namespace

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

void Mailbox::take_from_aside(const MailPtr& mail) {
  const auto fits = [&](const Aside& aside) {
    return aside.complete && aside.header.tag == mail->tag_ && (mail->asked_ < 0 || mail->asked_ == aside.sender);
  };
  const auto found = std::find_if(aside_.begin(), aside_.end(), fits);
  if (found == aside_.end()) return;
  require_alike(*mail, found->sender, found->header);
  if (!found->data.empty()) std::memcpy(mail->data_.data, found->data.data(), found->data.size());
  mail->peer_ = found->sender;
  receives_.remove(mail);
  aside_.erase(found);
  end(mail, nullptr);
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

}  // namespace unisono::shm

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "comm/point_to_point.h"
#include "comm/shm/bootstrap.h"
#include "comm/shm/cause.h"
#include "comm/shm/inbox.h"
#include "comm/shm/mail.h"
#include "comm/shm/peers.h"

namespace unisono::shm {

/// One rank's messages to and from the others, see inbox.h. As with collectives, whoever passes by moves them forward;
/// the thread "uni-mail", which starts with the first message, does when nobody comes by.
///
/// A message whose tag nobody has asked for stays in its lane, unless a receive of another tag waits behind it: then it
/// is put aside in memory of this process.
/// *Threads*: any.
class Mailbox : public std::enable_shared_from_this<Mailbox> {
 public:
  Mailbox(std::string name, int rank, Attachment attachment);
  ~Mailbox();
  Mailbox(const Mailbox&) = delete;
  Mailbox& operator=(const Mailbox&) = delete;

  /// *Throws* the group's cause when it has failed.
  std::shared_ptr<Mail> submit(const std::shared_ptr<Mail>& mail);
  void poll();
  void wait(Mail& mail);
  /// Fails what is under way and ends the thread. What was sent stays with the receivers.
  void close();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using MailPtr = std::shared_ptr<Mail>;
  /// A message that came before anybody asked for it.
  struct Aside {
    int sender = 0;
    MailHeader header;
    std::vector<std::byte> data;
    bool complete = false;
  };
  /// The message that is coming in on a lane.
  struct Incoming {
    bool active = false;
    MailHeader header;
    MailPtr mail;  ///< null: put aside
    std::list<Aside>::iterator aside;
    std::uint64_t moved = 0;
  };

  bool advance();
  bool push(int to);
  bool pull(int from);
  bool begin_incoming(int from, const MailHeader& header);
  void take_from_aside(const MailPtr& mail);
  MailPtr find_receive(int from, std::int64_t tag);
  bool somebody_waits_for(int from) const;
  void require_alike(const Mail& mail, int from, const MailHeader& header) const;
  bool has_mail_from(int sender) const;
  void look_for_trouble(std::int64_t now);
  void fail(const Error& error);
  void end(const MailPtr& mail, std::exception_ptr error);
  void sweep(Lock& lock);
  void drive_a_little(std::int64_t ns, const Mail* waited);
  void run();
  std::string place_of(const Mail& mail) const;

  const std::string name_;
  const int rank_;
  const int size_;
  Attachment attachment_;
  ControlSegment segment_;
  std::vector<Inbox> inboxes_;
  Peers peers_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::deque<MailPtr>> outgoing_;  ///< per receiver
  std::list<MailPtr> receives_;                ///< that wait for their message, in the order they were made
  std::vector<Incoming> incoming_;             ///< per sender
  std::list<Aside> aside_;                     ///< in the order they came
  std::vector<bool> lane_ready_;               ///< per receiver
  std::vector<MailPtr> ended_;                 ///< to let go of without the lock
  std::int64_t next_look_ns_ = 0;
  std::int64_t next_scan_ns_ = 0;
  std::size_t pending_ = 0;
  std::atomic<int> drivers_{0};
  bool deep_ = false;
  bool stop_ = false;
  std::thread thread_;
};

}  // namespace unisono::shm

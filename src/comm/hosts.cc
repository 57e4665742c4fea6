#include <fcntl.h>
#include <sys/mman.h>
#include <unisono/error.h>
#include <unisono/hosts.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <random>
#include <set>
#include <sstream>

#include "comm/process_identity.h"

namespace unisono {
namespace {

std::string own_place() {
  const char* part = std::getenv("UNISONO_HOST_PART");
  return ProcessIdentity::self().place + "/" + (part ? part : "");
}

std::string new_secret() {
  std::random_device random;
  std::string out;
  for (int word = 0; word < 4; ++word) {
    std::array<char, 9> hex{};
    std::snprintf(hex.data(), hex.size(), "%08x", random());
    out += hex.data();
  }
  return out;
}

// Memory with a secret in it, and where to find it.
class Card {
 public:
  Card() : secret_(new_secret()), memory_(memfd_create("unisono-host", MFD_CLOEXEC)) {
    if (memory_ < 0 || write(memory_, secret_.data(), secret_.size()) != static_cast<ssize_t>(secret_.size()))
      throw Error(ErrorCode::internal, "no anonymous memory for finding out which ranks share a host");
  }
  ~Card() { close(memory_); }
  Card(const Card&) = delete;
  Card& operator=(const Card&) = delete;

  std::string shown() const {
    return std::to_string(getpid()) + " " + std::to_string(memory_) + " " + secret_ + " " + own_place();
  }

  static bool readable(const std::string& card) {
    std::istringstream text(card);
    std::string pid, memory, secret, place;
    text >> pid >> memory >> secret >> std::ws;
    std::getline(text, place);  // UNISONO_HOST_PART may have blanks
    if (place != own_place()) return false;
    const int file = open(("/proc/" + pid + "/fd/" + memory).c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return false;
    std::string read(secret.size(), 0);
    const bool all = pread(file, read.data(), read.size(), 0) == static_cast<ssize_t>(read.size());
    close(file);
    return all && read == secret;
  }

 private:
  std::string secret_;
  int memory_;
};

std::string join(const std::vector<int>& ranks) {
  std::string out;
  for (const int rank : ranks) out += (out.empty() ? "" : " ") + std::to_string(rank);
  return out;
}

}  // namespace

std::vector<std::vector<int>> find_hosts(const ExchangeTexts& exchange) {
  const auto places = exchange("place", own_place());
  const int size = static_cast<int>(places.size());
  std::vector<int> everyone;
  for (int rank = 0; rank < size; ++rank) everyone.push_back(rank);
  if (std::all_of(places.begin(), places.end(), [&](const auto& place) { return place == places[0]; }))
    return {everyone};

  const Card card;
  const auto cards = exchange("card", card.shown());
  std::vector<int> near;
  std::copy_if(everyone.begin(), everyone.end(), std::back_inserter(near), [&](int rank) {
    const std::string& shown = cards[static_cast<std::size_t>(rank)];
    return shown == card.shown() || Card::readable(shown);  // where there is no /proc a rank is alone
  });
  const auto all_near = exchange("neighbours", join(near));
  std::set<std::string> seen;
  std::vector<std::vector<int>> hosts;
  for (const std::string& text : all_near) {
    std::istringstream numbers(text);
    std::vector<int> ranks;
    for (int rank = 0; numbers >> rank;) ranks.push_back(rank);
    for (const int other : ranks) {
      if (all_near[static_cast<std::size_t>(other)] == text) continue;
      throw Error(
          ErrorCode::invalid_argument,
          "unisono: rank " + std::to_string(ranks[0]) + " can open the memory of ranks " + text + ", rank " +
              std::to_string(other) + " that of ranks " + all_near[static_cast<std::size_t>(other)] +
              ": some processes may not open others' memory (another user, or a container of its own); give them a "
              "UNISONO_HOST_PART of their own");
    }
    if (seen.insert(text).second) hosts.push_back(std::move(ranks));
  }
  std::sort(hosts.begin(), hosts.end());
  return hosts;
}

}  // namespace unisono

#include "comm/host_layout.h"

#include <unisono/error.h>
#include <unisono/hosts.h>

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>
#include <utility>

namespace unisono {
namespace {

std::string show(const std::vector<std::vector<int>>& hosts) {
  std::string out;
  for (const auto& ranks : hosts) {
    out += out.empty() ? "[" : "], [";
    for (std::size_t i = 0; i < ranks.size(); ++i) out += (i ? ", " : "") + std::to_string(ranks[i]);
  }
  return out.empty() ? "none" : out + "]";
}

// Whether the node over ranks [begin, end) of the balanced tree is made of whole hosts, each a node itself.
bool made_of_hosts(const std::vector<std::vector<int>>& hosts, int begin, int end) {
  const auto host = std::find_if(hosts.begin(), hosts.end(), [&](const auto& ranks) { return ranks[0] == begin; });
  if (host == hosts.end()) return false;
  if (static_cast<int>(host->size()) == end - begin) return host->back() == end - 1;
  if (end - begin == 1) return false;
  const int half = static_cast<int>(std::bit_ceil(static_cast<unsigned>(end - begin)) / 2);
  return made_of_hosts(hosts, begin, begin + half) && made_of_hosts(hosts, begin + half, end);
}

// How the nodes above the hosts join, as the balanced tree over hosts joins them.
bool joined_alike(const std::vector<std::vector<int>>& hosts, std::size_t first, std::size_t last) {
  const std::size_t count = last - first;
  if (count <= 1) return true;
  const std::size_t half = std::bit_ceil(count) / 2;
  const int begin = hosts[first][0], end = hosts[last - 1].back() + 1;
  const int split = begin + static_cast<int>(std::bit_ceil(static_cast<unsigned>(end - begin)) / 2);
  return hosts[first + half][0] == split && joined_alike(hosts, first, first + half) &&
         joined_alike(hosts, first + half, last);
}

}  // namespace

std::size_t HostLayout::ranks() const {
  return std::accumulate(hosts.begin(), hosts.end(), std::size_t{0},
                         [](std::size_t n, const auto& ranks) { return n + ranks.size(); });
}

std::size_t HostLayout::narrowest() const {
  return std::min_element(hosts.begin(), hosts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); })
      ->size();
}

std::size_t HostLayout::widest() const {
  return std::max_element(hosts.begin(), hosts.end(), [](const auto& a, const auto& b) { return a.size() < b.size(); })
      ->size();
}

std::vector<int> HostLayout::carriers(std::size_t at) const {
  std::vector<int> out;
  for (const auto& ranks : hosts) out.push_back(ranks[at]);
  std::sort(out.begin(), out.end());
  return out;
}

std::size_t HostLayout::position(std::size_t at, std::size_t of_host) const {
  const int own = hosts[of_host][at];
  return static_cast<std::size_t>(
      std::count_if(hosts.begin(), hosts.end(), [&](const auto& ranks) { return ranks[at] < own; }));
}

bool follows_tree(const std::vector<std::vector<int>>& hosts) {
  const HostLayout layout = layout_of(hosts, 0);
  return made_of_hosts(layout.hosts, 0, static_cast<int>(layout.ranks())) &&
         joined_alike(layout.hosts, 0, layout.hosts.size());
}

HostLayout layout_of(std::vector<std::vector<int>> hosts, int rank) {
  HostLayout out;
  for (auto& ranks : hosts) std::sort(ranks.begin(), ranks.end());
  std::sort(hosts.begin(), hosts.end());
  std::vector<int> all;
  bool found = false;
  for (std::size_t host = 0; host < hosts.size(); ++host) {
    for (std::size_t place = 0; place < hosts[host].size(); ++place) {
      all.push_back(hosts[host][place]);
      if (hosts[host][place] != rank) continue;
      out.host = host;
      out.place = place;
      found = true;
    }
  }
  std::sort(all.begin(), all.end());
  bool complete = found && std::none_of(hosts.begin(), hosts.end(), [](const auto& ranks) { return ranks.empty(); });
  for (std::size_t i = 0; i < all.size(); ++i) complete = complete && all[i] == static_cast<int>(i);
  if (!complete) {
    throw Error(ErrorCode::invalid_argument,
                "the ranks of the hosts are " + show(hosts) + ", as rank " + std::to_string(rank) +
                    " has them; every rank from 0 on must be on exactly one host, and this rank on one of them");
  }
  out.hosts = std::move(hosts);
  out.rank = rank;
  return out;
}

}  // namespace unisono

#pragma once

#include <cstddef>
#include <vector>

namespace unisono {

/// Which ranks share a host, as one of them sees it.
struct HostLayout {
  /// The ranks of each, ascending; hosts in the order of their first ranks. Those with a later place may be in another
  /// order: [0, 3], [1, 2].
  std::vector<std::vector<int>> hosts;
  int rank = 0;
  std::size_t host = 0;   ///< of `rank`
  std::size_t place = 0;  ///< of `rank` among the ranks of its host

  const std::vector<int>& own() const { return hosts[host]; }
  std::size_t ranks() const;
  std::size_t narrowest() const;  ///< ranks of the smallest host
  std::size_t widest() const;
  /// Of `host` among the carriers with this place, in the order of their ranks: its rank in their group, however that
  /// was made.
  std::size_t position(std::size_t place, std::size_t of_host) const;
  /// The ranks with this place, one per host, ascending.
  std::vector<int> carriers(std::size_t place) const;
  bool even() const { return narrowest() == widest(); }
};

/// *Throws* `invalid_argument` unless every rank from 0 on is on exactly one host, and `rank` is one of them.
HostLayout layout_of(std::vector<std::vector<int>> hosts, int rank);

}  // namespace unisono

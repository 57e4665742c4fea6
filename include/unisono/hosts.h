#pragma once

#include <functional>
#include <string>
#include <vector>

namespace unisono {

/// Gives every rank's `text`, in rank order, to every rank; `what` tells one exchange from another. *Collective*,
/// *blocks*.
using ExchangeTexts = std::function<std::vector<std::string>(const std::string& what, const std::string& text)>;

/// The ranks of each host, hosts in the order of their first ranks. Ranks share a host when each can open the other's
/// memory, whatever names and variables say: every rank writes a secret into memory of its own and shows where; who can
/// read it through /proc shares the host. Where all ranks run on one boot in one pid namespace that is left to the
/// making of the shared-memory group, which proves the same. The variable UNISONO_HOST_PART splits a host further (one
/// part per NUMA domain, or in tests). *Collective*, one exchange or three. *Throws* `invalid_argument` when ranks see
/// each other one way only, and what `exchange` throws.
std::vector<std::vector<int>> find_hosts(const ExchangeTexts& exchange);

/// Whether sums host by host, and then over hosts, are those of the balanced tree over ranks, bit for bit: every host's
/// ranks are a subtree. *Throws* `invalid_argument` unless every rank from 0 on is on exactly one host.
bool follows_tree(const std::vector<std::vector<int>>& hosts);

}  // namespace unisono

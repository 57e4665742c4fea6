#include "comm/host_layout.h"

#include <gtest/gtest.h>
#include <unisono/hosts.h>

#include <algorithm>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <thread>

#include "comm/errors.h"
#include "comm/hierarchy/blocks.h"

namespace unisono::testing {
namespace {

using Hosts = std::vector<std::vector<int>>;

TEST(HostLayout, PlacesTheRank) {
  const HostLayout layout = layout_of({{5, 1, 3}, {4, 0, 2}}, 3);
  EXPECT_EQ(layout.hosts, (Hosts{{0, 2, 4}, {1, 3, 5}}));
  EXPECT_EQ(layout.host, 1u);
  EXPECT_EQ(layout.place, 1u);
  EXPECT_EQ(layout.ranks(), 6u);
  EXPECT_TRUE(layout.even());
  const HostLayout uneven = layout_of({{0, 1, 2}, {3}}, 0);
  EXPECT_EQ(uneven.narrowest(), 1u);
  EXPECT_EQ(uneven.widest(), 3u);
}

TEST(HostLayout, RefusesWhatIsNoLayout) {
  for (const Hosts& hosts : {Hosts{{0, 1}, {1}}, Hosts{{0}, {2}}, Hosts{{0}, {}}, Hosts{}, Hosts{{1}, {2}}}) {
    const auto error = error_of([&] { layout_of(hosts, 0); }, ErrorCode::invalid_argument);
    EXPECT_TRUE(contains(error, "every rank from 0 on must be on exactly one host")) << error;
  }
  EXPECT_TRUE(contains(error_of([] { layout_of({{0}, {1}}, 2); }, ErrorCode::invalid_argument), "as rank 2 has them"));
}

// A sum as text: (01)(23) shows who was added to whom.
std::string tree(const std::vector<std::string>& in, std::size_t begin, std::size_t end) {
  if (end - begin == 1) return in[begin];
  std::size_t half = 1;
  while (2 * half < end - begin) half *= 2;
  return "(" + tree(in, begin, begin + half) + tree(in, begin + half, end) + ")";
}

std::string host_by_host(const Hosts& hosts) {
  std::vector<std::string> sums;
  for (const auto& ranks : hosts) {
    std::vector<std::string> names;
    for (const int rank : ranks) names.push_back(std::to_string(rank));
    sums.push_back(tree(names, 0, names.size()));
  }
  return tree(sums, 0, sums.size());
}

// Every way to deal up to 6 ranks to hosts, against sums that are written out.
TEST(HostLayout, FollowsTheTreeWhereTheSumsAreTheSame) {
  int alike = 0;
  for (int size = 1; size <= 6; ++size) {
    std::vector<std::string> names;
    for (int rank = 0; rank < size; ++rank) names.push_back(std::to_string(rank));
    const std::string flat = tree(names, 0, names.size());
    for (int code = 0; code < 4096; ++code) {
      std::map<int, std::vector<int>> dealt;
      for (int rank = 0; rank < size; ++rank) dealt[code >> (2 * rank) & 3].push_back(rank);
      Hosts hosts;
      for (const auto& [number, ranks] : dealt) hosts.push_back(ranks);
      std::sort(hosts.begin(), hosts.end());
      const bool same = host_by_host(hosts) == flat;
      ASSERT_EQ(follows_tree(hosts), same) << host_by_host(hosts) << " and " << flat;
      alike += same;
    }
  }
  EXPECT_GT(alike, 100);
}

// Each carrier's part of each host, put together again.
TEST(HostBlocks, PartsCoverEveryBlockOnce) {
  for (const Hosts& hosts : {Hosts{{0, 2}, {1, 3}}, Hosts{{0, 1, 2}, {3}}, Hosts{{0, 1, 4}, {2, 3}}}) {
    const HostLayout layout = layout_of(hosts, 0);
    for (const std::size_t block : {1, 5, 64}) {
      const HostBlocks blocks(layout, block);
      std::vector<int> seen(layout.ranks() * block);
      std::map<std::pair<std::size_t, std::size_t>, std::vector<int>> parts;
      blocks.for_each([&](const HostBlocks::Piece& piece) {
        ASSERT_LT(piece.carrier, layout.narrowest());
        ASSERT_LE(piece.in_part + piece.count, blocks.part());
        auto& part = parts[{piece.host, piece.carrier}];
        part.resize(blocks.part());
        for (std::size_t i = 0; i < piece.count; ++i) {
          ++seen[piece.rank * block + piece.in_block + i];
          EXPECT_EQ(part[piece.in_part + i]++, 0);
        }
      });
      EXPECT_EQ(std::accumulate(seen.begin(), seen.end(), 0), static_cast<int>(seen.size()));
      EXPECT_EQ(*std::max_element(seen.begin(), seen.end()), 1);
    }
  }
}

// What ranks tell each other, through one map.
class Exchange {
 public:
  explicit Exchange(std::size_t size) : size_(size) {}
  std::vector<std::string> operator()(std::size_t rank, const std::string& what, std::string text) {
    std::unique_lock lock(mutex_);
    auto& texts = told_[what];
    texts.resize(size_);
    texts[rank] = std::move(text);
    ++count_[what];
    changed_.notify_all();
    changed_.wait(lock, [&] { return count_[what] == size_; });
    return texts;
  }

 private:
  std::size_t size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::string>> told_;
  std::map<std::string, std::size_t> count_;
};

// Every rank's hosts, or its error. `change(rank, what, text)` is what a rank says in place of `text`.
std::vector<std::string> hosts_seen(
    std::size_t size, const std::function<std::string(std::size_t, const std::string&, std::string)>& change) {
  Exchange exchange(size);
  std::vector<std::string> out(size);
  std::vector<std::thread> ranks;
  for (std::size_t rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      const auto tell = [&](const std::string& what, const std::string& text) {
        return exchange(rank, what, change(rank, what, text));
      };
      try {
        for (const auto& on_host : find_hosts(tell)) {
          for (const int r : on_host) out[rank] += std::to_string(r);
          out[rank] += "|";
        }
      } catch (const Error& error) {
        out[rank] = error.what();
      }
    });
  }
  for (auto& rank : ranks) rank.join();
  return out;
}

TEST(FindHosts, RanksOfOneProcessShareAHost) {
  for (const auto& seen : hosts_seen(3, [](std::size_t, const std::string&, std::string text) { return text; }))
    EXPECT_TRUE(contains(seen, "012|")) << seen;
}

// A rank elsewhere names another place; it opens nobody's memory, and nobody its.
TEST(FindHosts, AnotherPlaceIsAnotherHost) {
  const auto elsewhere = [](std::size_t rank, const std::string& what, std::string text) {
    if (rank != 1) return text;
    if (what == "neighbours") return std::string("1");
    return text + "elsewhere";
  };
  const auto seen = hosts_seen(3, elsewhere);
  EXPECT_TRUE(contains(seen[0], "02|1|")) << seen[0];
  EXPECT_TRUE(contains(seen[2], "02|1|")) << seen[2];
}

// Who only claims to be here shows no secret.
TEST(FindHosts, AWrongSecretIsAnotherHost) {
  const auto liar = [](std::size_t rank, const std::string& what, std::string text) {
    if (rank != 2) return text;
    if (what == "place") return text + "x";  // or nobody would look
    if (what == "neighbours") return std::string("2");
    const auto first = text.find(' ', text.find(' ') + 1) + 1;
    text[first] = text[first] == '0' ? '1' : '0';
    return text;
  };
  const auto seen = hosts_seen(3, liar);
  EXPECT_TRUE(contains(seen[0], "01|2|")) << seen[0];
}

TEST(FindHosts, SightInOneDirectionIsAnErrorOnEveryRank) {
  const auto blind = [](std::size_t rank, const std::string& what, std::string text) {
    if (what == "place" && rank == 0) return text + "x";
    return rank == 2 && what == "neighbours" ? std::string("2") : text;
  };
  for (const auto& seen : hosts_seen(3, blind)) {
    EXPECT_TRUE(contains(seen, "UNISONO_HOST_PART")) << seen;
    EXPECT_TRUE(contains(seen, "rank 2 that of ranks 2")) << seen;
  }
}

}  // namespace
}  // namespace unisono::testing

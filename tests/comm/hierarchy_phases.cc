#include "comm/hierarchy_phases.h"

#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <map>
#include <optional>
#include <regex>
#include <sstream>

#include "comm/issuer/issued_group.h"
#include "comm/shm_ranks.h"
#include "process.h"

namespace unisono::testing {
namespace {

constexpr int kEnded = 42;
constexpr std::chrono::seconds kDeadline(40), kSoon(20);
const std::vector<std::vector<int>> kHosts{{0, 1}, {2, 3}};

std::map<std::string, EngineAmong>& kinds() {
  static std::map<std::string, EngineAmong> all;
  return all;
}

/// Where this process is to die, once it is armed; empty where it is not.
struct Death {
  std::string phase;
  bool armed = false;
  void at(const char* place) const {
    if (armed && phase == place) raise(SIGKILL);
  }
};

// Around the hierarchy, and around what it has between hosts.
class Mortal final : public Engine {
 public:
  Mortal(std::unique_ptr<Engine> inner, const Death& death, std::string part)
      : Engine(inner->info()), inner_(std::move(inner)), death_(death), part_(std::move(part)) {}

  bool serves(Device::Kind kind) const override { return inner_->serves(kind); }
  std::unique_ptr<NoticeBoard> notice_board() override { return inner_->notice_board(); }
  std::vector<DataCall> parts_of(const DataCall& call) const override { return inner_->parts_of(call); }
  std::vector<int> lost() const override { return inner_->lost(); }
  void abort(const Error& cause) override { inner_->abort(cause); }

  EngineOp start(const DataCall& call, Milliseconds timeout) override {
    if (part_ == "across") death_.at("across");
    if (part_ == "hierarchy") death_.at("data");
    EngineOp op = inner_->start(call, timeout);
    if (part_ == "hierarchy") death_.at("collect");
    if (part_ == "across" && !op.then) {
      op.finish = [this, finish = std::move(op.finish)](double divisor) {
        death_.at("across_back");
        if (finish) finish(divisor);
      };
    }
    return op;
  }

  EngineOp gather_bytes(const void* block, std::size_t bytes, Milliseconds timeout) override {
    if (part_ == "hierarchy") death_.at("headers");
    EngineOp op = inner_->gather_bytes(block, bytes, timeout);
    if (part_ == "leaders") {
      op.gathered = [this, gathered = op.gathered] {
        death_.at("headers_back");
        return gathered();
      };
    }
    return op;
  }

 private:
  std::unique_ptr<Engine> inner_;
  const Death& death_;
  std::string part_;
};

std::string told_in(const std::string& folder, int rank) { return folder + "/rank" + std::to_string(rank); }

/// Arguments: kind, phase, victim, folder, rank.
int rank_process(const Arguments& a) {
  const int rank = std::stoi(a.at(4));
  static Death death;
  if (rank == std::stoi(a.at(2))) death.phase = a.at(1);
  const GroupOptions options{.rank = rank,
                             .size = 4,
                             .store = std::make_shared<FolderStore>(a.at(3)),
                             .timeout = kDeadline,
                             .start_timeout = kDeadline};
  const auto among = [&](const char* part, const GroupOptions& own) -> std::unique_ptr<Engine> {
    return std::make_unique<Mortal>(kinds().at(a.at(0))(part, own), death, part);
  };
  IssuedGroup group(std::make_unique<Mortal>(make_emulated_hosts(kHosts, options, among), death, "hierarchy"));
  std::vector<float> data(100'000);
  try {
    for (int call = 0;; ++call) {
      if (call == 3) death.armed = true;
      group.all_reduce({data.data(), data.size(), Dtype::f32}, {}).wait();
    }
  } catch (const Error& error) {
    std::ofstream(told_in(a.at(3), rank)) << to_string(error.code()) << ": " << error.what();
    return kEnded;
  }
}

const RegisterChild kRank("hierarchy-phase", rank_process);

}  // namespace

PhasesOfDeath::PhasesOfDeath(const std::string& name, EngineAmong among) : name_(name) {
  kinds()[name] = std::move(among);
}

const std::vector<std::string>& PhasesOfDeath::all() {
  static const std::vector<std::string> phases{"headers", "headers_back", "data", "collect", "across", "across_back"};
  return phases;
}

void PhasesOfDeath::run(const std::string& phase, int victim) const {
  const TemporaryFolder folder;
  std::vector<Child> ranks;
  for (int rank = 0; rank < 4; ++rank)
    ranks.push_back(
        start_child("hierarchy-phase", {name_, phase, std::to_string(victim), folder.path(), std::to_string(rank)}));
  EXPECT_EQ(ranks[static_cast<std::size_t>(victim)].wait(), 128 + SIGKILL) << phase;
  const auto died = std::chrono::steady_clock::now();
  for (int rank = 0; rank < 4; ++rank) {
    if (rank == victim) continue;
    EXPECT_EQ(ranks[static_cast<std::size_t>(rank)].wait(), kEnded);
    std::ostringstream text;
    text << std::ifstream(told_in(folder.path(), rank)).rdbuf();
    EXPECT_EQ(text.str().find("peer_lost: "), 0u) << phase << ", rank " << rank << ": " << text.str();
    // "rank 2 died", "rank 2 does not answer"; perhaps with one that has left since because of it, as "ranks 1, 2 died
    // or left".
    const std::regex named("ranks? ([0-9], )*" + std::to_string(victim) + "(, [0-9])* d");
    EXPECT_TRUE(std::regex_search(text.str(), named)) << phase << ", rank " << rank << ": " << text.str();
  }
  EXPECT_LT(std::chrono::steady_clock::now() - died, kSoon) << phase;
}

}  // namespace unisono::testing

#include <csignal>
#include <filesystem>
#include <map>

#include "comm/contract.h"
#include "comm/test_store.h"
#include "process.h"

// Ranks that are processes: this program started again for each.

namespace unisono::testing {
namespace {

std::map<std::string, Transport>& transports() {
  static std::map<std::string, Transport> all;
  return all;
}

/// A folder that goes when the test ends.
class Folder {
 public:
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "unisono-test-XXXXXX").string();
    if (mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("no temporary folder");
    path_ = pattern;
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

void die_at_once(const Transport& transport, ProcessGroup& group) {
  group.barrier().wait();
  if (group.rank() == 1) raise(SIGKILL);
  Bytes data(400000);
  const auto failure = failure_of([&] { group.all_reduce(buffer_of(data, Dtype::f32)).wait(); });
  require(failure && failure->code == ErrorCode::peer_lost,
          "expected peer_lost, got " + (failure ? failure->text : "none"));
  require(!transport.names_the_dead || failure->text.find("rank 1") != std::string::npos,
          "rank 1 is not in: " + failure->text);
  const auto later = failure_of([&] { group.barrier().wait(); });
  require(later && later->code == ErrorCode::peer_lost, "a later call does not fail with the first cause");
}

const std::map<std::string, std::function<void(const Transport&, ProcessGroup&)>> kBodies = {
    {"chaos", [](const Transport& t, ProcessGroup& group) { chaos(t, group, 5, 400); }},
    {"die", [](const Transport& t, ProcessGroup& group) { die_at_once(t, group); }},
};

/// Arguments: transport, body, folder of the store, rank, size.
int rank_process(const Arguments& a) {
  const int rank = std::stoi(a.at(3)), size = std::stoi(a.at(4));
  const Transport& transport = transports().at(a.at(0));
  const auto group = transport.world(size, kPatience)({.rank = rank,
                                                       .size = size,
                                                       .store = std::make_shared<FolderStore>(a.at(2)),
                                                       .timeout = kPatience,
                                                       .start_timeout = kPatience});
  kBodies.at(a.at(1))(transport, *group);
  return 0;
}

const RegisterChild kRank("contract_rank", rank_process);

std::vector<int> run_processes(const Transport& transport, const std::string& body, int size) {
  const Folder folder;
  std::vector<Child> children;
  for (int r = 0; r < size; ++r) {
    children.push_back(
        start_child("contract_rank", {transport.name, body, folder.path(), std::to_string(r), std::to_string(size)}));
  }
  std::vector<int> codes;
  for (Child& child : children) codes.push_back(child.wait());
  return codes;
}

}  // namespace

void register_for_processes(const Transport& transport) {
  if (transport.processes) transports().emplace(transport.name, transport);
}

TEST_P(Contract, ChaosOfProcesses) {
  if (!GetParam().processes) GTEST_SKIP() << GetParam().name << " ranks cannot be processes";
  for (int size : {2, 4})
    EXPECT_EQ(std::vector<int>(static_cast<std::size_t>(size), 0), run_processes(GetParam(), "chaos", size));
}

TEST_P(Contract, AKilledProcessIsNoticed) {
  if (!GetParam().processes) GTEST_SKIP() << GetParam().name << " ranks cannot be processes";
  EXPECT_EQ((std::vector<int>{0, 128 + SIGKILL, 0}), run_processes(GetParam(), "die", 3));
}

}  // namespace unisono::testing

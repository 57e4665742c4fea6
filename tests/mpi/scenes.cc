#include "mpi/scenes.h"

#include <dlfcn.h>
#include <unisono/make_group.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <map>
#include <thread>

#include "comm/contract.h"
#include "comm/mpi/engine.h"

namespace unisono::testing {
namespace {

using Clock = std::chrono::steady_clock;

void say(const ProcessGroup& group, const std::string& text) {
  const std::string line = "rank " + std::to_string(group.rank()) + ": " + text + "\n";
  std::fputs(line.c_str(), stdout);
  std::fflush(stdout);
}

void tell(ProcessGroup& group, const std::function<void()>& call) {
  const auto begin = Clock::now();
  const auto failure = failure_of(call);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - begin).count();
  say(group, failure
                 ? std::string(to_string(failure->code)) + " after " + std::to_string(took) + " ms: " + failure->text
                 : "no failure");
}

void sum(ProcessGroup& group) {
  std::vector<float> data(100'000, static_cast<float>(group.rank() + 1));
  AllReduceOptions options;
  options.op = ReduceOp::avg;
  group.all_reduce({data.data(), data.size(), Dtype::f32}, options).wait();
  say(group, std::to_string(group.size()) + " ranks, mean " + std::to_string(data.back()));
}

void mismatch(ProcessGroup& group) {
  std::vector<float> data(group.rank() == 0 ? 5 : 7);
  tell(group, [&] { group.all_reduce({data.data(), data.size(), Dtype::f32}).wait(); });
}

// Rank 1 stays away for longer than the others wait, then learns why; they stay until it has, for launchers end a job
// with its first rank.
void absent(ProcessGroup& group) {
  group.barrier().wait();
  AllReduceOptions options;
  options.timeout = std::chrono::milliseconds(500);
  if (group.rank() == 1) std::this_thread::sleep_for(3 * options.timeout);
  std::vector<float> data(5);
  tell(group, [&] { group.all_reduce({data.data(), data.size(), Dtype::f32}, options).wait(); });
  if (group.rank() != 1) std::this_thread::sleep_for(4 * options.timeout);
}

// Rank 1 dies; the launcher, if it lets the others live, leaves them to their deadline.
void killed(ProcessGroup& group) {
  group.barrier().wait();
  if (group.rank() == 1) raise(SIGKILL);
  AllReduceOptions options;
  options.timeout = std::chrono::seconds(3);
  std::vector<float> data(1'000'000);
  tell(group, [&] { group.all_reduce({data.data(), data.size(), Dtype::f32}, options).wait(); });
}

// What the arguments' checks keep from MPI otherwise.
void error(ProcessGroup& group) {
  MpiLibrary& library = MpiLibrary::instance();
  MpiEngine engine(library, library.world(), {});
  float x = 0;
  tell(group, [&] {
    engine.start({Operation::broadcast, {.data = &x, .count = 1}, {}, ReduceOp::sum, 99}, std::chrono::seconds(1));
  });
}

// The program itself starts MPI, too modestly. Both ABIs have 1 for MPI_THREAD_FUNNELED.
void start_funneled() {
  MpiLibrary::why_not();  // loads MPI
  const auto init = reinterpret_cast<int (*)(int*, char***, int, int*)>(dlsym(RTLD_DEFAULT, "MPI_Init_thread"));
  int provided = 0;
  require(init != nullptr && init(nullptr, nullptr, 1, &provided) == 0, "MPI_Init_thread");
}

}  // namespace

int play(const std::string& name) try {
  if (name == "funneled") start_funneled();
  const std::map<std::string, RankBody> scenes = {{"sum", sum},         {"mismatch", mismatch}, {"absent", absent},
                                                  {"killed", killed},   {"error", error},       {"funneled", sum},
                                                  {"another_size", sum}};
  GroupOptions options{.timeout = std::chrono::seconds(20), .start_timeout = std::chrono::seconds(20)};
  if (name == "another_size") options.size = 3;
  const auto group = make_group("mpi", options);
  scenes.at(name)(*group);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "mpi_tests: %s\n", error.what());
  return 1;
}

}  // namespace unisono::testing

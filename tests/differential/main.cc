// The differential driver: random models, options and programs, ours on ranks against a single process.
//   differential_tests                        the kept seeds and 500 cases
//   differential_tests --cases N --from SEED  N cases from SEED on; --seconds T: until T seconds have passed
//   differential_tests --seed S               one case, described
#include <ATen/Parallel.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "differential/coverage.h"
#include "differential/excluded.h"
#include "differential/kept_seeds.h"
#include "differential/runner.h"
#include "differential/shrink.h"
#include "differential/watchdog.h"

namespace unisono::differential {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

struct Arguments {
  std::uint64_t from = 1;
  std::uint64_t cases = 500;
  double seconds = 0;  // 0: no limit
  double timeout_s = 20;
  std::optional<std::uint64_t> seed;
  int world = 0;  // 0: as drawn
  int stop_after = 3;
  bool coverage = false;
  bool shrink = true;
};

[[noreturn]] void usage(const char* text) {
  std::fprintf(
      stderr,
      "%s\nusage: differential_tests [--cases N] [--from SEED] [--seconds T] [--seed S] [--world N] [--timeout T]\n"
      "                          [--stop-after DIFFERENCES] [--coverage] [--no-shrink]\n",
      text);
  std::exit(64);
}

Arguments parse(int argc, char** argv) {
  Arguments a;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--coverage") {
      a.coverage = true;
      continue;
    }
    if (name == "--no-shrink") {
      a.shrink = false;
      continue;
    }
    if (++i == argc) usage((name + " needs a value").c_str());
    char* end = nullptr;
    const double value = std::strtod(argv[i], &end);
    if (end == argv[i] || *end != 0 || value < 0) usage((name + " needs a number, not " + argv[i]).c_str());
    if (name == "--cases")
      a.cases = static_cast<std::uint64_t>(value);
    else if (name == "--from")
      a.from = static_cast<std::uint64_t>(value);
    else if (name == "--seconds")
      a.seconds = value;
    else if (name == "--timeout")
      a.timeout_s = value;
    else if (name == "--seed")
      a.seed = std::strtoull(argv[i], nullptr, 10);
    else if (name == "--world")
      a.world = static_cast<int>(value);
    else if (name == "--stop-after")
      a.stop_after = static_cast<int>(value);
    else
      usage(("no argument " + name).c_str());
  }
  return a;
}

class Driver {
 public:
  explicit Driver(const Arguments& arguments)
      : arguments_(arguments), pool_(std::chrono::nanoseconds(static_cast<std::int64_t>(arguments.timeout_s * 1e9))) {}

  /// False when no more cases are wanted.
  bool run(std::uint64_t seed) {
    const Case c = draw_case(seed);
    if (arguments_.world != 0 && c.world != arguments_.world) return true;
    current_ = seed;
    watchdog_.feed();
    if (arguments_.seed) std::printf("%s", describe(c).c_str());
    coverage_.add(c);
    ++cases_;
    const auto difference = difference_of(c, pool_);
    if (!difference) return true;
    ++differences_;
    std::printf("DIFFERENCE in case %d: seed %llu\n%s%s\n", cases_, static_cast<unsigned long long>(seed),
                describe(c).c_str(), difference->c_str());
    std::fflush(stdout);
    if (arguments_.shrink) print_smaller(c);
    return differences_ < arguments_.stop_after;
  }

  int finish() {
    if (arguments_.coverage) std::printf("%s", coverage_.table().c_str());
    std::printf("%s\n", coverage_.summary().c_str());
    for (const auto& pair : coverage_.uncovered()) {
      if (arguments_.coverage) std::printf("  not seen: %s\n", pair.c_str());
    }
    for (const char* reason : kExcluded) std::printf("left out: %s\n", reason);
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    std::printf("%d cases, %d differences, %.1f s\n", cases_, differences_, seconds);
    return differences_ == 0 && cases_ > 0 ? 0 : 1;
  }

  bool out_of_time() const {
    return arguments_.seconds > 0 && Clock::now() - start_ > std::chrono::duration<double>(arguments_.seconds);
  }

 private:
  void print_smaller(const Case& c) {
    const auto until = Clock::now() + 30s;
    const Case smaller = shrink(c, [&](const Case& candidate) {
      watchdog_.feed();
      if (Clock::now() > until) return false;
      Case fresh = candidate;
      foresee(fresh.program, fresh.model, fresh.options.uneven_accumulation);
      return difference_of(fresh, pool_).has_value();
    });
    const auto difference = difference_of(smaller, pool_);
    std::printf("the same in less:\n%s%s\n", describe(smaller).c_str(),
                difference.value_or("(not every time)").c_str());
    std::fflush(stdout);
  }

  Arguments arguments_;
  RankPool pool_;
  Coverage coverage_;
  Clock::time_point start_ = Clock::now();
  int cases_ = 0;
  int differences_ = 0;
  std::atomic<std::uint64_t> current_{0};
  Watchdog watchdog_{180s, [this] {
                       std::printf("case of seed %llu did not end\n", static_cast<unsigned long long>(current_.load()));
                       std::fflush(stdout);
                       std::_Exit(3);
                     }};
};

int run(const Arguments& arguments) {
  at::set_num_threads(1);
  Driver driver(arguments);
  if (arguments.seed) {
    driver.run(*arguments.seed);
    return driver.finish();
  }
  bool more = true;
  for (std::uint64_t seed : kKeptSeeds) more = more && driver.run(seed);
  for (std::uint64_t i = 0; more && i < arguments.cases && !driver.out_of_time(); ++i)
    more = driver.run(arguments.from + i);
  return driver.finish();
}

}  // namespace
}  // namespace unisono::differential

int main(int argc, char** argv) { return unisono::differential::run(unisono::differential::parse(argc, argv)); }

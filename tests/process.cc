#include "process.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <map>
#include <stdexcept>

namespace unisono::testing {
namespace {

const std::string kFlag = "--run-child";

std::map<std::string, ChildFunction>& functions() {
  static std::map<std::string, ChildFunction> all;
  return all;
}

}  // namespace

RegisterChild::RegisterChild(const std::string& name, ChildFunction function) {
  if (!functions().emplace(name, std::move(function)).second) throw std::logic_error("child " + name + " named twice");
}

bool run_as_child(int argc, char** argv, int* exit_code) {
  if (argc < 3 || argv[1] != kFlag) return false;
  const auto found = functions().find(argv[2]);
  *exit_code = 99;
  if (found == functions().end()) {
    std::fprintf(stderr, "no child function %s\n", argv[2]);
    return true;
  }
  try {
    *exit_code = found->second(Arguments(argv + 3, argv + argc));
  } catch (const std::exception& e) {
    std::fprintf(stderr, "child %s: %s\n", argv[2], e.what());
  }
  return true;
}

Child start_child(const std::string& name, const Arguments& arguments) {
  std::vector<std::string> words = {"/proc/self/exe", kFlag, name};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_t pid = -1;
  if (posix_spawn(&pid, "/proc/self/exe", nullptr, nullptr, argv.data(), environ) != 0) {
    throw std::runtime_error("cannot start a child of this test");
  }
  return Child(pid);
}

Child::~Child() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

void Child::signal(int number) const {
  if (pid_ > 0) kill(pid_, number);
}

int Child::wait() {
  int status = 0;
  while (waitpid(pid_, &status, 0) < 0 && errno == EINTR) {
  }
  pid_ = -1;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

}  // namespace unisono::testing

#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace unisono::testing {

using Arguments = std::vector<std::string>;
using ChildFunction = std::function<int(const Arguments&)>;

/// Names a function that this program runs when it is started again as a child. One static object per function.
struct RegisterChild {
  RegisterChild(const std::string& name, ChildFunction function);
};

/// Whether the program was started by `start_child`; then its function has run and `exit_code` holds what it returned.
bool run_as_child(int argc, char** argv, int* exit_code);

/// This program started again to run a registered function. Killed and waited for when it goes out of scope.
class Child {
 public:
  explicit Child(pid_t pid) : pid_(pid) {}
  Child(Child&& other) noexcept : pid_(other.pid_) { other.pid_ = -1; }
  ~Child();

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  /// The exit code, or 128 + signal; blocks.
  int wait();

 private:
  pid_t pid_;
};

/// Starts this program again (never a fork without exec: threads of libraries do not survive it).
Child start_child(const std::string& name, const Arguments& arguments = {});

}  // namespace unisono::testing

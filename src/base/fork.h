#pragma once

namespace unisono {

/// Tells whether this process has been forked since the mark was made. Memory that is shared between processes, and
/// threads, are the parent's: a child lets go of neither.
class ForkMark {
 public:
  ForkMark();
  bool forked() const;

 private:
  int made_in_;  // how many forks deep
};

}  // namespace unisono

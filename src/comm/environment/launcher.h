#pragma once

#include <utility>

#include "comm/environment/reader.h"

namespace unisono {

/// Who may have started this process, and the variables by which it tells ranks who they are.
struct Launcher {
  Environment::Source source;
  const char* rank;
  const char* size;
  const char* local_size;  ///< how many of the ranks are on this host; null where not told
  const char* name;        ///< for people
};

struct RankAndSize {
  int rank;
  int size;
  bool operator==(const RankAndSize&) const = default;
};

/// Null for `none` and `arguments`.
const Launcher* launcher_of(Environment::Source source);

/// The first launcher, in the order of precedence that init.h documents, that has told rank and size; null without.
/// *Throws* `invalid_argument` where it tells half of it, nonsense, or RANK contradicts the launcher below it.
struct Found {
  const Launcher* launcher;
  RankAndSize ranks;
};
std::optional<Found> find_launcher(const EnvironmentReader& env);

/// *Throws* `invalid_argument` unless 0 <= rank < size.
void check_range(RankAndSize ranks, const std::string& evidence);

/// Whether a launcher that tells of these ranks says that they are on several hosts. `source`: where the ranks come
/// from; with `arguments` any launcher counts whose ranks are the same.
bool launcher_spans_hosts(const EnvironmentReader& env, Environment::Source source, RankAndSize ranks);

/// The launcher's own name of the job; it is the same on all ranks of the job and on no others.
std::string job_name(const EnvironmentReader& env);

}  // namespace unisono

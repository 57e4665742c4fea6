#include "base/kept_name.h"

#include <mutex>
#include <set>

namespace unisono {

const char* kept_name(const std::string& name) {
  static std::mutex mutex;
  static std::set<std::string> names;
  const std::lock_guard lock(mutex);
  return names.insert(name).first->c_str();
}

}  // namespace unisono

#include <unisono/c10d.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <utility>

#include "base/clock.h"
#include "comm/c10d/first_line.h"
#include "comm/c10d/store_for_torch.h"

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kLongestPause{10};

class C10dStore final : public Store {
 public:
  explicit C10dStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::string& value) override {
    guarded("set", key, [&] { store_->set(key, value); });
  }

  std::optional<std::string> get(const std::string& key, std::chrono::nanoseconds timeout) override {
    std::optional<std::string> out;
    guarded("get", key, [&] {
      if (timeout.count() <= 0 ? store_->check({key}) : appears(key, timeout)) out = store_->get_to_str(key);
    });
    return out;
  }

  std::int64_t add(const std::string& key, std::int64_t amount) override {
    std::int64_t out = 0;
    guarded("add", key, [&] { out = store_->add(key, amount); });
    return out;
  }

 private:
  // Asked again and again rather than waited for: a TCPStore prints two warnings for every wait that times out, and
  // start-up waits in short turns to notice ranks that were claimed twice.
  bool appears(const std::string& key, std::chrono::nanoseconds timeout) {
    const auto deadline = deadline_after(timeout);
    for (auto pause = std::chrono::milliseconds(1); !store_->check({key}); pause = std::min(2 * pause, kLongestPause)) {
      if (std::chrono::steady_clock::now() >= deadline) return false;
      std::this_thread::sleep_for(pause);
    }
    return true;
  }

  template <typename Body>
  static void guarded(const char* what, const std::string& key, Body body) {
    try {
      body();
    } catch (const c10::DistNetworkError& e) {
      throw Error(ErrorCode::peer_lost,
                  std::string("the store does not answer to ") + what + " of '" + key +
                      "'; the process that hosts it (rank 0 or the launcher) is gone: " + first_line(e));
    } catch (const c10::Error& e) {
      throw Error(ErrorCode::internal,
                  std::string("the store failed at ") + what + " of '" + key + "': " + first_line(e));
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  friend c10::intrusive_ptr<c10d::Store> unisono::torch_store_or_null(const Store& store);
};

}  // namespace

c10::intrusive_ptr<c10d::Store> torch_store_or_null(const Store& store) {
  const auto* ours = dynamic_cast<const C10dStore*>(&store);
  return ours ? ours->store_ : nullptr;
}

c10::intrusive_ptr<c10d::Store> torch_store(const Store& store) {
  if (auto theirs = torch_store_or_null(store)) return theirs;
  throw Error(ErrorCode::invalid_argument,
              "between hosts ranks need a store of torch.distributed to meet in, and this is none");
}

std::shared_ptr<Store> make_store(c10::intrusive_ptr<c10d::Store> store) {
  if (!store) throw Error(ErrorCode::invalid_argument, "make_store: no store was given");
  return std::make_shared<C10dStore>(std::move(store));
}

}  // namespace unisono

#include "comm/c10d/store_for_torch.h"

#include <unisono/c10d.h>

#include <algorithm>
#include <mutex>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace unisono {
namespace {

constexpr std::chrono::milliseconds kLongestPause{10};

// Asks and sleeps instead of waiting inside the store, so that one thread's wait does not hold up the others'.
class StoreOverOurs final : public c10d::Store {
 public:
  struct Shared {
    std::mutex mutex;
    std::shared_ptr<unisono::Store> store;
  };

  StoreOverOurs(std::shared_ptr<Shared> shared, std::chrono::milliseconds timeout)
      : c10d::Store(timeout), shared_(std::move(shared)) {}

  c10::intrusive_ptr<c10d::Store> clone() override { return c10::make_intrusive<StoreOverOurs>(shared_, timeout_); }

  using c10d::Store::set;
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    const std::lock_guard lock(shared_->mutex);
    shared_->store->set(key, std::string(value.begin(), value.end()));
  }

  std::vector<std::uint8_t> get(const std::string& key) override {
    const std::string value = await(key, timeout_);
    return {value.begin(), value.end()};
  }

  std::int64_t add(const std::string& key, std::int64_t value) override {
    const std::lock_guard lock(shared_->mutex);
    return shared_->store->add(key, value);
  }

  bool check(const std::vector<std::string>& keys) override {
    return std::all_of(keys.begin(), keys.end(), [this](const std::string& key) { return look(key).has_value(); });
  }

  void wait(const std::vector<std::string>& keys) override { wait(keys, timeout_); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) override {
    const auto deadline = deadline_after(timeout);
    for (const auto& key : keys)
      await(key, std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now()));
  }

  bool deleteKey(const std::string&) override {
    C10_THROW_ERROR(NotImplementedError, "a unisono store deletes no keys");
  }
  std::int64_t getNumKeys() override { C10_THROW_ERROR(NotImplementedError, "a unisono store counts no keys"); }

 private:
  std::optional<std::string> look(const std::string& key) {
    const std::lock_guard lock(shared_->mutex);
    return shared_->store->get(key, std::chrono::nanoseconds(0));
  }

  std::string await(const std::string& key, std::chrono::milliseconds timeout) {
    const auto deadline = deadline_after(timeout);
    for (auto pause = std::chrono::milliseconds(1);; pause = std::min(2 * pause, kLongestPause)) {
      if (auto value = look(key)) return *std::move(value);
      if (std::chrono::steady_clock::now() >= deadline)
        C10_THROW_ERROR(DistStoreError, "nobody set '" + key + "' within " + std::to_string(timeout.count()) + " ms");
      std::this_thread::sleep_for(pause);
    }
  }

  std::shared_ptr<Shared> shared_;
};

}  // namespace

c10::intrusive_ptr<c10d::Store> store_for_torch(std::shared_ptr<Store> store) {
  if (auto theirs = torch_store_or_null(*store)) return theirs;
  auto shared = std::make_shared<StoreOverOurs::Shared>();
  shared->store = std::move(store);
  return c10::make_intrusive<StoreOverOurs>(std::move(shared), c10d::Store::kDefaultTimeout);
}

}  // namespace unisono

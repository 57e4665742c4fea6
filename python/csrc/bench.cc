#include <fcntl.h>
#include <sys/mman.h>
#include <unisono/process_group.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>

#include "bindings.h"

// What `unisono bench all-reduce` times in C++, because a call takes about as long as Python needs to make it.

namespace unisono::python {

namespace {

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// All-reduces of f32 in memory of the group's own.
class InPlace {
 public:
  InPlace(std::shared_ptr<ProcessGroup> group, std::size_t bytes) : group_(std::move(group)) {
    Buffer memory = group_->allocate(bytes);
    floats_ = {.data = memory.data, .count = bytes / sizeof(float), .dtype = Dtype::f32, .owner = memory.owner};
    check();
  }

  double burst(int warm_up, int calls) {
    for (int i = 0; i < warm_up; ++i) group_->all_reduce(floats_).wait();
    group_->barrier().wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) group_->all_reduce(floats_).wait();
    return seconds_since(begin);
  }

 private:
  void check() {
    auto* values = static_cast<float*>(floats_.data);
    for (std::size_t i = 0; i < floats_.count; ++i) values[i] = static_cast<float>(group_->rank() + 1);
    group_->all_reduce(floats_).wait();
    const auto expected = static_cast<float>(group_->size() * (group_->size() + 1) / 2);
    for (std::size_t i = 0; i < floats_.count; ++i) {
      if (values[i] != expected)
        throw Error(ErrorCode::internal, "bench: element " + std::to_string(i) + " is " + std::to_string(values[i]) +
                                             " after an all-reduce, not " + std::to_string(expected));
    }
    std::memset(floats_.data, 0, floats_.bytes());
  }

  std::shared_ptr<ProcessGroup> group_;
  Buffer floats_;
};

template <int N>
__attribute__((target_clones("avx2", "default"))) void sum_slices(float* const* copies, std::size_t begin,
                                                                  std::size_t end) {
  float* a = copies[0];
  float* b = copies[1];
  float* c = copies[N > 2 ? 2 : 0];
  float* d = copies[N > 2 ? 3 : 1];
#pragma GCC ivdep
  for (std::size_t i = begin; i < end; ++i) {
    float sum = a[i] + b[i];
    if constexpr (N > 2) sum += c[i] + d[i];
    a[i] = sum;
    b[i] = sum;
    if constexpr (N > 2) c[i] = d[i] = sum;
  }
}

/// The least an all-reduce in shared memory must do: read N slices, write N copies; here without any synchronisation.
/// `path` leads to memory that all ranks map: N copies one after the other.
class Limit {
 public:
  Limit(std::shared_ptr<ProcessGroup> group, const std::string& path, std::size_t bytes)
      : group_(std::move(group)), bytes_(bytes), stride_((bytes + 4095) / 4096 * 4096) {
    const int n = group_->size();
    if (n != 2 && n != 4)
      throw Error(ErrorCode::invalid_argument,
                  "bench: the limit is known for 2 and 4 ranks, not for " + std::to_string(n));
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0) throw Error(ErrorCode::internal, "bench: cannot open " + path + ": " + std::strerror(errno));
    void* data = mmap(nullptr, stride_ * n, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
    const int error = errno;
    close(fd);
    if (data == MAP_FAILED) throw Error(ErrorCode::internal, std::string("bench: mmap: ") + std::strerror(error));
    memory_ = static_cast<char*>(data);
    for (int r = 0; r < n; ++r) copies_[r] = reinterpret_cast<float*>(memory_ + stride_ * r);
  }
  ~Limit() { munmap(memory_, stride_ * group_->size()); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

  double burst(int warm_up, int calls) {
    for (int i = 0; i < warm_up; ++i) pass();
    group_->barrier().wait();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) pass();
    return seconds_since(begin);
  }

 private:
  void pass() {
    const std::size_t count = bytes_ / sizeof(float), n = group_->size(), r = group_->rank();
    const auto cut = [&](std::size_t rank) { return count * rank / n / 16 * 16; };
    const std::size_t begin = cut(r), end = r + 1 == n ? count : cut(r + 1);
    n == 2 ? sum_slices<2>(copies_, begin, end) : sum_slices<4>(copies_, begin, end);
  }

  std::shared_ptr<ProcessGroup> group_;
  std::size_t bytes_;
  std::size_t stride_;
  char* memory_ = nullptr;
  float* copies_[4] = {};
};

}  // namespace

void bind_bench(py::module_& module) {
  auto bench = module.def_submodule("bench", "Timed loops of `unisono bench`; not for users.");
  py::class_<InPlace>(bench, "InPlace")
      .def(py::init<std::shared_ptr<ProcessGroup>, std::size_t>(), py::arg("group"), py::arg("bytes"), WithoutGil())
      .def("burst", &InPlace::burst, py::arg("warm_up"), py::arg("calls"), WithoutGil());
  py::class_<Limit>(bench, "Limit")
      .def(py::init<std::shared_ptr<ProcessGroup>, const std::string&, std::size_t>(), py::arg("group"),
           py::arg("path"), py::arg("bytes"), WithoutGil())
      .def("burst", &Limit::burst, py::arg("warm_up"), py::arg("calls"), WithoutGil());
}

}  // namespace unisono::python

#include <sstream>
#include <thread>

#include "comm/contract.h"

// What goes wrong is told on every rank, with names, and the group stays unusable with the first cause.

namespace unisono::testing {
namespace {

using Call = std::function<void(ProcessGroup&)>;

std::string shown(const std::optional<Failure>& f) {
  return f ? "[" + std::string(to_string(f->code)) + "] " + f->text : "no failure";
}

void require_text(const Failure& failure, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    require(failure.text.find(part) != std::string::npos, "\"" + part + "\" is not in: " + failure.text);
  }
}

Failure require_failure(ErrorCode code, const std::function<void()>& call) {
  const auto failure = failure_of(call);
  require(failure && failure->code == code, "expected " + std::string(to_string(code)) + ", got " + shown(failure));
  return *failure;
}

/// Every later call throws the first cause.
void require_poisoned(ProcessGroup& group, const Failure& cause) {
  Bytes data(8);
  const std::vector<Call> calls = {[&](auto& g) { g.all_reduce(buffer_of(data, Dtype::f32)).wait(); },
                                   [](auto& g) { g.barrier().wait(); }, [](auto& g) { g.allocate(64); }};
  for (const Call& call : calls) {
    const Failure later = require_failure(cause.code, [&] { call(group); });
    require(later.text.find(cause.text) != std::string::npos,
            "a later call says:\n  " + later.text + "\nand the first said:\n  " + cause.text);
  }
}

AllReduceOptions reduce(ReduceOp op) {
  AllReduceOptions options;
  options.op = op;
  return options;
}

AllReduceOptions tagged(std::int64_t step, std::int32_t bucket, const char* what) {
  AllReduceOptions options;
  options.tag = {.step = step, .bucket = bucket, .what = what};
  return options;
}

AllReduceOptions with_record(std::size_t words, std::size_t sums) {
  AllReduceOptions options;
  options.control.words.resize(words);
  options.control.sums.resize(sums);
  return options;
}

Call all_reduce(std::size_t count, Dtype dtype = Dtype::f32, AllReduceOptions options = {}) {
  return [=](ProcessGroup& group) {
    Bytes data(count * size_of(dtype), 0x11);
    const Bytes before = data;
    Work work = group.all_reduce(buffer_of(data, dtype), options);
    try {
      work.wait();
    } catch (const Error&) {
      require_same(before, data.data(), "data of a mismatched call");
      throw;
    }
  };
}

Call broadcast(std::size_t count, int root) {
  return [=](ProcessGroup& group) {
    Bytes data(count * 4);
    group.broadcast(buffer_of(data, Dtype::f32), root).wait();
  };
}

Call all_gather(std::size_t count) {
  return [=](ProcessGroup& group) {
    Bytes in(count * 4, 0x11), out(in.size() * static_cast<std::size_t>(group.size()), 0x22);
    const Bytes before = out;
    Work work = group.all_gather(buffer_of(out, Dtype::f32), buffer_of(in, Dtype::f32));
    try {
      work.wait();
    } catch (const Error&) {
      require_same(before, out.data(), "data of a mismatched call");
      throw;
    }
  };
}

Call reduce_scatter(std::size_t count) {
  return [=](ProcessGroup& group) {
    Bytes out(count * 4, 0x11), in(out.size() * static_cast<std::size_t>(group.size()), 0x22);
    const Bytes before = out;
    Work work = group.reduce_scatter(buffer_of(out, Dtype::f32), buffer_of(in, Dtype::f32));
    try {
      work.wait();
    } catch (const Error&) {
      require_same(before, out.data(), "data of a mismatched call");
      throw;
    }
  };
}

/// One of these counts of f32, in the words of any transport; an alternative for `mismatch`.
std::string elements(std::initializer_list<int> counts) {
  std::string any;
  for (int n : counts) {
    for (const char* words : {" elements", " x f32", " f32"})
      any += (any.empty() ? "" : "|") + std::to_string(n) + words;
  }
  return any;
}

void require_any(const Failure& failure, const std::string& alternatives) {
  std::istringstream in(alternatives);
  for (std::string part; std::getline(in, part, '|');) {
    if (failure.text.find(part) != std::string::npos) return;
  }
  require(false, "none of \"" + alternatives + "\" is in: " + failure.text);
}

/// Runs one call on all ranks but the last and another on the last: the same error everywhere, with both sides in it.
/// A part is one text, or several with | between them of which one must be there.
void mismatch(const Transport& transport, const Call& one, const Call& other, const std::vector<std::string>& parts) {
  for (int size : {2, 3}) {
    std::vector<Failure> failures(static_cast<std::size_t>(size));
    run_ranks(transport, size, [&](ProcessGroup& group) {
      group.barrier().wait();
      const bool last = group.rank() == size - 1;
      const Failure failure = require_failure(ErrorCode::mismatch, [&] { (last ? other : one)(group); });
      for (const std::string& part : parts) require_any(failure, part);
      require_text(failure, {"rank " + std::to_string(size - 1)});
      failures[static_cast<std::size_t>(group.rank())] = failure;
      require_poisoned(group, failure);
    });
    if (transport.own_rank >= 0) continue;  // of one rank there is nothing to compare
    for (const Failure& f : failures) EXPECT_EQ(failures[0].text, f.text) << transport.name;
  }
}

}  // namespace

TEST_P(Contract, MismatchedCallsAreNamed) {
  if (!needs(3)) return;
  const Transport& t = GetParam();
  mismatch(t, all_reduce(2), all_reduce(3), {"all_reduce", elements({2}), elements({3})});
  mismatch(t, all_reduce(100000), all_reduce(200000), {elements({100000}), elements({200000})});
  mismatch(t, all_gather(300), all_gather(500), {"all_gather", elements({300}), elements({500})});
  // Transports count what goes in, for 2 or 3 ranks, or what comes out.
  mismatch(t, reduce_scatter(300), reduce_scatter(500),
           {"reduce_scatter", elements({300, 600, 900}), elements({500, 1000, 1500})});
  mismatch(t, all_reduce(4, Dtype::f32), all_reduce(4, Dtype::i32), {"f32", "i32"});
  mismatch(t, all_reduce(4), broadcast(4, 0), {"all_reduce", "broadcast"});
  mismatch(t, all_reduce(4, Dtype::f32, reduce(ReduceOp::sum)), all_reduce(4, Dtype::f32, reduce(ReduceOp::max)),
           {"sum", "max"});
  mismatch(t, broadcast(4, 0), broadcast(4, 1), {"broadcast", "root 0", "root 1"});
  mismatch(t, all_reduce(4), [](ProcessGroup& g) { g.barrier().wait(); }, {"all_reduce", "barrier"});
  mismatch(t, all_reduce(4, Dtype::f32, tagged(3, 0, "gradients")),
           all_reduce(4, Dtype::f32, tagged(4, 0, "gradients")), {"step 3", "step 4"});
  mismatch(t, all_reduce(4, Dtype::f32, tagged(3, 0, "gradients")),
           all_reduce(4, Dtype::f32, tagged(3, 1, "gradients")), {"bucket 0", "bucket 1"});
  mismatch(t, all_reduce(4, Dtype::f32, tagged(-1, -1, "gradients")),
           all_reduce(4, Dtype::f32, tagged(-1, -1, "digest")), {"gradients", "digest"});
  mismatch(t, all_reduce(4, Dtype::f32, with_record(1, 0)), all_reduce(4, Dtype::f32, with_record(2, 0)),
           {"of 1 word", "of 2 words"});
  mismatch(t, all_reduce(4, Dtype::f32, with_record(300, 0)), all_reduce(4, Dtype::f32, with_record(300, 5)),
           {"300 words and 0 sums", "300 words and 5 sums"});
}

TEST_P(Contract, WrongArgumentsAreLocal) {
  const int size = std::min(GetParam().max_ranks, 2);
  run_ranks(GetParam(), size, [&](ProcessGroup& group) {
    Bytes bytes(64);
    const Buffer f32 = buffer_of(bytes, Dtype::f32), i32 = buffer_of(bytes, Dtype::i32);
    const Buffer null = {.data = nullptr, .count = 3};
    Buffer cuda = f32;
    cuda.device = {.kind = Device::Kind::cuda};
    Buffer odd = f32;
    odd.count = static_cast<std::size_t>(size) + 1;
    AllReduceOptions no_such_sum;
    no_such_sum.divide_by_sum = 0;
    AllReduceOptions integer_mean = with_record(0, 1);
    integer_mean.divide_by_sum = 0;
    const std::vector<std::pair<std::string, Call>> wrong = {
        {"avg", [&](auto& g) { g.all_reduce(i32, reduce(ReduceOp::avg)); }},
        {"bit_and", [&](auto& g) { g.all_reduce(f32, reduce(ReduceOp::bit_and)); }},
        {"null", [&](auto& g) { g.all_reduce(null); }},
        {"null", [&](auto& g) { g.broadcast(null, 0); }},
        {"root", [&](auto& g) { g.broadcast(f32, -1); }},
        {"root", [&](auto& g) { g.broadcast(f32, size); }},
        {"CUDA", [&](auto& g) { g.all_reduce(cuda); }},
        {"divide_by_sum", [&](auto& g) { g.all_reduce(f32, no_such_sum); }},
        {"divide_by_sum", [&](auto& g) { g.all_reduce(i32, integer_mean); }},
        {"i32", [&](auto& g) { g.all_gather(i32, f32); }},
        {"elements", [&](auto& g) { g.all_gather(f32, odd); }},
        {"elements", [&](auto& g) { g.reduce_scatter(odd, f32); }},
    };
    for (const auto& [part, call] : wrong) {
      const Failure failure = require_failure(ErrorCode::invalid_argument, [&call = call, &group] { call(group); });
      require_text(failure, {part, "rank " + std::to_string(group.rank())});
    }
    std::vector<Bytes> inputs(static_cast<std::size_t>(size), bytes);
    group.all_reduce(i32).wait();  // the group still works, and in step
    group.barrier().wait();
  });
}

TEST_P(Contract, TheDeadlineNamesWhoIsMissing) {
  if (!needs(3)) return;
  for (int size : {2, 3}) {
    Meeting over(GetParam(), size);
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      CallOptions tag;
      tag.tag = {.step = 7, .bucket = 2, .what = "gradients"};
      for (int i = 0; i < 3; ++i) group.barrier(tag).wait();  // a group of groups knows the last call of each
      if (group.rank() == 1) {
        over.meet();
        require_failure(ErrorCode::timeout, [&] { group.barrier().wait(); });
        return;
      }
      Bytes data(40000);
      AllReduceOptions options;
      options.timeout = std::chrono::milliseconds(200);
      const auto begin = std::chrono::steady_clock::now();
      const Failure failure =
          require_failure(ErrorCode::timeout, [&] { group.all_reduce(buffer_of(data, Dtype::f32), options).wait(); });
      const auto took = std::chrono::steady_clock::now() - begin;
      if (size == 2) require(took >= options.timeout, "the deadline came too early");
      require(took < kPatience / 2, "the deadline of the call was not used");
      require_text(failure, {"rank 1", "all_reduce", "barrier", "7"});
      require_poisoned(group, failure);
      over.meet();
    });
  }
}

/// Polling alone must meet the deadline too.
TEST_P(Contract, ThePolledCallHasADeadline) {
  if (!needs(2)) return;
  Meeting over(GetParam(), 2);
  run_ranks(GetParam(), 2, [&](ProcessGroup& group) {
    if (group.rank() == 1) return over.meet();
    CallOptions options;
    options.timeout = std::chrono::milliseconds(100);
    Work work = group.barrier(options);
    const auto begin = std::chrono::steady_clock::now();
    while (!work.poll()) {
      require(std::chrono::steady_clock::now() - begin < kPatience / 2, "poll() does not know the deadline");
      std::this_thread::yield();
    }
    require(work.error() != nullptr, "a call ended well without rank 1");
    over.meet();
  });
}

TEST_P(Contract, AbortFromAnotherThread) {
  if (!needs(2)) return;
  const Error cause(ErrorCode::corrupt, "stopped by the test, on purpose");
  run_ranks(GetParam(), 2, [&](ProcessGroup& group) {
    group.barrier().wait();
    if (group.rank() == 1) {
      std::thread([&] { group.abort(cause); }).join();
      group.abort(Error(ErrorCode::internal, "a second cause"));
      const Failure failure = require_failure(ErrorCode::corrupt, [&] { group.barrier().wait(); });
      require_text(failure, {cause.what()});
    } else {
      Bytes data(400);
      const Failure failure =
          require_failure(ErrorCode::corrupt, [&] { group.all_reduce(buffer_of(data, Dtype::f32)).wait(); });
      require_text(failure, {cause.what()});
      require_poisoned(group, failure);
    }
  });
}

TEST_P(Contract, AbortInAWorldOfAnySize) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      group.barrier().wait();
      group.abort(Error(ErrorCode::mismatch, "all ranks give up"));
      const Failure failure = require_failure(ErrorCode::mismatch, [&] { group.barrier().wait(); });
      require_text(failure, {"all ranks give up"});
    });
  }
}

/// Calls in flight behind the one that fails fail with the same cause.
TEST_P(Contract, CallsBehindAFailedOneFail) {
  if (!needs(2)) return;
  run_ranks(GetParam(), 2, [&](ProcessGroup& group) {
    Bytes data(64 * (1 + static_cast<std::size_t>(group.rank()))), more(64);
    std::optional<Work> first, second;
    const auto failure = failure_of([&] {
      first = group.all_reduce(buffer_of(data, Dtype::f32));
      second = group.all_reduce(buffer_of(more, Dtype::f32));
      first->wait();
    });
    require(failure && failure->code == ErrorCode::mismatch, "expected a mismatch, got " + shown(failure));
    if (second) {
      const Failure behind = require_failure(ErrorCode::mismatch, [&] { second->wait(); });
      require_text(behind, {failure->text});
    }
  });
}

}  // namespace unisono::testing

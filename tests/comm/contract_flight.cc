#include <algorithm>
#include <future>
#include <numeric>
#include <random>
#include <thread>

#include "comm/contract.h"

// Many calls at once, waited for in any order, or not at all.

namespace unisono::testing {
namespace {

std::vector<Bytes> inputs_of(const Transport& transport, int size, std::size_t count, std::uint64_t seed) {
  std::vector<Bytes> inputs;
  for (int r = 0; r < size; ++r)
    inputs.push_back(make_elements(Dtype::f32, count, seed * 100 + static_cast<std::uint64_t>(r), transport.numbers));
  return inputs;
}

/// A call with its data and what must come out of it.
struct Flight {
  Bytes data;
  Bytes expected;
  Work work;
};

Flight start(const Transport& transport, ProcessGroup& group, std::size_t count, std::uint64_t seed) {
  const auto inputs = inputs_of(transport, group.size(), count, seed);
  Flight flight{
      inputs[static_cast<std::size_t>(group.rank())], reduce_reference(inputs, Dtype::f32, ReduceOp::sum), {}};
  return flight;
}

/// Polls until the call has ended; other threads get the processor in between.
void poll_to_the_end(Work& work) {
  while (!work.poll()) std::this_thread::yield();
  work.wait();  // throws when it failed
}

}  // namespace

TEST_P(Contract, ManyInFlightWaitedInAnyOrder) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      for (int order = 0; order < 3; ++order) {
        std::vector<Flight> flights(100);
        for (std::size_t k = 0; k < flights.size(); ++k) {
          flights[k] = start(GetParam(), group, k * 13 % 700, k);
          flights[k].work = group.all_reduce(buffer_of(flights[k].data, Dtype::f32));
        }
        std::vector<std::size_t> sequence(flights.size());
        std::iota(sequence.begin(), sequence.end(), 0);
        if (order == 1) std::reverse(sequence.begin(), sequence.end());
        if (order == 2)
          std::shuffle(sequence.begin(), sequence.end(), std::mt19937(static_cast<unsigned>(group.rank()) + 7));
        for (std::size_t k : sequence) {
          flights[k].work.wait();
          require_same(flights[k].expected, flights[k].data.data(), "call " + std::to_string(k));
        }
      }
    });
  }
}

TEST_P(Contract, SeveralBucketsInPlaceInFlight) {
  for (int size : world_sizes(GetParam())) {
    run_ranks(GetParam(), size, [&](ProcessGroup& group) {
      Arena arena(group, 1 << 20);
      for (int round = 0; round < 5; ++round) {
        arena.clear();
        std::vector<Flight> flights(24);
        std::vector<Buffer> buffers;
        for (std::size_t k = 0; k < flights.size(); ++k) {
          flights[k] = start(GetParam(), group, 1 + k * 331 % 5000, k + 10);
          buffers.push_back(arena.put(flights[k].data, Dtype::f32, Place::allocated));
          flights[k].work = group.all_reduce(buffers[k]);
        }
        for (std::size_t k = flights.size(); k-- > 0;) {
          flights[k].work.wait();
          require_same(flights[k].expected, buffers[k].data, "bucket " + std::to_string(k));
        }
      }
    });
  }
}

/// Two groups over the same ranks. Rank 0 calls A then B and waits in that order; odd ranks wait, then even call, the
/// other way.
TEST_P(Contract, TwoGroupsInOppositeOrders) {
  for (int size : world_sizes(GetParam())) {
    for (bool calls_too : {false, true}) {
      run_ranks(GetParam(), size, 2, [&](const auto& groups) {
        const bool swapped = groups[0]->rank() % 2 == 1;
        for (std::uint64_t k = 0; k < 20; ++k) {
          Flight flights[2] = {start(GetParam(), *groups[0], 3000, 2 * k),
                               start(GetParam(), *groups[1], 500, 2 * k + 1)};
          const std::size_t first_call = swapped && calls_too ? 1 : 0, first_wait = swapped ? 1 : 0;
          for (std::size_t g : {first_call, 1 - first_call}) {
            flights[g].work = groups[g]->all_reduce(buffer_of(flights[g].data, Dtype::f32));
          }
          for (std::size_t g : {first_wait, 1 - first_wait}) {
            flights[g].work.wait();
            require_same(flights[g].expected, flights[g].data.data(), "group " + std::to_string(g));
          }
        }
      });
    }
  }
}

TEST_P(Contract, ACallNeverWaitedForEnds) {
  if (!needs(2)) return;
  for (Place place : places_of(GetParam())) {
    Meeting peer_done(GetParam(), 2);
    run_ranks(GetParam(), 2, [&](ProcessGroup& group) {
      Arena arena(group, 1 << 20);
      Flight flight = start(GetParam(), group, 70001, 3);
      Buffer data = arena.put(flight.data, Dtype::f32, place);
      group.barrier().wait();
      if (group.rank() == 0) {
        group.all_reduce(data);  // the handle is dropped at once
        peer_done.meet();        // and this thread does nothing for the group
        group.barrier().wait();  // calls end in order
      } else {
        group.all_reduce(data).wait();
        peer_done.meet();
        group.barrier().wait();
      }
      require_same(flight.expected, data.data, "the data of rank " + std::to_string(group.rank()));
    });
  }
}

TEST_P(Contract, PollNeverWaitsForAPeer) {
  if (!needs(2)) return;
  Meeting polled(GetParam(), 2);
  run_ranks(GetParam(), 2, [&](ProcessGroup& group) {
    Flight flight = start(GetParam(), group, 2000, 4);
    if (group.rank() == 0) {
      flight.work = group.all_reduce(buffer_of(flight.data, Dtype::f32));
      for (int i = 0; i < 1000; ++i) require(!flight.work.poll(), "a call ended without the other rank");
      require(flight.work.error() == nullptr, "a running call has an error");
      polled.meet();
    } else {
      polled.meet();
      flight.work = group.all_reduce(buffer_of(flight.data, Dtype::f32));
    }
    poll_to_the_end(flight.work);
    require(flight.work.poll(), "an ended call has ended");
    require_same(flight.expected, flight.data.data(), "polled call");
  });
}

TEST_P(Contract, OneThreadPerGroup) {
  const int size = std::min(GetParam().max_ranks, 3);
  constexpr int kGroups = 3;
  run_ranks(GetParam(), size, kGroups, [&](const auto& groups) {
    std::vector<std::future<void>> threads;
    for (std::size_t g = 0; g < kGroups; ++g) {
      threads.push_back(std::async(std::launch::async, [&group = *groups[g], g] {
        for (std::uint64_t k = 0; k < 40; ++k) {
          Flight flight = start(GetParam(), group, k * 97 % 3000, k + 1000 * g);
          group.all_reduce(buffer_of(flight.data, Dtype::f32)).wait();
          require_same(flight.expected, flight.data.data(), "group " + std::to_string(g));
        }
      }));
    }
    for (auto& t : threads) t.get();
  });
}

/// A handle may be waited for by another thread than the one that called.
TEST_P(Contract, WaitedForByAnotherThread) {
  const int size = std::min(GetParam().max_ranks, 2);
  run_ranks(GetParam(), size, [&](ProcessGroup& group) {
    for (std::uint64_t k = 0; k < 20; ++k) {
      Flight flight = start(GetParam(), group, 4000, k);
      flight.work = group.all_reduce(buffer_of(flight.data, Dtype::f32));
      std::async(std::launch::async, [work = flight.work]() mutable { work.wait(); }).get();
      require_same(flight.expected, flight.data.data(), "waited for elsewhere");
    }
  });
}

}  // namespace unisono::testing

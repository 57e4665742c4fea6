#include "comm/c10d/meeting_place.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <unisono/c10d.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "comm/c10d/first_line.h"
#include "comm/c10d/private_directory.h"

namespace unisono {
namespace {

bool is_loopback(const std::string& host) { return host == "localhost" || host == "::1" || host.starts_with("127."); }

constexpr std::chrono::seconds kOccupant{5};  // for whatever holds our port to show that it is a store

struct Listener {
  int descriptor = -1;
  int error = 0;
};

// A socket bound to the loopback interface only; left to itself, TCPStore listens on every address of the machine.
Listener bind_loopback(const std::string& host, int port) {
  const bool six = host == "::1";
  sockaddr_storage storage{};
  socklen_t length = 0;
  if (six) {
    auto& address = reinterpret_cast<sockaddr_in6&>(storage);
    address.sin6_family = AF_INET6;
    address.sin6_port = htons(static_cast<std::uint16_t>(port));
    address.sin6_addr = in6addr_loopback;
    length = sizeof(address);
  } else {
    auto& address = reinterpret_cast<sockaddr_in&>(storage);
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    inet_pton(AF_INET, host == "localhost" ? "127.0.0.1" : host.c_str(), &address.sin_addr);
    length = sizeof(address);
  }
  const int descriptor = socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (descriptor < 0) return {-1, errno};
  const int on = 1;
  setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(descriptor, reinterpret_cast<const sockaddr*>(&storage), length) == 0 && listen(descriptor, 512) == 0)
    return {descriptor, 0};
  const int error = errno;
  close(descriptor);
  return {-1, error};
}

c10d::TCPStoreOptions store_options(const Environment& environment, std::chrono::nanoseconds timeout) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(environment.port);
  options.waitWorkers = false;  // join_round knows better who is missing
  options.timeout = std::max(std::chrono::ceil<std::chrono::milliseconds>(timeout), std::chrono::milliseconds(1));
  return options;
}

std::string numeric(const std::string& host) { return host == "localhost" ? "127.0.0.1" : host; }

// TCPStore's own time-out ends with the connection: it would wait for ever for the first answer of something that
// accepts and says nothing. So it is made by a thread that is left behind when that happens; the caller's error ends
// the process.
c10::intrusive_ptr<c10d::Store> make_client(const std::string& host, const c10d::TCPStoreOptions& options) {
  auto made = std::make_shared<std::promise<c10::intrusive_ptr<c10d::Store>>>();
  auto store = made->get_future();
  std::thread([made, host, options] {
    pthread_setname_np(pthread_self(), "uni-connect");
    try {
      made->set_value(c10::make_intrusive<c10d::TCPStore>(host, options));
    } catch (...) {
      made->set_exception(std::current_exception());
    }
  }).detach();
  constexpr auto kAnswer = std::chrono::seconds(2);
  if (store.wait_for(options.timeout + kAnswer) == std::future_status::timeout)
    throw Error(ErrorCode::timeout, "something accepts connections there but does not answer as a store");
  return store.get();
}

c10::intrusive_ptr<c10d::Store> connect(const Environment& environment, std::chrono::nanoseconds timeout) {
  try {
    return make_client(environment.host, store_options(environment, timeout));
  } catch (const std::exception& e) {
    const std::string who = environment.meeting == Environment::Meeting::agent_store ? "torchrun" : "rank 0";
    throw Error(ErrorCode::timeout, "unisono::init: rank " + std::to_string(environment.rank) + " found no store at " +
                                        environment.host + ":" + std::to_string(environment.port) + ": missing " + who +
                                        ", which hosts it. Start it, or correct MASTER_ADDR and MASTER_PORT (" +
                                        first_line(e) + ")");
  }
}

// When the port is taken, it may be by another process that believes to be rank 0: then its store tells who it is.
c10::intrusive_ptr<c10d::Store> connect_to_occupant(Environment environment, std::chrono::nanoseconds timeout,
                                                    const std::string& reason) {
  try {
    environment.host = numeric(environment.host);
    return connect(environment, std::min<std::chrono::nanoseconds>(timeout, kOccupant));
  } catch (const Error&) {
    throw Error(ErrorCode::invalid_argument, "unisono::init: rank 0 cannot listen at " + environment.host + ":" +
                                                 std::to_string(environment.port) + " (" + reason +
                                                 "), and what is there is no store. Set MASTER_PORT to a free port.");
  }
}

c10::intrusive_ptr<c10d::Store> host(const Environment& environment, std::chrono::nanoseconds timeout) {
  auto options = store_options(environment, timeout);
  options.isServer = true;
  if (is_loopback(environment.host)) {
    const Listener listener = bind_loopback(environment.host, environment.port);
    if (listener.descriptor < 0) return connect_to_occupant(environment, timeout, std::strerror(listener.error));
    options.masterListenFd = listener.descriptor;
  }
  try {
    return c10::make_intrusive<c10d::TCPStore>(numeric(environment.host), options);
  } catch (const c10::Error& e) {
    return connect_to_occupant(environment, timeout, first_line(e));
  }
}

// Without a count of workers, FileStore never deletes the file: after a kill its own count would be wrong for ever.
c10::intrusive_ptr<c10d::Store> open_file(const std::string& path, std::chrono::nanoseconds timeout) {
  const auto parent = std::filesystem::path(path).parent_path();
  if (!parent.empty() && !std::filesystem::is_directory(parent))
    throw Error(ErrorCode::invalid_argument, "unisono::init: UNISONO_STORE=file:" + path + ": there is no directory " +
                                                 parent.string() + ". Make it, or name another path.");
  try {
    auto store = c10::make_intrusive<c10d::FileStore>(path, -1);
    // How long it looks for a file that is not there: rank 0 may have failed, and taken the directory along.
    store->setTimeout(std::max(std::chrono::ceil<std::chrono::milliseconds>(timeout), std::chrono::milliseconds(1)));
    return store;
  } catch (const std::exception& e) {
    throw Error(ErrorCode::invalid_argument, "unisono::init: cannot use the store file " + path + ": " + first_line(e));
  }
}

MeetingPlace as_place(c10::intrusive_ptr<c10d::Store> store) { return {make_store(std::move(store)), nullptr}; }

}  // namespace

MeetingPlace open_host_place(const std::string& name, bool removes, std::chrono::nanoseconds timeout) {
  const std::string directory = private_job_directory(name);
  auto place = as_place(open_file(directory + "/store", timeout));
  if (!removes) return place;
  place.cleanup = std::shared_ptr<void>(nullptr, [directory](void*) {
    std::error_code ignored;
    std::filesystem::remove_all(directory, ignored);
  });
  return place;
}

MeetingPlace open_meeting_place(const Environment& environment, std::chrono::nanoseconds timeout) {
  switch (environment.meeting) {
    case Environment::Meeting::none:
    case Environment::Meeting::mpi:
    case Environment::Meeting::given:
      return {};
    case Environment::Meeting::agent_store:
      return as_place(c10::make_intrusive<c10d::PrefixStore>("unisono_attempt_" + std::to_string(environment.attempt),
                                                             connect(environment, timeout)));
    case Environment::Meeting::tcp:
      return as_place(environment.rank == 0 ? host(environment, timeout) : connect(environment, timeout));
    case Environment::Meeting::file:
      return as_place(open_file(environment.path, timeout));
    case Environment::Meeting::job_file:
      return open_host_place(environment.job, environment.rank == 0, timeout);
  }
  return {};
}

}  // namespace unisono

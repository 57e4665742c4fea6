#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace unisono {

/// What kind of thing went wrong; every `Error` carries one.
enum class ErrorCode {
  invalid_argument,  ///< the caller can fix it here: a bad option, dtype, shape or environment variable
  mismatch,          ///< ranks disagree: another operation, size, dtype, model, mode
  timeout,           ///< a deadline passed while a peer was alive but did not come
  peer_lost,         ///< a peer process died, or left the group
  corrupt,           ///< data read back is not what was written
  internal,          ///< a bug in unisono, or an operating system call that should not fail
};

std::string_view to_string(ErrorCode code) noexcept;

/// The one exception type the library throws.
/// `what()` names the rank, group, operation and sequence number (and parameter, step and bucket
/// where there is one), both sides of what differs, and what to do about it.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace unisono

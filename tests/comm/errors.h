#pragma once

#include <gtest/gtest.h>
#include <unisono/error.h>

#include <functional>
#include <string>

namespace unisono::testing {

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

/// What `f` throws, which must be an Error with this code; a test failure when it is not, or when nothing is thrown.
inline std::string error_of(const std::function<void()>& f, ErrorCode expected) {
  try {
    f();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), expected) << e.what();
    return e.what();
  }
  ADD_FAILURE() << "no error";
  return "";
}

}  // namespace unisono::testing

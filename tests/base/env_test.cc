#include "base/env.h"

#include <gtest/gtest.h>
#include <unisono/error.h>

#include <cstdlib>

namespace unisono::testing {
namespace {

constexpr const char* kName = "UNISONO_TEST_VARIABLE";

class Env : public ::testing::Test {
 protected:
  ~Env() override { unsetenv(kName); }
  static void set(const char* value) { setenv(kName, value, 1); }

  template <typename Read>
  static void refuses(const char* value, const Read& read, const char* expected) {
    set(value);
    try {
      read();
      FAIL() << "'" << value << "' was accepted";
    } catch (const Error& e) {
      EXPECT_EQ(ErrorCode::invalid_argument, e.code());
      const std::string text = e.what();
      EXPECT_NE(std::string::npos, text.find(kName)) << text;
      EXPECT_NE(std::string::npos, text.find("'" + std::string(value) + "'")) << text;
      EXPECT_NE(std::string::npos, text.find(expected)) << text;
    }
  }
};

TEST_F(Env, NotSetAndEmptyAreTheSame) {
  EXPECT_FALSE(env_string(kName));
  set("");
  EXPECT_FALSE(env_string(kName));
  EXPECT_FALSE(env_int(kName));
  EXPECT_FALSE(env_bool(kName));
  EXPECT_FALSE(env_seconds(kName));
}

TEST_F(Env, Integers) {
  set("-12");
  EXPECT_EQ(-12, env_int(kName));
  set("8");
  EXPECT_EQ(8, env_int(kName, 8, 8));
  const auto read = [] { env_int(kName, 1, 10); };
  for (const char* wrong : {"0", "11", "3x", " 3", "3 ", "two", "1.0", "99999999999999999999"}) {
    refuses(wrong, read, "at least 1 and at most 10");
  }
}

TEST_F(Env, Booleans) {
  for (const char* yes : {"1", "true", "YES", "On"}) {
    set(yes);
    EXPECT_EQ(true, env_bool(kName)) << yes;
  }
  for (const char* no : {"0", "False", "no", "OFF"}) {
    set(no);
    EXPECT_EQ(false, env_bool(kName)) << no;
  }
  for (const char* wrong : {"2", "y", "truee"}) refuses(wrong, [] { env_bool(kName); }, "true");
}

TEST_F(Env, Seconds) {
  set("1.5");
  EXPECT_EQ(std::chrono::milliseconds(1500), env_seconds(kName));
  set("0");
  EXPECT_EQ(std::chrono::nanoseconds(0), env_seconds(kName));
  for (const char* wrong : {"-1", "inf", "nan", "1e30", "5s", "soon"}) {
    refuses(wrong, [] { env_seconds(kName); }, "seconds");
  }
}

}  // namespace
}  // namespace unisono::testing

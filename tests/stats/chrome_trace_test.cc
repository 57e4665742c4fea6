#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unisono/error.h>
#include <unisono/stats.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include "stats/json.h"

namespace unisono::testing {
namespace {

namespace fs = std::filesystem;

class ChromeTrace : public ::testing::Test {
 protected:
  ChromeTrace() {
    std::string pattern = (fs::temp_directory_path() / "unisono-trace-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~ChromeTrace() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return (folder_ / name).string(); }
  static std::string read(const std::string& path) {
    std::ostringstream text;
    text << std::ifstream(path).rdbuf();
    return text.str();
  }
  std::size_t files() const {
    return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()));
  }

  fs::path folder_;
};

TEST(Json, StringsAreEscaped) {
  EXPECT_EQ("\"\"", json_string(""));
  EXPECT_EQ(R"("a\"b\\c/")", json_string("a\"b\\c/"));
  EXPECT_EQ(R"("\u000a\u0000\u001f")", json_string(std::string_view("\n\0\x1f", 3)));
  EXPECT_EQ("\"\x7f\"", json_string("\x7f"));
}

TEST(Json, Utf8StaysAndOtherBytesAreReplaced) {
  for (const char* good : {"gradient \u00e9", "\u20ac", "\U0001F3B5", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"}) {
    EXPECT_EQ("\"" + std::string(good) + "\"", json_string(good));
  }
  const std::string bad = "\xef\xbf\xbd";
  EXPECT_EQ("\"a" + bad + "b\"", json_string("a\xff"
                                             "b"));
  EXPECT_EQ("\"" + bad + "\"", json_string("\xc3"));
  EXPECT_EQ("\"" + bad + bad + "\"", json_string("\xc0\x80"));                      // overlong
  EXPECT_EQ("\"" + bad + bad + bad + "\"", json_string("\xed\xa0\x80"));            // a surrogate
  EXPECT_EQ("\"" + bad + bad + bad + bad + "\"", json_string("\xf4\x90\x80\x80"));  // beyond Unicode
  EXPECT_EQ("\"" + bad + bad + "x\"", json_string("\xe2\x82x"));                    // cut short
}

TEST_F(ChromeTrace, HoldsRowsAndSpans) {
  write_chrome_trace(
      path("trace.json"), 3,
      {{.name = "hook \"w\"", .category = "hooks", .begin_ns = 1234567, .end_ns = 1234999, .step = 5},
       {.name = "bucket 0", .category = "buckets", .begin_ns = 2000000, .end_ns = 5000001, .step = 5, .bucket = 0},
       {.name = "again", .category = "hooks", .begin_ns = -1500, .end_ns = -2000}});
  EXPECT_EQ(R"({"displayTimeUnit":"ms","traceEvents":[
{"ph":"M","name":"process_name","pid":3,"tid":0,"args":{"name":"rank 3"}},
{"ph":"M","name":"thread_name","pid":3,"tid":0,"args":{"name":"hooks"}},
{"ph":"X","name":"hook \"w\"","cat":"hooks","pid":3,"tid":0,"ts":1234.567,"dur":0.432,"args":{"step":5}},
{"ph":"M","name":"thread_name","pid":3,"tid":1,"args":{"name":"buckets"}},
{"ph":"X","name":"bucket 0","cat":"buckets","pid":3,"tid":1,"ts":2000.000,"dur":3000.001,"args":{"step":5,"bucket":0}},
{"ph":"X","name":"again","cat":"hooks","pid":3,"tid":0,"ts":-1.500,"dur":0.000,"args":{"step":-1}}
]}
)",
            read(path("trace.json")));
  EXPECT_EQ(1u, files()) << "a temporary file was left";
}

TEST_F(ChromeTrace, ReplacesAnEarlierFile) {
  std::ofstream(path("trace.json")) << std::string(100000, 'x');
  write_chrome_trace(path("trace.json"), 0, {});
  EXPECT_EQ(
      "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n"
      "{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":0,\"tid\":0,\"args\":{\"name\":\"rank 0\"}}\n]}\n",
      read(path("trace.json")));
  EXPECT_EQ(1u, files());
}

void refuses(const std::string& path) {
  try {
    write_chrome_trace(path, 0, {});
    FAIL() << path << " was written";
  } catch (const Error& e) {
    EXPECT_EQ(ErrorCode::invalid_argument, e.code());
    EXPECT_NE(std::string::npos, std::string(e.what()).find(path)) << e.what();
  }
}

TEST_F(ChromeTrace, SaysWhyItCannotWrite) {
  refuses(path("no/such/folder/trace.json"));
  fs::create_directory(path("taken"));
  refuses(path("taken"));  // fails at the rename, after all is written
  EXPECT_EQ(1u, files()) << "a temporary file was left";
  refuses("/proc/trace.json");
}

}  // namespace
}  // namespace unisono::testing

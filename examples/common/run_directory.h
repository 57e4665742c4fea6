#pragma once

#include <unisono/process_group.h>
#include <unisono/stats.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace example {

/// One flat JSON object, built in order.
class Json {
 public:
  Json& add(const std::string& key, double value) {
    char text[40];
    std::snprintf(text, sizeof text, "%.9g", value);
    return raw(key, text);
  }
  Json& add(const std::string& key, const std::string& value) { return raw(key, quoted(value)); }
  Json& add(const std::string& key, const std::vector<std::string>& values) {
    std::string list;
    for (const auto& value : values) list += (list.empty() ? "" : ", ") + quoted(value);
    return raw(key, "[" + list + "]");
  }
  std::string text() const { return "{" + body_ + "}"; }

 private:
  Json& raw(const std::string& key, const std::string& value) {
    body_ += (body_.empty() ? "" : ", ") + quoted(key) + ": " + value;
    return *this;
  }
  static std::string quoted(const std::string& value) {
    std::string out = "\"";
    for (const char c : value) {
      if (c == '"' || c == '\\') out += '\\';
      out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
    return out + "\"";
  }
  std::string body_;
};

/// runs/<name>/ of one run: metrics.jsonl, written by rank 0 a whole line at a time, and trace.json, which appears
/// whole or not at all. What an earlier run of the same name left is removed first.
class RunDirectory {
 public:
  RunDirectory(const std::string& out, const std::string& name, std::shared_ptr<unisono::ProcessGroup> group)
      : path_(std::filesystem::path(out) / name), group_(std::move(group)) {
    if (group_->rank() == 0) {
      std::filesystem::create_directories(path_);
      for (const auto& old : std::filesystem::directory_iterator(path_)) {
        const std::string file = old.path().filename().string();
        if (file == "metrics.jsonl" || file == "trace.json" || file == "loss.png" || file.starts_with(".trace"))
          std::filesystem::remove(old.path());
      }
      metrics_.reset(std::fopen((path_ / "metrics.jsonl").c_str(), "w"));
      if (!metrics_) throw std::runtime_error("cannot write " + (path_ / "metrics.jsonl").string());
    }
    group_->barrier().wait();
  }

  const std::filesystem::path& path() const { return path_; }

  void write(const Json& line) {
    if (!metrics_) return;
    std::fputs((line.text() + "\n").c_str(), metrics_.get());
    if (std::fflush(metrics_.get()) != 0) throw std::runtime_error("cannot write metrics.jsonl: is the disk full?");
  }

  /// All ranks' events as one timeline. *Collective*.
  void write_trace(const std::vector<unisono::TraceEvent>& events) {
    unisono::write_chrome_trace(part(group_->rank()), group_->rank(), events);
    group_->barrier().wait();
    if (group_->rank() != 0) return;
    std::string merged;
    for (int rank = 0; rank < group_->size(); ++rank) {
      const std::string inside = events_of(part(rank));
      if (!inside.empty()) merged += (merged.empty() ? "" : ",\n") + inside;
      std::filesystem::remove(part(rank));
    }
    const auto unfinished = path_ / ".trace.json";
    std::ofstream(unfinished) << "{\"traceEvents\": [\n" << merged << "\n]}\n";
    std::filesystem::rename(unfinished, path_ / "trace.json");
  }

 private:
  std::string part(int rank) const { return (path_ / (".trace.rank" + std::to_string(rank) + ".json")).string(); }
  /// What stands between the outer brackets of the file's list of events.
  static std::string events_of(const std::string& file) {
    std::stringstream text;
    text << std::ifstream(file).rdbuf();
    const std::string all = text.str();
    const auto begin = all.find('[');
    const auto end = all.rfind(']');
    if (begin == std::string::npos || end == std::string::npos) throw std::runtime_error(file + " holds no events");
    const auto first = all.find_first_not_of(" \n", begin + 1);
    const auto last = all.find_last_not_of(" \n", end - 1);
    return first >= end ? "" : all.substr(first, last - first + 1);
  }

  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };
  std::filesystem::path path_;
  std::shared_ptr<unisono::ProcessGroup> group_;
  std::unique_ptr<std::FILE, Close> metrics_;
};

/// The table at the end of a run: what, how much.
class Table {
 public:
  void row(const std::string& what, const std::string& value) { rows_.emplace_back(what, value); }
  void print() const {
    std::size_t left = 0, right = 0;
    for (const auto& [what, value] : rows_) {
      left = std::max(left, what.size());
      right = std::max(right, value.size());
    }
    const std::string rule = "+" + std::string(left + 2, '-') + "+" + std::string(right + 2, '-') + "+";
    std::printf("%s\n", rule.c_str());
    for (const auto& [what, value] : rows_)
      std::printf("| %-*s | %-*s |\n", static_cast<int>(left), what.c_str(), static_cast<int>(right), value.c_str());
    std::printf("%s\n", rule.c_str());
    std::fflush(stdout);
  }

 private:
  std::vector<std::pair<std::string, std::string>> rows_;
};

/// Every rank's digest, on every rank. *Collective*.
inline std::vector<std::string> gather_digests(unisono::ProcessGroup& group, std::string digest) {
  std::string all(digest.size() * static_cast<std::size_t>(group.size()), ' ');
  group.all_gather({all.data(), all.size(), unisono::Dtype::u8}, {digest.data(), digest.size(), unisono::Dtype::u8})
      .wait();
  std::vector<std::string> out;
  for (int rank = 0; rank < group.size(); ++rank) out.push_back(all.substr(rank * digest.size(), digest.size()));
  return out;
}

inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace example

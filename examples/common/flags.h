#pragma once

#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace example {

/// Command line flags of the form `--name value`, or `--name` alone for a switch. Each is declared where it is read:
///
///   Flags flags(argc, argv);
///   const int steps = flags.integer("steps", 1500, "how many optimizer steps");
///   flags.done();  // --help, and flags nobody asked for
class Flags {
 public:
  Flags(int argc, char** argv) : program_(argv[0]) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      if (word.rfind("--", 0) != 0)
        throw std::invalid_argument("unexpected argument '" + word + "'; flags begin with --");
      const bool has_value = i + 1 < argc && std::string(argv[i + 1]).rfind("--", 0) != 0;
      given_[word.substr(2)] = has_value ? argv[++i] : "";
    }
  }

  std::string text(const std::string& name, const std::string& otherwise, const std::string& help) {
    help_.push_back("  --" + name + "  " + help + " (" + (otherwise.empty() ? "not set" : otherwise) + ")");
    const auto found = given_.find(name);
    if (found == given_.end()) return otherwise;
    const std::string value = found->second;
    given_.erase(found);
    if (value.empty()) throw std::invalid_argument("--" + name + " needs a value");
    return value;
  }

  double number(const std::string& name, double otherwise, const std::string& help) {
    char shown[32];
    std::snprintf(shown, sizeof shown, "%g", otherwise);
    const std::string value = text(name, shown, help);
    if (value == shown) return otherwise;
    char* end = nullptr;
    const double result = std::strtod(value.c_str(), &end);
    if (*end != '\0') throw std::invalid_argument("--" + name + " " + value + ": not a number");
    return result;
  }

  int integer(const std::string& name, int otherwise, int least, const std::string& help) {
    const double value = number(name, otherwise, help);
    if (value != static_cast<int>(value) || value < least)
      throw std::invalid_argument("--" + name + " must be a whole number, at least " + std::to_string(least));
    return static_cast<int>(value);
  }

  bool on(const std::string& name, const std::string& help) {
    help_.push_back("  --" + name + "  " + help);
    const auto found = given_.find(name);
    if (found == given_.end()) return false;
    if (!found->second.empty()) throw std::invalid_argument("--" + name + " takes no value");
    given_.erase(found);
    return true;
  }

  void done() {
    if (given_.count("help") != 0) {
      std::printf("%s\n", program_.c_str());
      for (const auto& line : help_) std::printf("%s\n", line.c_str());
      std::exit(0);
    }
    if (!given_.empty()) throw std::invalid_argument("unknown flag --" + given_.begin()->first + "; --help lists them");
  }

 private:
  std::string program_;
  std::map<std::string, std::string> given_;
  std::vector<std::string> help_;
};

}  // namespace example

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace unisono {

/// SHA-256 of a stream of bytes. *Source*: FIPS 180-4.
class Sha256 {
 public:
  void update(const void* data, std::size_t bytes);
  /// The digest as 64 hexadecimal digits; the object is spent.
  std::string hex();

 private:
  void block(const unsigned char* p);

  std::array<std::uint32_t, 8> h_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                  0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<unsigned char, 64> pending_{};
  std::size_t filled_ = 0;
  std::uint64_t total_ = 0;
};

}  // namespace unisono

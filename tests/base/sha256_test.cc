#include "base/sha256.h"

#include <gtest/gtest.h>

namespace unisono {
namespace {

std::string of(const std::string& text, std::size_t step) {
  Sha256 sha;
  for (std::size_t i = 0; i < text.size(); i += step) sha.update(text.data() + i, std::min(step, text.size() - i));
  return sha.hex();
}

// The examples published with FIPS 180-4, fed in pieces of every size.
TEST(Sha256, GivesThePublishedDigests) {
  for (std::size_t step : {1, 3, 63, 64, 65, 1000}) {
    EXPECT_EQ(of("", step), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    EXPECT_EQ(of("abc", step), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    EXPECT_EQ(of("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq", step),
              "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    EXPECT_EQ(of(std::string(1000000, 'a'), step), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
  }
}

}  // namespace
}  // namespace unisono

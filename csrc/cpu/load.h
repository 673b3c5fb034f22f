// Reading a block of numbers of any dtype as float or double. Include it inside no namespace; all
// of it is static in ppo::PPO_ISA (see isa.h).
#pragma once
#include <cstdint>

namespace ppo {
namespace PPO_ISA {

template <class To, class From>
static inline To bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "bits() keeps the size");
  To y;
  __builtin_memcpy(&y, &x, sizeof y);
  return y;
}

static inline float from_bf16(uint16_t x) { return bits<float>(uint32_t(x) << 16); }

static inline float from_f16(uint16_t x) {
  // Shifted into place the exponent is 112 too small; the product also makes subnormals right.
  const uint32_t magnitude = uint32_t(x & 0x7fff) << 13;
  const float finite = bits<float>(magnitude) * bits<float>(uint32_t(0x77800000));
  const uint32_t special = magnitude | 0x7f800000;  // inf and nan keep an exponent of all ones
  const uint32_t y = (x & 0x7c00) == 0x7c00 ? special : bits<uint32_t>(finite);
  return bits<float>(y | uint32_t(x & 0x8000) << 16);
}

}  // namespace PPO_ISA
}  // namespace ppo

// Polynomials over GF(2) modulo the Castagnoli polynomial, bits reflected: bit 31 is the coefficient of x^0.
#pragma once

#include <cstdint>

namespace replicator::gf2 {

inline constexpr std::uint32_t kPolynomial = 0x82F63B78;
inline constexpr std::uint32_t kOne = 0x80000000;

constexpr std::uint32_t times_x(std::uint32_t a) { return (a >> 1) ^ ((a & 1) ? kPolynomial : 0); }

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
  std::uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if (a & kOne) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^n.
constexpr std::uint32_t power_of_x(std::uint64_t n) {
  std::uint32_t result = kOne;
  std::uint32_t square = times_x(kOne);
  for (; n != 0; n >>= 1) {
    if (n & 1) result = multiply(result, square);
    square = multiply(square, square);
  }
  return result;
}

}  // namespace replicator::gf2

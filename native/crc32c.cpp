#include "crc32c.h"

#include <array>
#include <bit>
#include <cstring>
#include <vector>

#include "crc32c_arm.h"
#include "crc32c_x86.h"
#include "gf2.h"

namespace replicator {
namespace {

using Table = std::array<std::array<std::uint32_t, 256>, 8>;

// tables[k][b]: the register after byte b and then k zero bytes.
constexpr Table make_tables() {
  Table tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t state = byte;
    for (int bit = 0; bit < 8; ++bit) state = gf2::times_x(state);
    tables[0][byte] = state;
  }
  for (std::size_t k = 1; k < 8; ++k) {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}

constexpr Table kTables = make_tables();

std::uint32_t run_portable(std::uint32_t state, const std::uint8_t* data, std::size_t size) {
  if constexpr (std::endian::native == std::endian::little) {
    for (; size >= 8; data += 8, size -= 8) {
      std::uint64_t word;
      std::memcpy(&word, data, 8);
      word ^= state;
      state = 0;
      for (std::size_t k = 0; k < 8; ++k) state ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
    }
  }
  for (; size != 0; ++data, --size) state = (state >> 8) ^ kTables[0][(state ^ *data) & 0xFF];
  return state;
}

std::vector<Crc32cKernel> available_kernels() {
  std::vector<Crc32cKernel> kernels;
  add_x86_kernels(kernels);
  add_arm_kernels(kernels);
  kernels.push_back({"portable", run_portable});
  return kernels;
}

}  // namespace

std::span<const Crc32cKernel> crc32c_kernels() {
  static const std::vector<Crc32cKernel> kernels = available_kernels();
  return kernels;
}

std::uint32_t crc32c(std::uint32_t value, Bytes data) {
  return ~crc32c_kernels().front().run(~value, data.data(), data.size());
}

std::uint32_t crc32c_shift(std::uint64_t len_b) {
  // The order of x is 2^31 - 1, so the exponent 8 * len_b may be taken modulo that and cannot overflow.
  constexpr std::uint64_t kOrder = 0x7FFFFFFF;
  return gf2::power_of_x(len_b % kOrder * 8);
}

std::uint32_t crc32c_combine_by(std::uint32_t shift, std::uint32_t crc_a, std::uint32_t crc_b) {
  return gf2::multiply(shift, crc_a) ^ crc_b;
}

std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t len_b) {
  return crc32c_combine_by(crc32c_shift(len_b), crc_a, crc_b);
}

}  // namespace replicator

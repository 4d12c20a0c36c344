// CRC32C on 64-bit Arm: the CRC32C instructions of ARMv8, in three independent chains to hide their latency.
#include "crc32c_arm.h"

#if defined(__aarch64__) && defined(__linux__)

#include <arm_acle.h>
#include <asm/hwcap.h>
#include <sys/auxv.h>

#include <cstring>

#include "gf2.h"

namespace replicator {
namespace {

#define REPLICATOR_ARM_CRC __attribute__((target("+crc")))

// Long enough that joining the chains costs little, short enough that all three stay in the first-level cache.
constexpr std::size_t kChain = 4096;

inline std::uint64_t word_at(const std::uint8_t* data) {
  std::uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

REPLICATOR_ARM_CRC std::uint32_t run_arm(std::uint32_t state, const std::uint8_t* data, std::size_t size) {
  constexpr std::uint32_t kPastChain = gf2::power_of_x(8 * kChain);
  for (; size >= 3 * kChain; data += 3 * kChain, size -= 3 * kChain) {
    std::uint32_t second = 0;
    std::uint32_t third = 0;
    for (std::size_t i = 0; i < kChain; i += 8) {
      state = __crc32cd(state, word_at(data + i));
      second = __crc32cd(second, word_at(data + kChain + i));
      third = __crc32cd(third, word_at(data + 2 * kChain + i));
    }
    state = gf2::multiply(kPastChain, state) ^ second;
    state = gf2::multiply(kPastChain, state) ^ third;
  }
  for (; size >= 8; data += 8, size -= 8) state = __crc32cd(state, word_at(data));
  for (; size != 0; ++data, --size) state = __crc32cb(state, *data);
  return state;
}

}  // namespace

void add_arm_kernels(std::vector<Crc32cKernel>& kernels) {
  if (getauxval(AT_HWCAP) & HWCAP_CRC32) kernels.push_back({"armv8-crc", run_arm});
}

}  // namespace replicator

#else

namespace replicator {
void add_arm_kernels(std::vector<Crc32cKernel>&) {}
}  // namespace replicator

#endif

// CRC32C on x86-64: the CRC32 instruction (SSE4.2), and for long inputs carry-less multiplication (PCLMULQDQ).
// Each function names what it needs, so the file is compiled for any x86-64 and chosen from at run time.
#include "crc32c_x86.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <cstring>

#include "gf2.h"

namespace replicator {
namespace {

#define REPLICATOR_SSE42 __attribute__((target("sse4.2")))
#define REPLICATOR_PCLMUL __attribute__((target("sse4.2,pclmul")))

REPLICATOR_SSE42 std::uint32_t run_sse42(std::uint32_t state, const std::uint8_t* data, std::size_t size) {
  std::uint64_t wide = state;
  for (; size >= 8; data += 8, size -= 8) {
    std::uint64_t word;
    std::memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  state = static_cast<std::uint32_t>(wide);
  for (; size != 0; ++data, --size) state = _mm_crc32_u8(state, *data);
  return state;
}

constexpr std::size_t kLanes = 4;
constexpr std::size_t kStride = kLanes * 16;

// Moving 128 bits past `distance` more bits multiplies their halves by these. A carry-less product of two reflected
// values comes out divided by x (it has one bit less than the register), hence the - 1.
constexpr long long fold_low(std::uint64_t distance) { return gf2::power_of_x(distance + 32 - 1); }
constexpr long long fold_high(std::uint64_t distance) { return gf2::power_of_x(distance - 32 - 1); }

REPLICATOR_PCLMUL inline __m128i fold(__m128i state, __m128i keys, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(state, keys, 0x00);
  const __m128i high = _mm_clmulepi64_si128(state, keys, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

REPLICATOR_PCLMUL inline __m128i load(const std::uint8_t* data) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
}

REPLICATOR_PCLMUL std::uint32_t run_pclmul(std::uint32_t state, const std::uint8_t* data, std::size_t size) {
  if (size < 4 * kStride) return run_sse42(state, data, size);

  __m128i lanes[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = load(data + 16 * i);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));
  data += kStride;
  size -= kStride;

  const __m128i by_stride = _mm_set_epi64x(fold_high(8 * kStride), fold_low(8 * kStride));
  for (; size >= kStride; data += kStride, size -= kStride) {
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = fold(lanes[i], by_stride, load(data + 16 * i));
  }
  const __m128i by_lane = _mm_set_epi64x(fold_high(128), fold_low(128));
  for (std::size_t i = 1; i < kLanes; ++i) lanes[i] = fold(lanes[i - 1], by_lane, lanes[i]);

  std::uint64_t wide = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(lanes[kLanes - 1])));
  wide = _mm_crc32_u64(wide, static_cast<std::uint64_t>(_mm_extract_epi64(lanes[kLanes - 1], 1)));
  return run_sse42(static_cast<std::uint32_t>(wide), data, size);
}

}  // namespace

void add_x86_kernels(std::vector<Crc32cKernel>& kernels) {
  if (!__builtin_cpu_supports("sse4.2")) return;
  if (__builtin_cpu_supports("pclmul")) kernels.push_back({"pclmul", run_pclmul});
  kernels.push_back({"sse4.2", run_sse42});
}

}  // namespace replicator

#else

namespace replicator {
void add_x86_kernels(std::vector<Crc32cKernel>&) {}
}  // namespace replicator

#endif

// CRC32C on x86-64: the CRC32 instruction (SSE4.2), and for long inputs carry-less multiplication, of 128 bits at a time
// (PCLMULQDQ), 256 (VPCLMULQDQ with AVX2) or 512 (with AVX-512), all of these also with a copy in the same loop.
// Each function names what it needs, so the file is compiled for any x86-64 and chosen from at run time.
#include "crc32c_x86.h"

#if defined(__x86_64__)

#include <immintrin.h>

#include <array>
#include <cstring>

#include "gf2.h"

namespace replicator {
namespace {

#define REPLICATOR_SSE42 __attribute__((target("sse4.2")))
#define REPLICATOR_PCLMUL __attribute__((target("sse4.2,pclmul")))
#define REPLICATOR_VPCLMUL __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq")))
#define REPLICATOR_AVX512 __attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq,avx512f")))

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

// From 128 folded bits to the register.
REPLICATOR_PCLMUL inline std::uint32_t reduce(__m128i state) {
  std::uint64_t wide = _mm_crc32_u64(0, static_cast<std::uint64_t>(_mm_cvtsi128_si64(state)));
  wide = _mm_crc32_u64(wide, static_cast<std::uint64_t>(_mm_extract_epi64(state, 1)));
  return static_cast<std::uint32_t>(wide);
}

// How far ahead the source is asked for. The processor's own prefetcher falls behind when the same loop also stores.
constexpr std::size_t kAhead = 2048;

template <bool Copy>
REPLICATOR_PCLMUL inline void stream(std::uint8_t* target, std::size_t offset, __m128i value) {
  if constexpr (Copy) _mm_stream_si128(reinterpret_cast<__m128i*>(target + offset), value);
}

// The register after `size` bytes, a positive multiple of kStride; Copy: they are also stored at `target`, which is
// aligned to 16 bytes.
template <bool Copy>
REPLICATOR_PCLMUL inline std::uint32_t fold_all(std::uint32_t state, std::uint8_t* target, const std::uint8_t* data,
                                                std::size_t size) {
  __m128i lanes[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) {
    lanes[i] = load(data + 16 * i);
    stream<Copy>(target, 16 * i, lanes[i]);
  }
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128(static_cast<int>(state)));

  const __m128i by_stride = _mm_set_epi64x(fold_high(8 * kStride), fold_low(8 * kStride));
  for (std::size_t done = kStride; done < size; done += kStride) {
    if constexpr (Copy) _mm_prefetch(reinterpret_cast<const char*>(data) + done + kAhead, _MM_HINT_T0);
    __m128i next[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) next[i] = load(data + done + 16 * i);
    for (std::size_t i = 0; i < kLanes; ++i) stream<Copy>(target, done + 16 * i, next[i]);
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = fold(lanes[i], by_stride, next[i]);
  }
  const __m128i by_lane = _mm_set_epi64x(fold_high(128), fold_low(128));
  for (std::size_t i = 1; i < kLanes; ++i) lanes[i] = fold(lanes[i - 1], by_lane, lanes[i]);
  return reduce(lanes[kLanes - 1]);
}

REPLICATOR_PCLMUL std::uint32_t run_pclmul(std::uint32_t state, const std::uint8_t* data, std::size_t size) {
  if (size < 4 * kStride) return run_sse42(state, data, size);
  const std::size_t whole = size / kStride * kStride;
  state = fold_all<false>(state, nullptr, data, whole);
  return run_sse42(state, data + whole, size - whole);
}

REPLICATOR_PCLMUL std::uint32_t copy_pclmul(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source,
                                            std::size_t size) {
  static_assert(kCopyAlignment % kStride == 0);
  return size == 0 ? state : fold_all<true>(state, target, source, size);
}

constexpr std::size_t kWideStride = kLanes * 32;

REPLICATOR_VPCLMUL inline __m256i wide_keys(long long low, long long high) {
  return _mm256_set_epi64x(high, low, high, low);
}

REPLICATOR_VPCLMUL inline __m256i fold_wide(__m256i state, __m256i keys, __m256i next) {
  const __m256i low = _mm256_clmulepi64_epi128(state, keys, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(state, keys, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

REPLICATOR_VPCLMUL inline __m256i load_wide(const std::uint8_t* from) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
}

template <bool Copy>
REPLICATOR_VPCLMUL inline void stream_wide(std::uint8_t* target, std::size_t offset, __m256i value) {
  if constexpr (Copy) _mm256_stream_si256(reinterpret_cast<__m256i*>(target + offset), value);
}

// The register after `size` bytes, a positive multiple of kWideStride; Copy: they are also stored at `target`, which is
// aligned to 32 bytes.
template <bool Copy>
REPLICATOR_VPCLMUL inline std::uint32_t fold_all_wide(std::uint32_t state, std::uint8_t* target,
                                                      const std::uint8_t* data, std::size_t size) {
  __m256i lanes[kLanes];
  for (std::size_t i = 0; i < kLanes; ++i) {
    lanes[i] = load_wide(data + 32 * i);
    stream_wide<Copy>(target, 32 * i, lanes[i]);
  }
  lanes[0] = _mm256_xor_si256(lanes[0], _mm256_zextsi128_si256(_mm_cvtsi32_si128(static_cast<int>(state))));

  const __m256i by_stride = wide_keys(fold_low(8 * kWideStride), fold_high(8 * kWideStride));
  for (std::size_t done = kWideStride; done < size; done += kWideStride) {
    const char* ahead = reinterpret_cast<const char*>(data) + done + kAhead;
    _mm_prefetch(ahead, _MM_HINT_T0);
    _mm_prefetch(ahead + 64, _MM_HINT_T0);
    __m256i next[kLanes];
    for (std::size_t i = 0; i < kLanes; ++i) next[i] = load_wide(data + done + 32 * i);
    for (std::size_t i = 0; i < kLanes; ++i) stream_wide<Copy>(target, done + 32 * i, next[i]);
    for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = fold_wide(lanes[i], by_stride, next[i]);
  }
  const __m256i by_lane = wide_keys(fold_low(256), fold_high(256));
  for (std::size_t i = 1; i < kLanes; ++i) lanes[i] = fold_wide(lanes[i - 1], by_lane, lanes[i]);
  const __m128i by_half = _mm_set_epi64x(fold_high(128), fold_low(128));
  const __m256i last = lanes[kLanes - 1];
  return reduce(fold(_mm256_castsi256_si128(last), by_half, _mm256_extracti128_si256(last, 1)));
}

REPLICATOR_VPCLMUL std::uint32_t run_vpclmul(std::uint32_t state, const std::uint8_t* data, std::size_t size) {
  if (size < 4 * kWideStride) return run_pclmul(state, data, size);
  const std::size_t whole = size / kWideStride * kWideStride;
  state = fold_all_wide<false>(state, nullptr, data, whole);
  return run_sse42(state, data + whole, size - whole);
}

REPLICATOR_VPCLMUL std::uint32_t copy_vpclmul(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source,
                                              std::size_t size) {
  static_assert(kCopyAlignment % kWideStride == 0);
  return size == 0 ? state : fold_all_wide<true>(state, target, source, size);
}

constexpr std::size_t kWidestStride = kLanes * 64;

REPLICATOR_AVX512 inline __m512i widest_keys(long long low, long long high) {
  return _mm512_set_epi64(high, low, high, low, high, low, high, low);
}

REPLICATOR_AVX512 inline __m512i fold_widest(__m512i state, __m512i keys, __m512i next) {
  const __m512i low = _mm512_clmulepi64_epi128(state, keys, 0x00);
  const __m512i high = _mm512_clmulepi64_epi128(state, keys, 0x11);
  constexpr int kXorOfThree = 0x96;
  return _mm512_ternarylogic_epi64(low, high, next, kXorOfThree);
}

template <bool Copy>
REPLICATOR_AVX512 inline void stream_widest(std::uint8_t* target, std::size_t offset, __m512i value) {
  if constexpr (Copy) _mm512_stream_si512(reinterpret_cast<__m512i*>(target + offset), value);
}

REPLICATOR_AVX512 inline std::uint32_t reduce_widest(const __m512i (&lanes)[kLanes]) {
  const __m512i by_lane = widest_keys(fold_low(512), fold_high(512));
  __m512i last = lanes[0];
  for (std::size_t i = 1; i < kLanes; ++i) last = fold_widest(last, by_lane, lanes[i]);
  alignas(64) std::uint8_t quarters[64];
  _mm512_store_si512(quarters, last);
  const __m128i by_quarter = _mm_set_epi64x(fold_high(128), fold_low(128));
  __m128i folded = load(quarters);
  for (std::size_t at = 16; at < sizeof quarters; at += 16) folded = fold(folded, by_quarter, load(quarters + at));
  return reduce(folded);
}

// Of `Parts` strings of `size` bytes in a row, side by side: the register after each, of the first one from `state`, of
// the others from 0. `size` is a positive multiple of kWidestStride. Copy: they are also stored at `target`, which is
// aligned to 64 bytes.
template <bool Copy, std::size_t Parts>
REPLICATOR_AVX512 inline std::array<std::uint32_t, Parts> fold_parts_widest(std::uint32_t state, std::uint8_t* target,
                                                                            const std::uint8_t* data,
                                                                            std::size_t size) {
  __m512i lanes[Parts][kLanes];
#pragma GCC unroll 4
  for (std::size_t part = 0; part < Parts; ++part) {
#pragma GCC unroll 4
    for (std::size_t i = 0; i < kLanes; ++i) {
      lanes[part][i] = _mm512_loadu_si512(data + part * size + 64 * i);
      stream_widest<Copy>(target, part * size + 64 * i, lanes[part][i]);
    }
  }
  lanes[0][0] = _mm512_xor_si512(lanes[0][0], _mm512_zextsi128_si512(_mm_cvtsi32_si128(static_cast<int>(state))));

  const __m512i by_stride = widest_keys(fold_low(8 * kWidestStride), fold_high(8 * kWidestStride));
  for (std::size_t done = kWidestStride; done < size; done += kWidestStride) {
#pragma GCC unroll 4
    for (std::size_t part = 0; part < Parts; ++part) {
      const std::uint8_t* from = data + part * size + done;
      __m512i next[kLanes];
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kLanes; ++i) {
        _mm_prefetch(reinterpret_cast<const char*>(from) + kAhead + 64 * i, _MM_HINT_T0);
        next[i] = _mm512_loadu_si512(from + 64 * i);
      }
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kLanes; ++i) stream_widest<Copy>(target, part * size + done + 64 * i, next[i]);
#pragma GCC unroll 4
      for (std::size_t i = 0; i < kLanes; ++i) lanes[part][i] = fold_widest(lanes[part][i], by_stride, next[i]);
    }
  }
  std::array<std::uint32_t, Parts> registers;
  for (std::size_t part = 0; part < Parts; ++part) registers[part] = reduce_widest(lanes[part]);
  return registers;
}

REPLICATOR_AVX512 std::uint32_t run_avx512(std::uint32_t state, const std::uint8_t* data, std::size_t size) {
  if (size < 4 * kWidestStride) return run_vpclmul(state, data, size);
  const std::size_t whole = size / kWidestStride * kWidestStride;
  state = fold_parts_widest<false, 1>(state, nullptr, data, whole)[0];
  return run_sse42(state, data + whole, size - whole);
}

// A copy of one place after the other leaves memory idle: a core waits for one page at a time. So four are copied side
// by side, and their registers are put together.
constexpr std::size_t kSideBySide = 4;
constexpr std::size_t kSidePart = 64 << 10;
constexpr std::uint32_t kSideShift = gf2::power_of_x(8 * kSidePart);

REPLICATOR_AVX512 std::uint32_t copy_avx512(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source,
                                            std::size_t size) {
  static_assert(kCopyAlignment % kWidestStride == 0 && kSidePart % kWidestStride == 0);
  constexpr std::size_t kTogether = kSideBySide * kSidePart;
  for (; size >= kTogether; target += kTogether, source += kTogether, size -= kTogether) {
    const auto registers = fold_parts_widest<true, kSideBySide>(state, target, source, kSidePart);
    state = registers[0];
    for (std::size_t part = 1; part < kSideBySide; ++part) {
      state = gf2::multiply(kSideShift, state) ^ registers[part];
    }
  }
  return size == 0 ? state : fold_parts_widest<true, 1>(state, target, source, size)[0];
}

}  // namespace

void add_x86_kernels(std::vector<Crc32cKernel>& kernels) {
  if (!__builtin_cpu_supports("sse4.2")) return;
  // Of avx2 and avx512f the operating system has a say too (XGETBV): this asks both.
  if (__builtin_cpu_supports("pclmul") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq")) {
    if (__builtin_cpu_supports("avx512f")) kernels.push_back({"avx512", run_avx512, copy_avx512});
    kernels.push_back({"vpclmul", run_vpclmul, copy_vpclmul});
  }
  if (__builtin_cpu_supports("pclmul")) kernels.push_back({"pclmul", run_pclmul, copy_pclmul});
  kernels.push_back({"sse4.2", run_sse42});
}

}  // namespace replicator

#else

namespace replicator {
void add_x86_kernels(std::vector<Crc32cKernel>&) {}
}  // namespace replicator

#endif

// A copy and its checksum in one pass over the source: block by block, so that the second reader of each block finds
// it in cache. Large copies bypass the cache on their way out: the target's lines need not be read first, and the
// source's are not displaced.
#include "copy_crc32c.h"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace replicator {
namespace {

constexpr std::size_t kBlock = 32 << 10;

#if defined(__SSE2__)

constexpr std::size_t kLine = 64;
// Below this the target is likely to be read again soon, from the cache that ordinary stores leave it in.
constexpr std::size_t kStreamFrom = 1 << 20;

// `target` is aligned to kLine and `size` a multiple of it.
void stream(std::uint8_t* target, const std::uint8_t* source, std::size_t size) {
  for (std::size_t i = 0; i < size; i += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source + i);
    auto* to = reinterpret_cast<__m128i*>(target + i);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

#endif

std::uint32_t copy_plain(std::uint8_t* target, Bytes source, std::uint32_t value) {
  while (!source.empty()) {
    const Bytes block = source.first(std::min(kBlock, source.size()));
    value = crc32c(value, block);
    std::memcpy(target, block.data(), block.size());
    target += block.size();
    source = source.subspan(block.size());
  }
  return value;
}

}  // namespace

std::uint32_t copy_crc32c(std::uint8_t* target, Bytes source, std::uint32_t value) {
#if defined(__SSE2__)
  if (source.size() >= kStreamFrom) {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kLine;
    value = copy_plain(target, source.first(head), value);
    target += head;
    source = source.subspan(head);
    while (source.size() >= kLine) {
      const Bytes block = source.first(std::min(kBlock, source.size() / kLine * kLine));
      value = crc32c(value, block);
      stream(target, block.data(), block.size());
      target += block.size();
      source = source.subspan(block.size());
    }
    // Streaming stores are weakly ordered: whoever is told of the copy must find it complete.
    _mm_sfence();
  }
#endif
  return copy_plain(target, source, value);
}

}  // namespace replicator

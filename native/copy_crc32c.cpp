// A copy and its checksum in one pass over the source: block by block, so that the second reader of each block finds
// it in cache. Large copies bypass the cache on their way out: the target's lines need not be read first, and the
// source's are not displaced.
#include "copy_crc32c.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <system_error>
#include <thread>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace replicator {
namespace {

constexpr std::size_t kBlock = 32 << 10;
// Below this the target is likely to be read again soon, from the cache that ordinary stores leave it in.
constexpr std::size_t kStreamFrom = 1 << 20;

#if defined(__SSE2__)

constexpr std::size_t kLine = 64;

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

std::uint32_t copy_plain(const Crc32cKernel& kernel, std::uint8_t* target, Bytes source, std::uint32_t state) {
  while (!source.empty()) {
    const Bytes block = source.first(std::min(kBlock, source.size()));
    state = kernel.run(state, block.data(), block.size());
    std::memcpy(target, block.data(), block.size());
    target += block.size();
    source = source.subspan(block.size());
  }
  return state;
}

#if defined(__SSE2__)

// Past the caches. `target` and the size of `source` are multiples of kCopyAlignment.
std::uint32_t copy_streaming(const Crc32cKernel& kernel, std::uint8_t* target, Bytes source, std::uint32_t state) {
  if (kernel.copy != nullptr) return kernel.copy(state, target, source.data(), source.size());
  while (!source.empty()) {
    const Bytes block = source.first(std::min(kBlock, source.size()));
    state = kernel.run(state, block.data(), block.size());
    stream(target, block.data(), block.size());
    target += block.size();
    source = source.subspan(block.size());
  }
  return state;
}

#endif

// What one thread does at a time: within one part and one block, checksummed by itself.
struct Piece {
  std::uint8_t* target;
  Bytes source;
  std::uint32_t crc = 0;
};

// Small enough to keep all threads busy to the end, large enough to be streamed.
constexpr std::size_t kPiece = kStreamFrom;
// What a further thread is started for.
constexpr std::size_t kPerThread = 2 << 20;

std::vector<Piece> pieces_of(std::span<const Part> parts, const CopyOptions& options) {
  std::vector<Piece> pieces;
  std::size_t in_block = options.prefix_size;
  for (const Part& part : parts) {
    for (std::size_t offset = 0; offset < part.source.size();) {
      const std::size_t length = std::min({kPiece, options.block_size - in_block, part.source.size() - offset});
      std::uint8_t* target = part.target == nullptr ? nullptr : part.target + offset;
      pieces.push_back({target, part.source.subspan(offset, length)});
      offset += length;
      in_block = (in_block + length) % options.block_size;
    }
  }
  return pieces;
}

// Runs `work` in this thread and in at most `more` others; fewer where the system gives no more threads.
template <typename Work>
void run_in_threads(unsigned more, const Work& work) {
  std::vector<std::thread> others;
  others.reserve(more);
  try {
    for (unsigned i = 0; i < more; ++i) others.emplace_back(work);
  } catch (const std::system_error&) {
    // Those that did start, and this one, do it all.
  }
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace

std::uint32_t copy_crc32c_by(const Crc32cKernel& kernel, std::uint8_t* target, Bytes source, std::uint32_t value) {
  std::uint32_t state = ~value;
#if defined(__SSE2__)
  if (source.size() >= kStreamFrom) {
    const std::size_t head = -reinterpret_cast<std::uintptr_t>(target) % kCopyAlignment;
    state = copy_plain(kernel, target, source.first(head), state);
    target += head;
    source = source.subspan(head);
    const std::size_t whole = source.size() / kCopyAlignment * kCopyAlignment;
    state = copy_streaming(kernel, target, source.first(whole), state);
    // Streaming stores are weakly ordered: whoever is told of the copy must find it complete.
    _mm_sfence();
    target += whole;
    source = source.subspan(whole);
  }
#endif
  return ~copy_plain(kernel, target, source, state);
}

std::uint32_t copy_crc32c(std::uint8_t* target, Bytes source, std::uint32_t value) {
  return copy_crc32c_by(crc32c_kernels().front(), target, source, value);
}

Copied copy_parts(std::span<const Part> parts, const CopyOptions& options) {
  std::vector<Piece> pieces = pieces_of(parts, options);
  std::size_t size = 0;
  for (const Piece& piece : pieces) size += piece.source.size();
  std::atomic<std::size_t> taken = 0;
  const auto work = [&] {
    for (std::size_t i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < pieces.size();) {
      Piece& piece = pieces[i];
      piece.crc = piece.target == nullptr ? crc32c(0, piece.source) : copy_crc32c(piece.target, piece.source, 0);
    }
  };
  run_in_threads(static_cast<unsigned>(std::clamp<std::size_t>(size / kPerThread, 1, std::max(options.threads, 1U))) - 1,
                 work);

  Copied result;
  result.tail_crc = options.prefix_crc;
  const std::uint32_t shift = crc32c_shift(kPiece);
  std::size_t filled = options.prefix_size;
  for (const Piece& piece : pieces) {
    result.tail_crc = piece.source.size() == kPiece
                          ? crc32c_combine_by(shift, result.tail_crc, piece.crc)
                          : crc32c_combine(result.tail_crc, piece.crc, piece.source.size());
    filled += piece.source.size();
    if (filled == options.block_size) {
      result.block_crcs.push_back(result.tail_crc);
      result.tail_crc = 0;
      filled = 0;
    }
  }
  return result;
}

}  // namespace replicator

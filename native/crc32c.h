// CRC32C (RFC 3720). Values are final ones, as everybody prints them; 0 begins a new checksum.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace replicator {

using Bytes = std::span<const std::uint8_t>;

// Continues `value`, the checksum of the bytes before `data`.
std::uint32_t crc32c(std::uint32_t value, Bytes data);

// Of two byte strings in a row, from the checksum of each and the length of the second.
std::uint32_t crc32c_combine(std::uint32_t crc_a, std::uint32_t crc_b, std::uint64_t len_b);

// The same for many second strings of one length: `shift` is crc32c_shift(len_b), which is what costs.
std::uint32_t crc32c_shift(std::uint64_t len_b);
std::uint32_t crc32c_combine_by(std::uint32_t shift, std::uint32_t crc_a, std::uint32_t crc_b);

// What `Crc32cKernel::copy` asks of its target's address and of its size.
inline constexpr std::size_t kCopyAlignment = 256;

// One way to compute it. `run` works on the register itself: inverted before and after by the caller. `copy`, where
// there is one, also copies the bytes past the caches; target and size are multiples of kCopyAlignment, and the caller
// orders the stores (they are weakly ordered).
struct Crc32cKernel {
  const char* name;
  std::uint32_t (*run)(std::uint32_t state, const std::uint8_t* data, std::size_t size);
  std::uint32_t (*copy)(std::uint32_t state, std::uint8_t* target, const std::uint8_t* source, std::size_t size) =
      nullptr;
};

// Those that this processor can run, best first; the last is portable. What `crc32c` uses is the first.
std::span<const Crc32cKernel> crc32c_kernels();

}  // namespace replicator

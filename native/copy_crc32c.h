#pragma once

#include <span>
#include <vector>

#include "crc32c.h"

namespace replicator {

// Copies `source` to `target`, which must not overlap it, and continues `value` over its bytes.
std::uint32_t copy_crc32c(std::uint8_t* target, Bytes source, std::uint32_t value);

// The same by one kernel, for tests.
std::uint32_t copy_crc32c_by(const Crc32cKernel& kernel, std::uint8_t* target, Bytes source, std::uint32_t value);

// One of several pieces of a stream of bytes. Without a target it is only checksummed.
struct Part {
  std::uint8_t* target;
  Bytes source;
};

struct Copied {
  std::vector<std::uint32_t> block_crcs;  // of the blocks that are complete
  std::uint32_t tail_crc = 0;             // of the bytes of the block after them
};

struct CopyOptions {
  std::size_t block_size;
  // Blocks are counted from so many bytes before the stream; their checksum.
  std::uint32_t prefix_crc = 0;
  std::size_t prefix_size = 0;
  unsigned threads = 1;
};

// Copies each source to its target, with a checksum per block of the stream that the sources make. Nothing overlaps.
Copied copy_parts(std::span<const Part> parts, const CopyOptions& options);

}  // namespace replicator

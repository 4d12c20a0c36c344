#pragma once

#include <vector>

#include "crc32c.h"

namespace replicator {

// Copies `source` to `target`, which must not overlap it, and continues `value` over its bytes.
std::uint32_t copy_crc32c(std::uint8_t* target, Bytes source, std::uint32_t value);

// The same by one kernel, for tests.
std::uint32_t copy_crc32c_by(const Crc32cKernel& kernel, std::uint8_t* target, Bytes source, std::uint32_t value);

struct Copied {
  std::vector<std::uint32_t> block_crcs;  // of the blocks that are complete
  std::uint32_t tail_crc = 0;             // of the bytes of the block after them
};

// Copies `source` to `target`, which must not overlap it, by at most `threads` threads, with a checksum per block.
// Blocks are counted from `prefix_size` bytes before `source`, whose checksum is `prefix_crc`.
Copied copy_blocks(std::uint8_t* target, Bytes source, std::size_t block_size, std::uint32_t prefix_crc,
                   std::size_t prefix_size, unsigned threads);

}  // namespace replicator

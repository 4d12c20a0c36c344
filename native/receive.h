#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace replicator {

struct ReceiveOptions {
  std::size_t block_size;
  std::chrono::duration<double> progress_timeout;  // give up when no byte arrives for this long
  std::chrono::duration<double> slice;             // return after about this long, with at least one byte
  int cancel_fd;                                   // give up as soon as it is readable; -1: none
  std::uint32_t prefix_crc;                        // of the part of the first block that is before the target
  std::size_t prefix_size;                         // less than block_size
};

struct Received {
  std::size_t size = 0;                   // bytes now in the target
  std::vector<std::uint32_t> block_crcs;  // of the blocks that are complete
  std::uint32_t tail_crc = 0;             // of the bytes of the block after them
  int error = 0;                          // ETIME no progress, ENODATA end of stream, ECANCELED, else the socket's
};

// Receives into `target` from a stream socket, blocking or not, until it is full, `slice` is over, or an error.
// The checksum of each piece is computed right behind its receive, while it is in cache.
Received receive(int fd, std::span<std::uint8_t> target, const ReceiveOptions& options);

}  // namespace replicator

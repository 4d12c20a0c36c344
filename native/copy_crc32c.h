#pragma once

#include "crc32c.h"

namespace replicator {

// Copies `source` to `target`, which must not overlap it, and continues `value` over its bytes.
std::uint32_t copy_crc32c(std::uint8_t* target, Bytes source, std::uint32_t value);

}  // namespace replicator

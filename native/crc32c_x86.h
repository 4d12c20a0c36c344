#pragma once

#include <vector>

#include "crc32c.h"

namespace replicator {

// Nothing on other processors.
void add_x86_kernels(std::vector<Crc32cKernel>& kernels);

}  // namespace replicator

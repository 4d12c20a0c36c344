"""Huge pages for new segments on a tmpfs that gives none by itself.

`huge=never` is the default of every tmpfs, and remounting takes root. But a process may ask for the pages of a range of
a file (MADV_COLLAPSE, Linux 6.1). One small write per huge page puts a small page there; the kernel clears a huge page
and puts it in the place of that one and of the hole around it. Where huge pages are free that is several times as fast
as allocating and touching small ones, and mapping the file anew costs next to nothing ever after.

Where none are free the kernel moves memory about to make some, and in a virtual machine the host may have to find the
memory first: both are slower than small pages. Who cannot wait stops at the first sign of it. Mount option `huge=`,
sysfs `enabled` and privileges do not matter; `deny` in `/sys/kernel/mm/transparent_hugepage/shmem_enabled` is obeyed.
"""

from __future__ import annotations

import errno
import os
import time

from replicator.store import mapping
from replicator.store.mapping import HUGE_PAGE

MIN_BYTES = 2 * HUGE_PAGE
"""Smaller files get none: asking costs as much as touching them."""
SLICE_BYTES = 4 << 20
SLICES_AT_MOST = 32 << 20
"""The kernel looks at every processor for each, so small ones are slow; one that turns out slow is not cut short."""
SLOW_BYTES_PER_CPU_S = 500_000_000
"""Slower than this, small pages are better."""
_MADV_COLLAPSE = 25


def collapse(fd: int, address: int, offset: int, length: int) -> int:
    """Give a part of a new file, mapped at `address`, huge pages; how many bytes of it now have some.

    What is not covered by a whole huge page is left as it was, and so is everything where the kernel has none to give.

    Raises:
        OSError: the file system is full.
    """
    first = -(-offset // HUGE_PAGE) * HUGE_PAGE
    end = (offset + length) // HUGE_PAGE * HUGE_PAGE
    if end <= first or (address + first - offset) % HUGE_PAGE:
        return 0
    for start in range(first, end, HUGE_PAGE):
        os.pwrite(fd, b"\0", start)
    while True:
        number = mapping.advise(address + first - offset, end - first, _MADV_COLLAPSE)
        if number != errno.EINTR:
            return 0 if number else end - first


def allocate(fd: int, capacity: int) -> int:
    """Allocate the first bytes of a new file of `capacity` bytes in huge pages, as far as that is quick; how many.

    Raises:
        OSError: the file system is full.
    """
    if capacity < MIN_BYTES:
        return 0
    done, size = 0, SLICE_BYTES
    with mapping.mapped_for_advice(fd, capacity) as address:
        while done < capacity:
            length = min(size, capacity - done)
            began = time.thread_time()
            got = collapse(fd, address + done, done, length)
            done += got
            if not got or time.thread_time() - began > got / SLOW_BYTES_PER_CPU_S:
                break
            size = min(4 * size, SLICES_AT_MOST)
    return done

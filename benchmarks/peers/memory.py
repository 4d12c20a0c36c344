"""The buffers that peers move: mapped tmpfs memory, every page touched, as the product's segments are."""

from __future__ import annotations

import zlib

from benchmarks.limits import address_of, mapped_file


class Buffer:
    """`size` bytes of mapped tmpfs memory: random ones, or zeros."""

    def __init__(self, directory: str, size: int, *, random: bool) -> None:
        self._area = mapped_file(directory, size, faulted=True)
        if not random:
            self._area[:] = bytes(size)
        self.size = size
        self.address = address_of(self._area)

    def pieces(self, count: int) -> list[tuple[int, int]]:
        """(offset, length) of so many pieces, nearly equal, each starting at a page."""
        share = -(-self.size // count // 4096) * 4096
        return [(offset, min(share, self.size - offset)) for offset in range(0, self.size, share)]

    def fingerprint(self) -> int:
        """CRC-32 of the bytes."""
        return zlib.crc32(self._area)

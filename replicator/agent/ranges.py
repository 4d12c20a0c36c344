"""A whole object as a stream of verified pieces, whether it is here or elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence

from replicator.agent.landing import Landing
from replicator.agent.sources import Opener, PeerSource
from replicator.agent.threads import run_to_end
from replicator.checksum import block_length
from replicator.decide.types import ObjectSource
from replicator.errors import CorruptObjectError, ObjectNotFoundError, TransferError
from replicator.ids import NodeAddress, ObjectVersion
from replicator.native import copy_crc32c
from replicator.store import Store
from replicator.store.reader import open_object
from replicator.store.trailer import ObjectInfo
from replicator.transfer.turns import Patience

PIECE_BYTES = 1 << 20
# Of an object that is read as a stream: brought and verified at a time.
_WINDOW_BYTES = 32 << 20
MAX_READS = 8


class Ranges:
    """Used in the event loop only."""

    def __init__(self, address: NodeAddress, store: Store, opener: Opener, landing: Landing) -> None:
        self._node_id = address.node_id
        self._store = store
        self._opener = opener
        self._landing = landing
        self._reads = asyncio.Semaphore(MAX_READS)

    async def read(self, one: ObjectVersion, source: ObjectSource, patience: Patience) -> AsyncIterator[bytes]:
        """All bytes of the object in order, in pieces of at most PIECE_BYTES, each verified before it is given.

        Raises:
            ObjectNotFoundError, TransferError, CorruptObjectError: with each source's reason; TransferError also
                when MAX_READS others are being read for `deadline_s`.
        """
        deadline_s = patience.policy.progress_timeout_s
        try:
            async with asyncio.timeout(deadline_s):
                await self._reads.acquire()
        except TimeoutError:
            raise TransferError(
                f"{one} cannot be read now: {MAX_READS} objects are being read, and were for {deadline_s:.1f} s; "
                "try again, or another agent"
            ) from None
        try:
            async for piece in self._pieces(one, source, patience):
                yield piece
        finally:
            self._reads.release()

    async def _pieces(self, one: ObjectVersion, source: ObjectSource, patience: Patience) -> AsyncIterator[bytes]:
        sources = self._opener.sources(one, source.node_ids)
        info, is_local = await self._describe(one, source, sources, patience)
        count = len(info.block_crcs)
        window = max(1, _WINDOW_BYTES // info.block_size)
        for first in range(0, count, window):
            blocks = range(first, min(first + window, count))
            size = sum(block_length(block, info.size, info.block_size) for block in blocks)
            buffer = memoryview(bytearray(size))
            node_id = await self._bring(info, sources, buffer, blocks, patience, is_local=is_local)
            is_local = node_id == self._node_id
            for start in range(0, size, PIECE_BYTES):
                yield bytes(buffer[start : start + PIECE_BYTES])

    async def _describe(
        self, one: ObjectVersion, source: ObjectSource, sources: Sequence[PeerSource], patience: Patience
    ) -> tuple[ObjectInfo, bool]:
        """The object's block table, and whether this node holds it."""
        held = self._store.get(one)
        if held is not None and (held.size, held.crc32c) == (source.size, source.crc32c):
            return held, True
        return await self._opener.describe_any(sources, one, source.size, source.crc32c, patience), False

    async def _bring(
        self,
        info: ObjectInfo,
        sources: Sequence[PeerSource],
        target: memoryview,
        blocks: Sequence[int],
        patience: Patience,
        *,
        is_local: bool,
    ) -> str:
        """Fill `target` with blocks, this node's own when they are good; the id of the node they are from."""
        if is_local:
            try:
                await run_to_end(lambda: self._copy_local(info, target, blocks))
                return self._node_id
            except ObjectNotFoundError:
                pass
            except CorruptObjectError as error:
                await self._landing.set_aside(info.object, error)
        if not sources:
            raise ObjectNotFoundError(
                f"{info.object} is not held by this node any more, and no other holder is named; look up a new plan"
            )
        report = await self._landing.fill(info, sources, target, patience, blocks=blocks)
        main = report.main_part
        return main.node_id if main else ""

    def _copy_local(self, info: ObjectInfo, target: memoryview, blocks: Iterable[int]) -> None:
        """Copy and verify in one pass. Raises ObjectNotFoundError, CorruptObjectError."""
        with open_object(self._store.paths, info.object) as reader:
            if reader.info.block_crcs != info.block_crcs:
                raise CorruptObjectError(f"{info.object}: its block table is not the one that was described")
            view = reader.view
            at = 0
            for block in blocks:
                start = block * info.block_size
                piece = view[start : min(start + info.block_size, info.size)]
                if copy_crc32c(target[at:], piece) != info.block_crcs[block]:
                    raise CorruptObjectError(f"{info.object}: block {block} does not match its checksum")
                at += len(piece)
                piece.release()

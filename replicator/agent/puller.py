"""Brings objects of other nodes into this node's store: verified block by block, from whichever source works."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from replicator.decide.types import ObjectSource
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.v1 import local_pb2


class Puller:
    """Used in the event loop only. Concurrent pulls are bounded, and one object is pulled once at a time."""

    def retrieve(
        self, version: ContainerVersion, sources: Sequence[ObjectSource], deadline_s: float
    ) -> AsyncIterator[local_pb2.RetrieveEvent]:
        """Bring whole objects into this node's store. At least one event per object; failures are events too.

        Args:
            deadline_s: without progress for this long, a source is given up.
        """
        raise NotImplementedError

    async def retrieve_ranges(
        self,
        client_id: str,
        version: ContainerVersion,
        source: ObjectSource,
        ranges: Sequence[tuple[int, int]],
        deadline_s: float,
    ) -> local_pb2.RetrieveRangesReply:
        """Bring the blocks that cover (offset, length) ranges into a scratch segment reserved for `client_id`.

        Raises:
            InvalidIdError: a range outside the object.
            StoreFullError, TransferError, CorruptObjectError: with each source's reason.
        """
        raise NotImplementedError

    def read_object(self, version: ContainerVersion, source: ObjectSource, deadline_s: float) -> AsyncIterator[bytes]:
        """The object's bytes in pieces of at most 1 MiB, each verified: local, or forwarded from a holder.

        Raises:
            ObjectNotFoundError, TransferError, CorruptObjectError: with each source's reason.
        """
        raise NotImplementedError

    async def check_local(self, one: ObjectVersion) -> bool:
        """Verify every block of this node's copy. A copy that fails goes to quarantine, and the answer is False.

        Raises:
            ObjectNotFoundError: there is no copy here.
        """
        raise NotImplementedError

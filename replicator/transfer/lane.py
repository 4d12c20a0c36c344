"""What a lane is: a way to bring a range of a sealed object from one node into memory here.

A lane only moves bytes and says what their checksums are. Whether they are the right ones, and who is asked
next when they are not, is decided in pull.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from replicator.ids import NodeAddress, ObjectVersion

if TYPE_CHECKING:
    from replicator.store.trailer import ObjectInfo

OnBytes = Callable[[int], None]
"""Called with the number of bytes that arrived since the last call."""
OnBlocks = Callable[[int, Sequence[int]], None]
"""Called with the number of the first of some consecutive blocks that are complete, and the CRC32C of each."""


@dataclass(frozen=True, slots=True)
class Source:
    """A node that holds the object, and how its bytes are reached there."""

    node: NodeAddress
    bulk_address: str = ""
    """`host:port` of its bulk lane; empty when it has none."""
    ticket: str = ""
    """For the bulk lane, of the one object."""

    @property
    def node_id(self) -> str:
        return self.node.node_id


class Lane(Protocol):
    """One way to move bytes. Used in one event loop; blocking work is done elsewhere, and bounded."""

    @property
    def name(self) -> str:
        """`bulk` or `grpc`."""

    async def fetch(
        self,
        source: Source,
        object: ObjectVersion,
        offset: int,
        length: int,
        target: memoryview,
        *,
        block_size: int,
        progress_timeout_s: float,
        on_bytes: OnBytes,
        on_blocks: OnBlocks,
    ) -> None:
        """Bring `length` bytes from `offset` on into the start of `target`. Returns when all have arrived.

        Both callbacks run in the event loop, before this returns or raises. Every complete block of the range is
        reported exactly once, also when the fetch fails later; the last one may be short. Once this has ended, by
        whatever means (cancellation too), nothing writes to `target` any more.

        Args:
            offset: a multiple of `block_size`.
            progress_timeout_s: give up when nothing arrives for this long. There is no limit for the whole (F47).

        Raises:
            PeerUnavailableError: no connection to the source.
            TicketError: the source does not accept the ticket (any more).
            ObjectNotFoundError: the source does not hold the object.
            TransferStalledError: nothing arrived within the deadline; says from whom, and for how long.
            TransferError: the connection broke, or the source answered something else.
        """

    async def close(self) -> None:
        """Close all connections that are kept. No fetch may be under way."""


class ServedObject(Protocol):
    """A sealed object that is open for reading: `store.reader.ObjectReader`. A context manager."""

    @property
    def info(self) -> ObjectInfo: ...
    @property
    def fd(self) -> int:
        """A descriptor whose first `info.size` bytes are the payload."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> bool | None: ...

"""Peers as sources of objects: opened by one call, compared with what is wanted, and the bad ones tried last."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from replicator.agent.counters import Counters
from replicator.agent.logs import fields
from replicator.agent.peers import PeerDirectory
from replicator.config import AgentConfig
from replicator.errors import (
    CorruptObjectError,
    ObjectNotFoundError,
    PeerUnavailableError,
    ReplicatorError,
    TransferError,
)
from replicator.ids import NodeAddress, ObjectVersion
from replicator.store.trailer import ObjectInfo
from replicator.transfer.lane import Source
from replicator.transfer.pull import PullSource
from replicator.transfer.turns import Patience, ask_in_turn
from replicator.v1 import peer_pb2
from replicator.wire import info_from_pb, object_to_pb, sender_to_pb, validate_address

MAX_BAD = 65536
# Checks of bad copies, by their holders, that are under way at a time.
MAX_CHECKS = 64

log = logging.getLogger(__name__)


class PeerSource:
    """One node that may hold one object."""

    def __init__(self, opener: Opener, one: ObjectVersion, node_id: str, node: NodeAddress | None) -> None:
        self.node_id = node_id
        self._opener = opener
        self._one = one
        self._node = node
        self._opened: Source | None = None

    async def describe(self) -> ObjectInfo:
        """What the node holds under the object's name, its block table consistent with its checksum.

        Raises:
            ReplicatorError: it cannot be reached, does not hold the object, or what it says contradicts itself.
        """
        node = self._node or self._opener.peers.resolve(self._one.version.container.job, self.node_id)
        info, self._opened = await self._opener.open(self._one, node)
        return info

    def pull_source(self, wanted: ObjectInfo) -> PullSource:
        """For `pull`: opened anew each time, unless it was described just before."""

        async def open_it() -> Source:
            source, self._opened = self._opened, None
            if source is None:
                try:
                    require_same(await self.describe(), wanted, self.node_id)
                except CorruptObjectError:
                    self._opener.note_bad(self._one, self.node_id)
                    raise
                source, self._opened = self._opened, None
                assert source is not None, "describe opens it"
            return source

        return PullSource(self.node_id, open_it)


class Opener:
    """Opens objects at peers, and remembers whose copies were bad. Used in the event loop only."""

    def __init__(self, config: AgentConfig, own_node_id: str, peers: PeerDirectory, counters: Counters) -> None:
        self.peers = peers
        self._own_node_id = own_node_id
        self._deadline_s = config.rpc_deadline_s
        self._want_ticket = config.lane != "grpc" and not config.tls
        self._counters = counters
        self._bad: OrderedDict[tuple[ObjectVersion, str], None] = OrderedDict()
        self._checks: dict[tuple[ObjectVersion, str], asyncio.Task[None]] = {}

    def sources(self, one: ObjectVersion, node_ids: Iterable[str]) -> list[PeerSource]:
        """The other nodes as sources, those whose copy was found to be bad last."""
        wanted = [node_id for node_id in dict.fromkeys(node_ids) if node_id != self._own_node_id]
        wanted.sort(key=lambda node_id: (one, node_id) in self._bad)
        return [PeerSource(self, one, node_id, None) for node_id in wanted]

    def source_at(self, one: ObjectVersion, node: NodeAddress) -> PeerSource:
        """A node whose address is given."""
        return PeerSource(self, one, node.node_id, node)

    async def open(self, one: ObjectVersion, node: NodeAddress) -> tuple[ObjectInfo, Source]:
        """One OpenObject call. Raises ReplicatorError."""
        request = peer_pb2.OpenObjectRequest(
            sender=sender_to_pb(self.peers.sender_of(one.version.container.job)),
            object=object_to_pb(one),
            want_ticket=self._want_ticket,
        )
        reply = await self.peers.unary(
            node,
            "PeerService/OpenObject",
            request,
            peer_pb2.OpenObjectReply,
            awaited=f"a description of {one}",
            deadline_s=self._deadline_s,
        )
        info = info_from_pb(reply.descriptor)
        if info.object != one:
            raise CorruptObjectError(f"asked for {one}, got a description of {info.object}")
        bulk = validate_address(reply.bulk_address) if reply.bulk_address and reply.ticket else ""
        return info, Source(node, bulk, reply.ticket)

    async def describe_any(
        self, sources: Sequence[PeerSource], one: ObjectVersion, size: int, crc: int, patience: Patience
    ) -> ObjectInfo:
        """What the first source says that has the wanted size and checksum; sources before it are told as failed.

        Raises:
            ObjectNotFoundError: nobody was named as a holder.
            CorruptObjectError, PeerUnavailableError, TransferError: none gave it; with each one's reason.
        """

        async def describe(source: PeerSource) -> ObjectInfo:
            try:
                info = await source.describe()
                require_content(info, size, crc, source.node_id)
            except CorruptObjectError:
                self.note_bad(one, source.node_id)
                raise
            return info

        asked = await ask_in_turn(sources, describe, patience, "a description")
        if asked.result is not None:
            return asked.result
        if not asked.failures:
            raise ObjectNotFoundError(f"no other node is known to hold {one}; ask for a new plan with a lookup")
        raise failure_of(one, asked.failures)

    def note_bad(self, one: ObjectVersion, node_id: str) -> None:
        """A source gave bytes, or a description, that do not match: it is tried last from now on."""
        self._counters.add("bad_blocks_received")
        self._bad[one, node_id] = None
        while len(self._bad) > MAX_BAD:
            self._bad.popitem(last=False)

    def have_checked(self, one: ObjectVersion, node_id: str) -> None:
        """Let a source of bad bytes look at its copy; it believes only what it finds, and offers a bad one no more.

        It may be the only holder, and then every plan would be one that cannot be carried out (F01).
        """
        if (one, node_id) not in self._checks and len(self._checks) < MAX_CHECKS:
            task = asyncio.get_running_loop().create_task(self._check(one, node_id))
            self._checks[one, node_id] = task
            task.add_done_callback(lambda done: self._checks.pop((one, node_id), None))

    async def checked(self, one: ObjectVersion) -> None:
        """Wait until the sources whose copies of an object were bad have looked at them, and offer them no more.

        Whoever is told that the object cannot be had, and asks for another plan then, gets another one.
        """
        due = [task for (checked, _), task in self._checks.items() if checked == one]
        if due:
            await asyncio.wait(due)

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = list(self._checks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self, one: ObjectVersion, node_id: str) -> None:
        job = one.version.container.job
        request = peer_pb2.CheckObjectRequest(sender=sender_to_pb(self.peers.sender_of(job)), object=object_to_pb(one))
        try:
            reply = await self.peers.unary(
                self.peers.resolve(job, node_id),
                "PeerService/CheckObject",
                request,
                peer_pb2.CheckObjectReply,
                awaited=f"a check of its copy of {one}",
                deadline_s=self._deadline_s,
            )
        except ReplicatorError as error:
            log.info("a bad copy could not be checked", extra=fields(one, peer=node_id, reason=error))
        else:
            log.info("a copy was checked where it is", extra=fields(one, peer=node_id, sound=reply.sound))


def require_content(info: ObjectInfo, size: int, crc: int, node_id: str) -> None:
    """Raises CorruptObjectError when what the node holds is not what is wanted."""
    if (info.size, info.crc32c) != (size, crc):
        raise CorruptObjectError(
            f"expected {info.object} with {size} bytes and checksum {crc:08x}, found {info.size} bytes, "
            f"{info.crc32c:08x} on node {node_id}"
        )


def require_same(info: ObjectInfo, wanted: ObjectInfo, node_id: str) -> None:
    """Raises CorruptObjectError when the node holds other bytes than `wanted`."""
    require_content(info, wanted.size, wanted.crc32c, node_id)


def failure_of(one: ObjectVersion, reasons: Sequence[tuple[str, ReplicatorError]]) -> ReplicatorError:
    """One error for several sources that failed; of their kind when they agree."""
    kinds = {type(error) for _, error in reasons}
    kind: type[ReplicatorError] = TransferError
    if len(kinds) == 1 and kinds <= {CorruptObjectError, PeerUnavailableError, ObjectNotFoundError}:
        kind = kinds.pop()
    listed = "; ".join(f"{node_id}: {error}" for node_id, error in reasons[:8])
    return kind(f"{one} cannot be had from any of {len(reasons)} nodes: {listed}")

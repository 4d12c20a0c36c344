"""Bytes of a container's objects for a load: from this node when they are here, else from their holders.

An object of which a load needs half or more is brought into this node's store whole, so that it is there for the
other ranks and for the next load; of others only the blocks that cover what is needed are brought, into scratch
memory. Whatever the source, each block is checked against its checksum while it is copied out, and the block
checksums against the manifest's. A copy that does not match is reported to the agent, which puts it in quarantine,
and the next holder is asked.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

from replicator.checkpoint.verified_copy import Block, Extent, copy_verified
from replicator.client.plan import Plan
from replicator.client.retrieval import retrieve, retrieve_blocks
from replicator.client.session import Session
from replicator.decide.types import ObjectSource
from replicator.errors import CorruptObjectError, ObjectNotFoundError
from replicator.store.reader import ObjectReader, open_object

logger = logging.getLogger("replicator.checkpoint")


@dataclass(frozen=True, slots=True)
class Pulled:
    """Bytes that a load had another node send: a whole object, or (`whole` is false) the blocks that it needed."""

    name: str
    size: int
    source_node_id: str
    lane: str
    whole: bool


class Fetcher:
    """For one plan. Not thread-safe; the copying itself is spread over `executor`.

    `pulled` lists what had to come from other nodes.
    """

    def __init__(self, session: Session, plan: Plan, executor: Executor | None = None) -> None:
        self._session = session
        self._version = plan.require()
        self._sources = {source.name: source for source in plan.sources}
        self._executor = executor
        self.pulled: list[Pulled] = []

    def source(self, name: str) -> ObjectSource:
        """Raises ObjectNotFoundError for an object that the container does not have."""
        try:
            return self._sources[name]
        except KeyError:
            raise ObjectNotFoundError(f"{self._version} has no object {name!r}") from None

    def prefetch(self, needed: Mapping[str, int]) -> None:
        """Bring what will be needed nearly whole to this node, all at once. `needed`: bytes per object name.

        Raises:
            ReplicatorError: an object that no holder could give.
        """
        wanted = [
            self.source(name)
            for name, size in needed.items()
            if 2 * size >= self.source(name).size and not self._is_here(self.source(name))
        ]
        if wanted:
            self._retrieve(wanted)

    def fetch(self, name: str, extents: Sequence[Extent]) -> None:
        """Fill the targets with verified bytes of one object.

        Raises:
            CorruptObjectError: no holder has bytes that match their checksums. The targets are then all zeros: no
                byte that was not verified stays in them.
            ReplicatorError: they cannot be had.
        """
        source = self.source(name)
        done = False
        try:
            self._fill(source, extents)
            done = True
        finally:
            if not done:
                for extent in extents:
                    extent.target[:] = bytes(len(extent.target))

    def _fill(self, source: ObjectSource, extents: Sequence[Extent]) -> None:
        """Until good bytes are found, with one holder fewer each time that a copy proves bad."""
        holders = source.node_ids
        reasons: list[str] = []
        # This node may have a copy that the plan does not know of, and a copy may be read twice.
        for _ in range(len(holders) + 2):
            rest = dataclasses.replace(source, node_ids=holders)
            fill = self._fill_here if self._is_here(rest) else self._fill_from
            bad_holder, reason = fill(rest, extents)
            if not reason:
                return
            reasons.append(reason)
            logger.error("%s", reason)
            holders = tuple(node_id for node_id in holders if node_id != bad_holder)
            if not holders:
                break
        raise CorruptObjectError(
            f"no copy of {self._version.object(source.name)} matches its checksums: {'; '.join(reasons)}"
        )

    def _is_here(self, source: ObjectSource) -> bool:
        try:
            with open_object(self._session.agent.paths, self._version.object(source.name)) as held:
                return held.info.size == source.size and held.info.crc32c == source.crc32c
        except (ObjectNotFoundError, CorruptObjectError):
            return False

    def _fill_here(self, source: ObjectSource, extents: Sequence[Extent]) -> tuple[str, str]:
        """(bad holder, why) when this node's copy is not good, else two empty texts."""
        one = self._version.object(source.name)
        with open_object(self._session.agent.paths, one) as held:
            bad = copy_verified(extents, held.info.block_size, lambda index: _block(held, index), self._executor)
        if not bad:
            return "", ""
        reason = f"{_blocks(bad)} of {one} on this node do not match their checksums"
        if not self._session.agent.report_corrupt(one, reason):
            reason += ", although the agent's own check found nothing wrong: is this machine's memory sound?"
        return self._session.node.node_id, reason

    def _fill_from(self, source: ObjectSource, extents: Sequence[Extent]) -> tuple[str, str]:
        ranges = [(extent.offset, len(extent.target)) for extent in extents if len(extent.target)]
        if not ranges:
            return "", ""
        if 2 * sum(length for _, length in ranges) >= source.size:
            self._retrieve([source])
            return self._fill_here(source, extents)
        session = self._session
        with retrieve_blocks(session.agent, self._version, source, ranges, session.epoch, session.deadline_s) as blocks:
            size = sum(min(blocks.block_size, source.size - index * blocks.block_size) for index in blocks.index)
            self.pulled.append(Pulled(source.name, size, blocks.source_node_id, "", False))

            def block_at(index: int) -> Block:
                start = blocks.index[index] * blocks.block_size
                size = min(blocks.block_size, source.size - index * blocks.block_size)
                return Block(index, blocks.view[start : start + size], blocks.crc32c[index])

            bad = copy_verified(extents, blocks.block_size, block_at, self._executor)
        if not bad:
            return "", ""
        holder = blocks.source_node_id
        return (
            holder,
            f"{_blocks(bad)} of {self._version.object(source.name)} from {holder} do not match their checksums",
        )

    def _retrieve(self, sources: Sequence[ObjectSource]) -> None:
        session = self._session
        retrieved = retrieve(session.agent, self._version, sources, session.epoch, session.deadline_s)
        for source, one in zip(sources, retrieved, strict=True):
            if not one.was_local:
                self.pulled.append(Pulled(source.name, source.size, one.source_node_id, one.lane, True))


def _block(held: ObjectReader, index: int) -> Block:
    start = index * held.info.block_size
    return Block(index, held.view[start : start + held.info.block_size], held.info.block_crcs[index])


def _blocks(bad: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in bad[:4])
    return f"block{'s' if len(bad) > 1 else ''} {shown}" + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")

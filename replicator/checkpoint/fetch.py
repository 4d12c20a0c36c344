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
from replicator.native import combine_blocks
from replicator.store.reader import ObjectReader, open_object

logger = logging.getLogger("replicator.checkpoint")

_CLEARED_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Pulled:
    """Bytes that a load had another node send: a whole object, or (`whole` is false) the blocks that it needed."""

    name: str
    size: int
    source_node_id: str
    lane: str
    whole: bool


class Fetcher:
    """For one plan; a context manager. Not thread-safe; the copying itself is spread over `executor`.

    `pulled` lists what had to come from other nodes.
    """

    def __init__(self, session: Session, plan: Plan, executor: Executor | None = None) -> None:
        self._session = session
        self._version = plan.require()
        self._sources = {source.name: source for source in plan.sources}
        self._executor = executor
        self._open: dict[str, ObjectReader] = {}
        self.pulled: list[Pulled] = []

    def done(self, name: str) -> None:
        """Let go of this node's copy of an object: its memory may be used for something else from now on."""
        held = self._open.pop(name, None)
        if held is not None:
            held.close()

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._open):
            self.done(name)

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
        wanted = []
        for name, size in needed.items():
            source = self.source(name)
            if 2 * size >= source.size and self._here(source) is None:
                wanted.append(source)
            self.done(name)
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
                    _clear(extent.target)

    def _fill(self, source: ObjectSource, extents: Sequence[Extent]) -> None:
        """Until good bytes are found, with one holder fewer each time that a copy proves bad."""
        holders = source.node_ids
        reasons: list[str] = []
        # This node may have a copy that the plan does not know of, and a copy may be read twice.
        for _ in range(len(holders) + 2):
            rest = dataclasses.replace(source, node_ids=holders)
            held = self._here(rest)
            bad_holder, reason = self._fill_here(held, extents) if held else self._fill_from(rest, extents)
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

    def _here(self, source: ObjectSource) -> ObjectReader | None:
        """This node's copy, open, when its own description is sound and is that of the manifest."""
        if source.name in self._open:
            return self._open[source.name]
        one = self._version.object(source.name)
        try:
            held = open_object(self._session.agent.paths, one)
        except ObjectNotFoundError:
            return None
        except CorruptObjectError as error:
            self._session.agent.report_corrupt(one, str(error))
            return None
        info = held.info
        combined = combine_blocks(info.block_crcs, info.size, info.block_size)
        if (info.size, info.crc32c, combined) != (source.size, source.crc32c, source.crc32c):
            held.close()
            self._session.agent.report_corrupt(one, "its description is not that of the manifest")
            return None
        self._open[source.name] = held
        return held

    def _fill_here(self, held: ObjectReader, extents: Sequence[Extent]) -> tuple[str, str]:
        """(bad holder, why) when this node's copy is not good, else two empty texts."""
        one = held.info.object
        bad = copy_verified(extents, held.info.block_size, lambda index: _block(held, index), self._executor)
        if not bad:
            return "", ""
        self.done(one.name)
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
            held = self._here(source)
            if held is not None:
                return self._fill_here(held, extents)
            return self._session.node.node_id, f"{self._version.object(source.name)} was brought here and is not here"
        session = self._session
        with retrieve_blocks(
            session.segments, self._version, source, ranges, session.epoch, session.deadline_s
        ) as blocks:
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


def _clear(target: memoryview) -> None:
    zeros = bytes(min(len(target), _CLEARED_AT_ONCE))
    for start in range(0, len(target), _CLEARED_AT_ONCE):
        piece = target[start : start + _CLEARED_AT_ONCE]
        piece[:] = zeros[: len(piece)]


def _block(held: ObjectReader, index: int) -> Block:
    start = index * held.info.block_size
    return Block(index, held.view[start : start + held.info.block_size], held.info.block_crcs[index])


def _blocks(bad: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in bad[:4])
    return f"block{'s' if len(bad) > 1 else ''} {shown}" + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")

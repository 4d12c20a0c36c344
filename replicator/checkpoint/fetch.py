"""Bytes of a container's objects for a load: from this node when they are here, else from their holders.

What is not here comes in windows: blocks in scratch memory, which are copied on while the next ones are brought. An
object of which a load needs half or more comes into this node's store as well, after the load, so that it is there for
the next one and for other nodes. Objects of one block come into the store at once, many together.

Whatever the source, each block is checked against its checksum while it is copied out, and the block checksums against
the manifest's. A copy that does not match is reported to the agent, which puts it in quarantine, and the next holder is
asked.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import LoadPlanner

from replicator.checkpoint.assembly import Assembly
from replicator.checkpoint.loading import BytesReading, Reading
from replicator.checkpoint.verified_copy import Block, copy_verified
from replicator.checksum import BLOCK_SIZE, block_length
from replicator.client.plan import Plan
from replicator.client.retrieval import retrieve, retrieve_later
from replicator.client.session import Session
from replicator.client.windows import Window, WindowRing
from replicator.decide.types import ObjectSource
from replicator.errors import CorruptObjectError, ObjectNotFoundError, StoreFullError
from replicator.native import COPY_THREADS, combine_blocks
from replicator.store.reader import ObjectReader, open_object
from replicator.store.segment import MappedSegment

logger = logging.getLogger("replicator.checkpoint")

LOCAL_BYTES = 128 << 20
"""Of this node's copy, copied at a time."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Bytes that a load had another node send: a whole object, or (`whole` is false) the blocks that it needed."""

    name: str
    size: int
    source_node_id: str
    lane: str
    whole: bool


class Fetcher:
    """For one plan; a context manager. Not thread-safe; `threads` share the copying.

    `pulled` lists what had to come from other nodes.
    """

    def __init__(self, session: Session, plan: Plan, threads: int = COPY_THREADS) -> None:
        self._session = session
        self._version = plan.require()
        self._sources = {source.name: source for source in plan.sources}
        self._threads = threads
        self._open: dict[str, ObjectReader] = {}
        # As an observer of another job: its epoch is its own affair.
        self._epoch = session.epoch if self._version.container.job == session.job else 0
        self._ring = WindowRing(session.segments, self._version, self._epoch, self._scratch, session.deadline_s)
        self._expected: set[str] = set()
        self._behind: dict[str, ObjectSource] = {}
        self.pulled: list[Pulled] = []

    def __enter__(self) -> Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._open):
            self._done(name)
        self._ring.close()
        if self._behind:
            session = self._session
            behind = list(self._behind.values())
            retrieve_later(session.agent, self._version, behind, self._epoch, session.deadline_s)

    def keep(self, name: str) -> None:
        """Bring all of an object into this node's store after the load."""
        self._behind.setdefault(name, self._source(name))

    def read_bytes(self, name: str) -> bytearray:
        """All of an object. Raises like `read`."""
        reading = BytesReading(self._source(name).size)
        self.read({name: [reading]}, None)
        return reading.data

    def read(self, by_object: Mapping[str, Sequence[Reading]], planner: LoadPlanner | None) -> None:
        """Fill items with verified bytes of their objects, and hand them to the planner.

        Raises:
            ObjectNotFoundError: the container has no such object.
            CorruptObjectError: no holder has bytes that match their checksums. What was being read is then all zeros:
                no byte that was not verified stays in it.
            ReplicatorError: they cannot be had.
        """
        work = {name: Assembly(readings, planner) for name, readings in by_object.items()}
        self._expect(work)
        for name, assembly in work.items():
            self._read(self._source(name), assembly)
            self._done(name)
        again = {name: assembly.again for name, assembly in work.items() if assembly.again}
        if again:
            self.read(again, planner)

    def _scratch(self, capacity: int) -> MappedSegment:
        return self._session.segments.scratch(self._session.job, capacity, self._session.epoch)

    def _source(self, name: str) -> ObjectSource:
        try:
            return self._sources[name]
        except KeyError:
            raise ObjectNotFoundError(f"{self._version} has no object {name!r}") from None

    def _expect(self, work: Mapping[str, Assembly]) -> None:
        """Have what is not here brought, in the order in which it will be read; small objects all at once."""
        small = []
        for name, assembly in work.items():
            source = self._source(name)
            if assembly.needed and self._here(source) is None:
                if source.size <= BLOCK_SIZE and 2 * assembly.needed >= source.size:
                    small.append(source)
                else:
                    self._expect_windows(source, assembly)
            self._done(name)
        if small:
            self._retrieve(small)

    def _expect_windows(self, source: ObjectSource, assembly: Assembly, *, first: bool = False) -> None:
        whole = 2 * assembly.needed >= source.size
        self._ring.expect(source, assembly.blocks(BLOCK_SIZE), whole=whole, first=first)
        self._expected.add(source.name)
        if whole:
            self._behind[source.name] = source

    def _expect_no_windows(self, name: str) -> None:
        if name in self._expected:
            self._expected.discard(name)
            self._ring.drop(name)
            self._behind.pop(name, None)

    def _read(self, source: ObjectSource, work: Assembly) -> None:
        """Until good bytes are found, with one holder fewer each time that a copy proves bad."""
        holders = source.node_ids
        reasons: list[str] = []
        brought: Counter[tuple[str, str]] = Counter()
        try:
            while work.blocks(BLOCK_SIZE):
                rest = dataclasses.replace(source, node_ids=holders)
                held = self._here(rest)
                if held is not None:
                    self._expect_no_windows(source.name)
                    bad_holder, reason = self._copy_here(held, work)
                else:
                    bad_holder, reason = self._copy_window(rest, work, brought)
                if not reason:
                    continue
                reasons.append(reason)
                logger.error("%s", reason)
                holders = tuple(node_id for node_id in holders if node_id != bad_holder)
                # This node may have a copy that the plan does not know of, and a copy may be read twice.
                if not holders or len(reasons) == len(source.node_ids) + 2:
                    raise CorruptObjectError(
                        f"no copy of {self._version.object(source.name)} matches its checksums: {'; '.join(reasons)}"
                    )
            work.advance(source.size)
        except BaseException:
            work.clear()
            raise
        if brought:
            (node_id, lane), _ = brought.most_common(1)[0]
            size = brought.total()
            self.pulled.append(Pulled(source.name, size, node_id, lane, size == source.size))

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

    def _done(self, name: str) -> None:
        """Let go of this node's copy of an object: its memory may be used for something else from now on."""
        held = self._open.pop(name, None)
        if held is not None:
            held.close_aside()

    def _copy_here(self, held: ObjectReader, work: Assembly) -> tuple[str, str]:
        """(bad holder, why) when this node's copy is not good, else two empty texts."""
        info = held.info
        one, block_size = info.object, info.block_size
        while blocks := work.blocks(block_size):
            last = blocks[min(len(blocks), max(1, LOCAL_BYTES // block_size)) - 1]
            part = range(blocks[0], last + 1)
            end = part.stop * block_size
            bad = copy_verified(
                work.extents(end),
                block_size,
                lambda index: _block(held, index),
                part,
                threads=self._threads,
            )
            if bad:
                self._done(one.name)
                reason = f"{_blocks(bad)} of {one} on this node do not match their checksums"
                if not self._session.agent.report_corrupt(one, reason):
                    reason += ", although the agent's own check found nothing wrong: is this machine's memory sound?"
                return self._session.node.node_id, reason
            work.advance(end)
        return "", ""

    def _copy_window(self, source: ObjectSource, work: Assembly, brought: Counter[tuple[str, str]]) -> tuple[str, str]:
        """The next window, or the whole object into this node's store. Returns like `_copy_here`."""
        if source.name not in self._expected:
            self._expect_windows(source, work, first=True)
        one = self._version.object(source.name)
        try:
            window = self._ring.next()
        except StoreFullError as error:
            logger.info("there is no room for windows, all of %s is brought: %s", one, error)
            window = None
        if window is None:
            self._expect_no_windows(source.name)
            self._retrieve([source])
            if self._here(source) is None:
                return self._session.node.node_id, f"{one} was brought here and is not here"
            return "", ""
        part = range(window.blocks[0], window.blocks[-1] + 1)
        end = part.stop * BLOCK_SIZE
        bad = copy_verified(work.extents(end), BLOCK_SIZE, self._block_at(window), part, threads=self._threads)
        if bad:
            others = tuple(node_id for node_id in source.node_ids if node_id != window.node_id)
            self._ring.again(window, dataclasses.replace(source, node_ids=others))
            return window.node_id, f"{_blocks(bad)} of {one} from {window.node_id} do not match their checksums"
        brought[window.node_id, window.lane] += len(window.view)
        self._ring.done(window)
        work.advance(end)
        return "", ""

    def _block_at(self, window: Window) -> Callable[[int], Block]:
        name, size = window.source.name, window.source.size
        at = {block: place * BLOCK_SIZE for place, block in enumerate(window.blocks)}

        def block_at(index: int) -> Block:
            start = at[index]
            view = window.view[start : start + block_length(index, size)]
            return Block(index, view, self._ring.crc32c(name, index))

        return block_at

    def _retrieve(self, sources: Sequence[ObjectSource]) -> None:
        session = self._session
        retrieved = retrieve(session.agent, self._version, sources, self._epoch, session.deadline_s)
        for source, one in zip(sources, retrieved, strict=True):
            if not one.was_local:
                self.pulled.append(Pulled(source.name, source.size, one.source_node_id, one.lane, True))


def _block(held: ObjectReader, index: int) -> Block:
    start = index * held.info.block_size
    return Block(index, held.view[start : start + held.info.block_size], held.info.block_crcs[index])


def _blocks(bad: Sequence[int]) -> str:
    shown = ", ".join(str(index) for index in bad[:4])
    return f"block{'s' if len(bad) > 1 else ''} {shown}" + (f" and {len(bad) - 4} more" if len(bad) > 4 else "")

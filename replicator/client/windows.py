"""Objects of other nodes for a load, a window at a time: into a few scratch segments that are used again and again.

Memory of the store that nobody has touched yet takes far longer to fill than to read; scratch that is mapped on both
sides and was used before does not. While the load copies one window, the agent fills the others.

The agent writes into a segment only during a call for it. So a segment is used for another call only after the one
before gave its last event; when a call ended otherwise, its segment is given back instead, and the agent does not hand
it on before it has stopped writing.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from replicator.checksum import BLOCK_SIZE, block_length
from replicator.client.segments import Segments
from replicator.decide.types import ObjectSource
from replicator.errors import (
    AgentUnavailableError,
    CorruptObjectError,
    SegmentError,
    StoreFullError,
    UnsupportedError,
)
from replicator.ids import ContainerVersion
from replicator.native import combine_blocks
from replicator.store.segment import MappedSegment
from replicator.v1 import local_pb2
from replicator.wire import source_to_pb, version_to_pb

WINDOW_BYTES = 32 << 20
SLOTS = 3
"""Windows that are being filled or read at a time."""
_MAX_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Blocks of an object, not verified here: they lie one after the other in `view`, until `done`."""

    source: ObjectSource
    blocks: tuple[int, ...]
    whole: bool
    view: memoryview
    node_id: str
    lane: str
    scratch: MappedSegment


@dataclass(slots=True)
class _Wanted:
    """Blocks of one object that no window is under way for."""

    source: ObjectSource
    blocks: deque[int]
    whole: bool


@dataclass(slots=True)
class _Call:
    """A window under way. `stop` makes its thread give it up."""

    source: ObjectSource
    first_node: str
    blocks: tuple[int, ...]
    whole: bool
    stop: threading.Event = field(default_factory=threading.Event)
    result: Future[Window | None] = field(default_factory=Future)

    @property
    def size(self) -> int:
        return sum(block_length(block, self.source.size) for block in self.blocks)


class WindowRing:
    """For one load. Not thread-safe. After `close` no memory of it stays reserved.

    Args:
        epoch: of the job, whose own the container is; 0 for that of another job, which is only read here.
        reserve: scratch memory of at least so many bytes; raises as `Segments.scratch` does.
        deadline_s: without progress for this long, a source, or the agent, is given up.
    """

    def __init__(
        self,
        segments: Segments,
        version: ContainerVersion,
        epoch: int,
        reserve: Callable[[int], MappedSegment],
        deadline_s: float,
    ) -> None:
        self._segments = segments
        self._agent = segments.agent
        self._version = version
        self._epoch = epoch
        self._reserve = reserve
        self._deadline_s = deadline_s
        self._window_bytes = WINDOW_BYTES
        self._slots = SLOTS
        self._largest = 0
        self._wanted: deque[_Wanted] = deque()
        self._calls: deque[_Call] = deque()
        self._held: list[Window] = []
        self._free: list[MappedSegment] = []
        self._tables: dict[str, tuple[int, ...]] = {}
        self._begun = 0
        self._slow: set[str] = set()
        self._threads: ThreadPoolExecutor | None = None

    def expect(self, source: ObjectSource, blocks: Sequence[int], *, whole: bool, first: bool = False) -> None:
        """These blocks (numbers, ascending) will be read, after all that is expected already, or before it.

        Args:
            whole: most of the object is read.
        """
        if first:
            self._call_back()
            self._wanted.appendleft(_Wanted(source, deque(blocks), whole))
        else:
            self._wanted.append(_Wanted(source, deque(blocks), whole))
        size = sum(block_length(block, source.size) for block in blocks)
        self._largest = max(self._largest, min(size, self._window_bytes))
        self._begin_calls()

    def next(self) -> Window | None:
        """The next blocks in the order in which they were expected; as many of them as a window holds.

        None: the object is in this node's store, or on its way there, or cannot be had in windows. Retrieve all of it.

        Raises:
            StoreFullError: there is no room for the smallest window.
            AgentUnavailableError, DeadlineExceededError: the agent is gone, or hangs.
            TransferError, CorruptObjectError: no source could give the blocks; with each one's reason.
        """
        since = time.monotonic()
        attempts = 0
        while True:
            self._begin_calls()
            call = self._calls[0]
            try:
                window = call.result.result()
            except StoreFullError:
                self._call_back()
                if not self._shrink():
                    raise
            except UnsupportedError:
                self._calls.popleft()
                return None
            except (AgentUnavailableError, SegmentError):
                # A next agent has what was reserved, as long as this process lives.
                self._call_back()
                attempts += 1
                if attempts == _MAX_ATTEMPTS or time.monotonic() - since >= self._deadline_s:
                    raise
                self._agent.wait_connected(self._deadline_s)
            else:
                self._calls.popleft()
                if window is not None:
                    self._held.append(window)
                return window

    def done(self, window: Window) -> None:
        """Its memory serves the next blocks."""
        self._held.remove(window)
        self._free.append(window.scratch)
        self._begin_calls()

    def again(self, window: Window, source: ObjectSource) -> None:
        """Bring the blocks of a window once more, next of all, now from the nodes that `source` names."""
        self._held.remove(window)
        self._free.append(window.scratch)
        self._call_back()
        self._put_back(source, window.blocks, window.whole)
        for one in self._wanted:
            if one.source.name == source.name:
                one.source = source

    def drop(self, name: str) -> None:
        """No more blocks of an object are needed."""
        if any(call.source.name == name for call in self._calls):
            self._call_back()
        self._wanted = deque(one for one in self._wanted if one.source.name != name)

    def crc32c(self, name: str, block: int) -> int:
        """What a block of a window must have: the table that it is from has the object's own checksum."""
        return self._tables[name][block]

    def close(self) -> None:
        """Give up what is under way, and give all memory back. Waits until the agent has been told."""
        self._wanted.clear()
        self._call_back()
        if self._threads is not None:
            self._threads.shutdown()
        for scratch in (*self._free, *(window.scratch for window in self._held)):
            self._segments.give_back(scratch.name)
        self._free.clear()
        self._held.clear()

    # -- which windows

    def _begin_calls(self) -> None:
        while self._wanted and len(self._calls) + len(self._held) < self._slots:
            head = self._wanted[0]
            blocks = [head.blocks.popleft()]
            size = block_length(blocks[0], head.source.size)
            while head.blocks and size + block_length(head.blocks[0], head.source.size) <= self._window_bytes:
                blocks.append(head.blocks.popleft())
                size += block_length(blocks[-1], head.source.size)
            if not head.blocks:
                self._wanted.popleft()
            self._begin(_Call(head.source, self._first_node(head.source), tuple(blocks), head.whole))

    def _first_node(self, source: ObjectSource) -> str:
        """Each holder in its turn, except those that did not give what they were asked for first."""
        self._begun += 1
        good = [node_id for node_id in source.node_ids if node_id not in self._slow] or source.node_ids
        return good[self._begun % len(good)] if good else ""

    def _begin(self, call: _Call) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(SLOTS, thread_name_prefix="replicator-window")
        self._calls.append(call)
        self._threads.submit(self._run, call)

    def _call_back(self) -> None:
        """Give up the calls under way. Their blocks are wanted again, in the same order."""
        for call in self._calls:
            call.stop.set()
        while self._calls:
            call = self._calls.pop()
            if call.result.exception() is None and (window := call.result.result()) is not None:
                self._free.append(window.scratch)
            self._put_back(call.source, call.blocks, call.whole)

    def _put_back(self, source: ObjectSource, blocks: Iterable[int], whole: bool) -> None:
        if self._wanted and self._wanted[0].source.name == source.name:
            self._wanted[0].blocks.extendleft(reversed(tuple(blocks)))
        else:
            self._wanted.appendleft(_Wanted(source, deque(blocks), whole))

    def _shrink(self) -> bool:
        """Make do with fewer slots, or with smaller ones; False when they are as small as can be."""
        live = len(self._free) + len(self._held)
        if 0 < live < self._slots:
            self._slots = live
            return True
        for scratch in self._free:
            self._segments.give_back(scratch.name)
        self._free.clear()
        self._window_bytes //= 2
        self._largest = min(self._largest, self._window_bytes)
        return self._window_bytes >= BLOCK_SIZE

    # -- one call, in a thread

    def _run(self, call: _Call) -> None:
        try:
            call.result.set_result(self._bring(call))
        except BaseException as error:
            call.result.set_exception(error)

    def _bring(self, call: _Call) -> Window | None:
        if call.stop.is_set():
            raise SegmentError("this window is not wanted any more")
        scratch = self._scratch(call.size)
        clean = False
        try:
            last = self._ask(call, scratch)
            clean = True
            if last.in_store:
                self._free.append(scratch)
                return None
            if last.source_node_id != call.first_node:
                self._slow.add(call.first_node)
            self._keep_table(call.source, last)
        except BaseException:
            if clean:
                self._free.append(scratch)
            else:
                self._segments.give_back(scratch.name)
            raise
        return Window(
            call.source, call.blocks, call.whole, scratch.view[: call.size], last.source_node_id, last.lane, scratch
        )

    def _scratch(self, size: int) -> MappedSegment:
        with contextlib.suppress(IndexError):
            while True:
                scratch = self._free.pop()
                if scratch.capacity >= size:
                    return scratch
                self._segments.give_back(scratch.name)
        return self._reserve(max(size, self._largest))

    def _ask(self, call: _Call, scratch: MappedSegment) -> local_pb2.WindowEvent:
        source = call.source
        nodes = sorted(source.node_ids, key=lambda node_id: (node_id != call.first_node, node_id in self._slow))
        request = local_pb2.RetrieveWindowRequest(
            client_id=self._agent.client_id,
            epoch=self._epoch,
            container=version_to_pb(self._version),
            object=source_to_pb(replace(source, node_ids=tuple(nodes))),
            segment=scratch.name,
            block_size_bytes=BLOCK_SIZE,
            blocks=call.blocks,
            with_table=source.name not in self._tables,
            whole=call.whole,
            deadline_ms=int(self._deadline_s * 1000),
        )
        awaited = f"{call.size} bytes of {self._version.object(source.name)}"
        # It gives up a silent source by itself, and is silent for longer only when it hangs.
        idle_s = 2 * self._deadline_s + self._agent.call_deadline_s
        for event in self._agent.connection().stream("RetrieveWindow", request, local_pb2.WindowEvent, idle_s, awaited):
            if event.done or event.in_store:
                return event
            if call.stop.is_set():
                raise SegmentError("this window is not wanted any more")
        raise AgentUnavailableError(f"the agent of this node ended its answer without {awaited}")

    def _keep_table(self, source: ObjectSource, last: local_pb2.WindowEvent) -> None:
        if source.name in self._tables:
            return
        table = tuple(last.block_crc32c)
        try:
            combined = combine_blocks(table, source.size)
        except ValueError as error:
            raise CorruptObjectError(f"{self._version.object(source.name)}: {error}") from None
        if combined != source.crc32c:
            raise CorruptObjectError(
                f"{self._version.object(source.name)}: expected block checksums that combine to {source.crc32c:08x}, "
                f"as the manifest says, found {combined:08x}; look up a new plan"
            )
        self._tables[source.name] = table

"""The one data-plane verb: bring blocks of a sealed object into memory here, every block verified.

Sources are asked one after the other. What one of them brought and what matched its checksum stays; the next one is
asked for the blocks that are still missing, so a transfer goes on at the block where it stopped. A block that did
not match is never asked from the same source again (F01). A source that refuses connections is asked again as long as
the policy has patience.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from replicator.checksum import block_count, block_length
from replicator.errors import (
    CorruptObjectError,
    DeadlineExceededError,
    PeerUnavailableError,
    ReplicatorError,
    TransferError,
    TransferStalledError,
)
from replicator.faultpoints import reach
from replicator.transfer.lane import Lane, Source
from replicator.transfer.turns import Patience, PullPolicy, ask_in_turn

if TYPE_CHECKING:
    from replicator.store.trailer import ObjectInfo

OnProgress = Callable[[int], None]
"""Called with the bytes that are here, of those that the pull is to bring. Never less than before."""
OnBadBlock = Callable[[str, int], None]
"""Called with the node id and the number of a block that does not match its checksum there, when it is found."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullSource:
    """A node that may hold the object.

    Attributes:
        open: makes it ready to serve (for the bulk lane: gets a ticket). Called again when a ticket has expired.
            Raises a ReplicatorError when the node cannot be reached, or does not hold the object.
    """

    node_id: str
    open: Callable[[], Awaitable[Source]]


@dataclass(frozen=True, slots=True)
class PulledPart:
    """What one source brought over one lane."""

    node_id: str
    lane: str
    blocks: int
    size: int


@dataclass(frozen=True, slots=True)
class PullReport:
    """How a pull went. All asked blocks are in the target, verified.

    Attributes:
        size: bytes brought.
        parts: what came from where, in the order in which the sources were asked.
        bad_blocks: (node id, block) of blocks that did not match their checksum there.
        failures: (node id, reason) of sources that did not bring all that they were asked for.
        seconds: for all of it.
    """

    size: int
    parts: tuple[PulledPart, ...]
    bad_blocks: tuple[tuple[str, int], ...]
    failures: tuple[tuple[str, str], ...]
    seconds: float

    @property
    def main_part(self) -> PulledPart | None:
        """The part with the most bytes; None when there was nothing to bring."""
        return max(self.parts, key=lambda part: part.size, default=None)


async def pull(
    info: ObjectInfo,
    sources: Sequence[PullSource],
    target: memoryview,
    *,
    lanes: Mapping[str, Lane],
    policy: PullPolicy | Patience,
    blocks: Sequence[int] | None = None,
    on_progress: OnProgress | None = None,
    on_bad_block: OnBadBlock | None = None,
) -> PullReport:
    """Bring an object, or some blocks of it, into `target`.

    Cancelled, it stops promptly; nothing writes to `target` once it has ended, by whatever means.

    Args:
        info: what the bytes must be.
        sources: best first.
        target: exactly as long as what is to be brought. Blocks lie in it one after the other.
        lanes: by name.
        policy: with what was learned of the sources meanwhile, when other pulls belong to this one.
        blocks: numbers of the blocks to bring, ascending; None: all.
        on_progress, on_bad_block: called in the event loop; they must not raise.

    Raises:
        ValueError: `target`, `blocks` or `info` contradict each other.
        TransferError: no source brought what was missing; lists each source's reason.
        TransferStalledError: the same, when every one of them was silent.
        CorruptObjectError: the same, when what stopped the last one was a checksum.
    """
    patience = Patience(policy) if isinstance(policy, PullPolicy) else policy
    return await _Pull(info, target, lanes, patience, blocks, on_progress, on_bad_block).run(sources)


class _Pull:
    """The state of one pull: which blocks are missing, and where each one goes."""

    def __init__(
        self,
        info: ObjectInfo,
        target: memoryview,
        lanes: Mapping[str, Lane],
        patience: Patience,
        blocks: Sequence[int] | None,
        on_progress: OnProgress | None,
        on_bad_block: OnBadBlock | None,
    ) -> None:
        count = block_count(info.size, info.block_size)
        if len(info.block_crcs) != count:
            raise ValueError(f"expected {count} block checksums for {info.object}, found {len(info.block_crcs)}")
        wanted = range(count) if blocks is None else blocks
        if any(b <= a for a, b in pairwise(wanted)) or (wanted and wanted[0] < 0):
            raise ValueError("expected block numbers in ascending order, each once")
        if wanted and wanted[-1] >= count:
            raise ValueError(f"{info.object} has {count} blocks, found number {wanted[-1]}")
        self._info = info
        self._target = target
        self._lanes = lanes
        self._patience = patience
        self._policy = patience.policy
        self._on_progress = on_progress
        self._on_bad_block = on_bad_block
        self._position = {block: place * info.block_size for place, block in enumerate(wanted)}
        self._missing = set(wanted)
        self._size = sum(self._length(block) for block in wanted)
        if target.nbytes != self._size or target.format not in ("B", "b", "c") or target.readonly:
            raise ValueError(f"expected a writable target of {self._size} bytes, found {target!r} of {target.nbytes}")
        self._verified = 0
        self._told = 0
        self._parts: list[PulledPart] = []
        self._bad: list[tuple[str, int]] = []
        self._bad_at: dict[str, set[int]] = {}

    def _length(self, block: int) -> int:
        return block_length(block, self._info.size, self._info.block_size)

    async def run(self, sources: Sequence[PullSource]) -> PullReport:
        loop = asyncio.get_running_loop()
        begin = loop.time()
        asked = await ask_in_turn(sources if self._missing else (), self._pull_from, self._patience, "blocks")
        if self._missing:
            raise self._failure(len(sources), asked.failures)
        return PullReport(
            size=self._size,
            parts=tuple(self._parts),
            bad_blocks=tuple(self._bad),
            failures=tuple((node_id, str(error)) for node_id, error in asked.failures),
            seconds=loop.time() - begin,
        )

    def _failure(self, asked: int, failures: Sequence[tuple[str, ReplicatorError]]) -> ReplicatorError:
        kind: type[ReplicatorError] = TransferError
        errors = [error for _, error in failures]
        if errors and isinstance(errors[-1], CorruptObjectError):
            kind = CorruptObjectError
        elif errors and all(isinstance(error, TransferStalledError | DeadlineExceededError) for error in errors):
            kind = TransferStalledError
        reasons = "; ".join(f"{node_id}: {error}" for node_id, error in failures) or "there is none"
        missing = f"{len(self._missing)} of {len(self._position)} blocks are missing"
        return kind(f"{self._info.object} could not be pulled from any of {asked} sources, {missing}: {reasons}")

    async def _pull_from(self, source: PullSource) -> None:
        """Bring what is missing from one source. Raises when something still is."""
        try:
            await self._pull_all_from(source)
        except ReplicatorError as error:
            log.info("pull of %s from node %s failed: %s", self._info.object, source.node_id, error)
            if self._missing:
                raise

    async def _pull_all_from(self, source: PullSource) -> None:
        bad_here = self._bad_at.setdefault(source.node_id, set())
        avoided: set[str] = set()
        for attempt in range(1, self._policy.attempts + 1):
            try:
                opened = await self._open(source)
                lane = self._choose_lane(opened, avoided)
                try:
                    await self._fetch(lane, opened, bad_here)
                    break
                except PeerUnavailableError:
                    if self._policy.lane != "auto" or lane.name != "bulk" or "grpc" not in self._lanes:
                        raise
                    # Where only the gRPC port is open, the bulk lane is offered and cannot be reached.
                    avoided.add(lane.name)
                    await self._fetch(self._lanes["grpc"], opened, bad_here)
                    break
            except TransferError as error:
                # One that was silent for a whole deadline has had its chance.
                if attempt == self._policy.attempts or isinstance(error, TransferStalledError):
                    raise
                await self._policy.pause()
        if bad_here:
            shown = ", ".join(str(block) for block in sorted(bad_here)[:8])
            more = f" and {len(bad_here) - 8} more" if len(bad_here) > 8 else ""
            raise CorruptObjectError(f"its blocks {shown}{more} do not match their checksums")
        if self._missing:
            raise TransferError(
                f"the {lane.name} lane ended without {len(self._missing)} of the blocks it was to bring"
            )

    async def _open(self, source: PullSource) -> Source:
        timeout_s = self._policy.progress_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await source.open()
        except TimeoutError as error:
            if isinstance(error, ReplicatorError):
                raise
            raise DeadlineExceededError.of("an open object", f"node {source.node_id}", timeout_s) from None

    def _choose_lane(self, source: Source, avoided: set[str]) -> Lane:
        wanted = self._policy.lane
        if wanted == "auto":
            wanted = "bulk" if source.bulk_address and "bulk" in self._lanes and "bulk" not in avoided else "grpc"
        if wanted not in self._lanes:
            raise PeerUnavailableError(f"this node has no {wanted} lane; it has {', '.join(self._lanes) or 'none'}")
        if wanted == "bulk" and not source.bulk_address:
            raise PeerUnavailableError("it offers no bulk lane, and lane = bulk was asked for; use auto or grpc")
        return self._lanes[wanted]

    async def _fetch(self, lane: Lane, source: Source, bad_here: set[int]) -> None:
        """Ask for all that is missing and not known to be bad there, one contiguous run after the other."""
        verified: list[int] = []
        try:
            for first, last in _runs(self._missing - bad_here):
                await self._fetch_run(lane, source, first, last, bad_here, verified)
        finally:
            if verified:
                size = sum(self._length(block) for block in verified)
                self._parts.append(PulledPart(source.node_id, lane.name, len(verified), size))

    async def _fetch_run(
        self, lane: Lane, source: Source, first: int, last: int, bad_here: set[int], verified: list[int]
    ) -> None:
        info = self._info
        begin = self._position[first]
        end = self._position[last] + self._length(last)
        arrived = 0

        def on_blocks(block: int, crcs: Sequence[int]) -> None:
            for number, crc in enumerate(crcs, block):
                if crc == info.block_crcs[number]:
                    self._missing.discard(number)
                    self._verified += self._length(number)
                    verified.append(number)
                    reach("pull.block")
                else:
                    bad_here.add(number)
                    self._bad.append((source.node_id, number))
                    log.warning("block %d of %s does not match its checksum on %s", number, info.object, source.node_id)
                    if self._on_bad_block is not None:
                        self._on_bad_block(source.node_id, number)

        def on_bytes(count: int) -> None:
            nonlocal arrived
            arrived += count
            self._tell(base + arrived)

        base = self._verified
        await lane.fetch(
            source,
            info.object,
            first * info.block_size,
            end - begin,
            self._target[begin:end],
            block_size=info.block_size,
            progress_timeout_s=self._policy.progress_timeout_s,
            on_bytes=on_bytes,
            on_blocks=on_blocks,
        )

    def _tell(self, done: int) -> None:
        self._told = max(self._told, done)
        if self._on_progress is not None:
            self._on_progress(self._told)


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    """(first, last) of the contiguous runs among block numbers, ascending."""
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if runs and runs[-1][1] == block - 1:
            runs[-1] = (runs[-1][0], block)
        else:
            runs.append((block, block))
    return runs

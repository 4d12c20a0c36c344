"""Brings small objects, many in one call and many in one write: what a round trip each would cost is not paid.

An object that is not as it should be (not there, or other bytes) is brought the ordinary way, which finds out why;
the others are not kept from it. A node that does not answer is given up for all of them at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from replicator.agent.counters import Counters
from replicator.agent.landing import Landing
from replicator.agent.logs import fields
from replicator.agent.peers import PeerDirectory
from replicator.agent.sources import Opener
from replicator.agent.takings import Taken, Taking
from replicator.agent.threads import run_to_end
from replicator.config import AgentConfig
from replicator.errors import (
    DeadlineExceededError,
    ReplicatorError,
    TransferError,
    TransferStalledError,
    UnsupportedError,
)
from replicator.ids import ContainerVersion, NodeAddress, ObjectVersion
from replicator.native import crc32c
from replicator.packs import calls_of, is_small
from replicator.store import Store
from replicator.store.ingest import Item
from replicator.store.trailer import ObjectInfo
from replicator.transfer.packed import Payloads, read_packed
from replicator.transfer.turns import Patience
from replicator.v1 import data_pb2
from replicator.wire import sender_to_pb, version_to_pb

LANE = "grpc"
_WHAT = "packs"

Reasons = Sequence[tuple[str, ReplicatorError]]
"""Why nodes (by id) did not give an object."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Wanted:
    """A small object to be brought, who may have it and is still to be asked, best first, and why others failed.

    `suspect` is the node, if any, whose copy was not what it should be.
    """

    taking: Taking
    info: ObjectInfo
    node_ids: Sequence[str]
    reasons: dict[str, ReplicatorError] = field(default_factory=dict)
    suspect: str = ""

    @property
    def is_open(self) -> bool:
        return not self.taking.task.done()

    def failed(self, error: ReplicatorError) -> None:
        """The first of its nodes did not give it."""
        node_id, *self.node_ids = self.node_ids
        self.reasons.pop(node_id, None)
        self.reasons[node_id] = error


@dataclass(frozen=True, slots=True)
class Errand:
    """How some objects of one container are brought.

    Attributes:
        resolve: where a node is, by its id. Raises PeerUnavailableError.
        slots: how many calls of this kind may be under way.
        require_wanted: called, in any thread, before objects are asked for and again before they get their names;
            what it raises prevents that.
        ordinary: brings one object by itself.
        failure: the error for an object that no node gave.
    """

    version: ContainerVersion
    patience: Patience
    resolve: Callable[[str], NodeAddress]
    slots: asyncio.Semaphore
    require_wanted: Callable[[], None]
    ordinary: Callable[[Wanted], Coroutine[Any, Any, Taken]]
    failure: Callable[[ObjectVersion, Reasons], ReplicatorError]


class Packer:
    """Used in the event loop only. What is on its way takes a few messages of 1 MiB for each call."""

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        peers: PeerDirectory,
        opener: Opener,
        landing: Landing,
        counters: Counters,
    ) -> None:
        # Who wants the bulk lane, and it alone, gets it for every byte.
        self._enabled = config.lane != "bulk"
        self._store = store
        self._peers = peers
        self._opener = opener
        self._landing = landing
        self._counters = counters
        self._tasks: set[asyncio.Task[None]] = set()
        # One thread at a time: more of them would only wait for each other in the interpreter.
        self._writing = asyncio.Lock()

    def takes(self, size: int, block_size: int) -> bool:
        """Whether an object is one for `bring`: small, and of one block at most, which its own checksum verifies."""
        return self._enabled and is_small(size) and size <= block_size

    def bring(self, errand: Errand, wanted: Sequence[Wanted]) -> None:
        """Start to bring objects; the future of each one's taking tells when it is here, or why not."""
        if wanted:
            self._spawn(self._bring(errand, wanted), wanted)

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], wanted: Sequence[Wanted]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            error = None if done.cancelled() else done.exception()
            # One of ours, for instance of a disk without room for a single file, is told with each object.
            if error is not None and not isinstance(error, ReplicatorError):
                log.error("small objects could not be brought", exc_info=error)
            for one in wanted:
                if one.is_open:
                    if error is None:
                        one.taking.task.cancel()
                    else:
                        one.taking.task.set_exception(_typed(error, one.info.object))

        task.add_done_callback(ended)

    async def _bring(self, errand: Errand, wanted: Sequence[Wanted]) -> None:
        self._landing.hold()
        left = list(wanted)
        odd: list[Wanted] = []
        while left:
            odd += await self._ask_in_turn(errand, left)
            strange = set(odd)
            left = [one for one in left if one.is_open and one not in strange and self._is_asked_again(errand, one)]
            if left:
                await errand.patience.policy.pause()
        async with asyncio.TaskGroup() as group:
            for one in odd:
                group.create_task(self._bring_alone(errand, one))

    async def _ask_in_turn(self, errand: Errand, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Ask each one's nodes; all of them at a time, so that one call brings much. Returns like `_bring_from`."""
        left = list(wanted)
        odd: list[Wanted] = []
        while True:
            by_node: dict[str, list[Wanted]] = {}
            for one in left:
                if one.node_ids:
                    by_node.setdefault(one.node_ids[0], []).append(one)
            if not by_node:
                return odd
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._bring_from(errand, node_id, part)) for node_id, part in by_node.items()
                ]
            for task in tasks:
                odd += task.result()
            strange = set(odd)
            left = [one for part in by_node.values() for one in part if one.is_open and one not in strange]

    def _is_asked_again(self, errand: Errand, one: Wanted) -> bool:
        """Whether it is wanted again from those of its nodes that refused; told as failed when it is not."""
        one.node_ids = [
            node_id for node_id, error in one.reasons.items() if errand.patience.lasts(node_id, _WHAT, error)
        ]
        if not one.node_ids:
            one.taking.task.set_exception(errand.failure(one.info.object, tuple(one.reasons.items())))
        return bool(one.node_ids)

    async def _bring_alone(self, errand: Errand, one: Wanted) -> None:
        working = asyncio.ensure_future(errand.ordinary(one))
        one.taking.task.add_done_callback(lambda done: working.cancel())
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError:
            # It may have a thread that fills memory: it has ended before this has.
            working.cancel()
            await asyncio.wait([working])
            raise
        if one.suspect:
            # Not before: a copy that is gone meanwhile would be the reason that is told, instead of its bad bytes.
            self._opener.have_checked(one.info.object, one.suspect)
        if one.is_open and not working.cancelled():
            error = working.exception()
            if error is None:
                one.taking.task.set_result(working.result())
            else:
                one.taking.task.set_exception(error)

    async def _bring_from(self, errand: Errand, node_id: str, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Those that must be brought the ordinary way. Those that are open afterwards have a reason more."""
        odd: list[Wanted] = []
        patience = errand.patience
        for part in calls_of([one.info.size for one in wanted]):
            async with errand.slots:
                try:
                    patience.require_heard(node_id)
                    odd += await self._call(errand, node_id, wanted[part])
                    patience.answered(node_id, _WHAT)
                except ReplicatorError as error:
                    patience.failed(node_id, _WHAT, error)
                    strange = set(odd)
                    for one in wanted:
                        if one.is_open and one not in strange:
                            one.failed(error)
                    log.info(
                        "small objects were not brought",
                        extra=fields(errand.version, source=node_id, objects=len(wanted), reason=error),
                    )
                    break
        return odd

    async def _call(self, errand: Errand, node_id: str, wanted: Sequence[Wanted]) -> list[Wanted]:
        """Bring objects with one call, repeated for what is missing when it broke. Raises when some still are."""
        for one in wanted:
            one.taking.waiting = False
        try:
            errand.require_wanted()
        except ReplicatorError as error:
            for one in wanted:
                if one.is_open:
                    one.taking.task.set_exception(error)
        odd: list[Wanted] = []
        policy = errand.patience.policy
        attempt = 0
        while True:
            attempt += 1
            strange = set(odd)
            missing = [one for one in wanted if one.is_open and one not in strange]
            if not missing:
                return odd
            try:
                await self._read(errand, node_id, missing, odd)
            except UnsupportedError:
                # An older version, which knows the ordinary way only.
                return odd + missing
            except TransferError as error:
                if attempt == policy.attempts or isinstance(error, TransferStalledError):
                    raise
                await policy.pause()

    async def _read(self, errand: Errand, node_id: str, wanted: Sequence[Wanted], odd: list[Wanted]) -> None:
        """One call. What turns out not to be as it should be is added to `odd`."""
        version = errand.version
        request = data_pb2.ReadPackedRequest(
            sender=sender_to_pb(self._peers.sender_of(version.container.job)),
            container=version_to_pb(version),
            names=[one.info.object.name for one in wanted],
        )
        node = errand.resolve(node_id)
        deadline_s = errand.patience.policy.progress_timeout_s
        whom = f"node {node_id} ({LANE}, {node.grpc_address})"
        try:
            async with asyncio.timeout(deadline_s):
                channel = await self._peers.channel(node)
        except TimeoutError as error:
            if isinstance(error, ReplicatorError):
                raise
            raise DeadlineExceededError.of("a connection", whom, deadline_s) from None
        at = 0
        async for payloads in read_packed(channel, request, whom, deadline_s):
            part = wanted[at : at + len(payloads)]
            at += len(part)
            if not any(one.is_open for one in part):
                continue
            async with self._writing:
                fit, bad, errors = await run_to_end(lambda p=part, b=payloads: self._ingest(errand, p, b))  # type: ignore[misc]
            self._settle(version, node_id, fit, errors)
            for one, is_corrupt in bad:
                odd.append(one)
                one.suspect = node_id
                if is_corrupt:
                    self._opener.note_bad(one.info.object, node_id)

    def _ingest(
        self, errand: Errand, wanted: Sequence[Wanted], payloads: Payloads
    ) -> tuple[list[Wanted], list[tuple[Wanted, bool]], list[ReplicatorError | None]]:
        """In a thread: verify and seal. (Those that were right, those that were not and whether corrupt, errors)."""
        fit: list[Wanted] = []
        bad: list[tuple[Wanted, bool]] = []
        items: list[Item] = []
        for one, payload in zip(wanted, payloads, strict=True):
            info = one.info
            if payload is None or len(payload) != info.size:
                bad.append((one, payload is not None))
            elif crc32c(payload) != info.crc32c:
                bad.append((one, True))
            else:
                fit.append(one)
                items.append(Item(info, payload))
        return fit, bad, self._store.ingest(items, errand.require_wanted)

    def _settle(
        self,
        version: ContainerVersion,
        node_id: str,
        wanted: Sequence[Wanted],
        errors: Sequence[ReplicatorError | None],
    ) -> None:
        count = size = 0
        for one, error in zip(wanted, errors, strict=True):
            future, info = one.taking.task, one.info
            if error is None:
                count += 1
                size += info.size
                one.taking.bytes_done = info.size
            if future.done():
                continue
            if error is None:
                future.set_result(Taken(info, LANE, node_id) if info.size else Taken(info))
            else:
                future.set_exception(error)
        self._counters.add("objects_pulled", count)
        self._counters.add("bytes_pulled", size)
        log.info("small objects pulled", extra=fields(version, objects=count, bytes=size, source=node_id, lane=LANE))


def _typed(error: BaseException, one: ObjectVersion) -> ReplicatorError:
    """The first error of a group, and one that tells of it when it is none of ours."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, ReplicatorError):
        return error
    return TransferError(f"{one} could not be brought: {error or type(error).__name__}; the agent's log tells where")

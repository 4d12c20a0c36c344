"""The owner's side of replication: offers to buddies, retries with back-off, and who acknowledged what.

Nothing is remembered over a restart. Whoever wants to know whether a buddy has an object offers it again, and a buddy
that has it says so at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from replicator.agent import batches
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.offers import OfferQueue, Pending, Report
from replicator.agent.peers import PeerDirectory
from replicator.config import AgentConfig
from replicator.errors import (
    CorruptObjectError,
    InvalidIdError,
    NodeDrainingError,
    ObjectNotFoundError,
    PeerUnavailableError,
    ReplicationError,
    ReplicatorError,
    TransferError,
    from_wire,
)
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, NodeAddress, NodeIdentity, ObjectVersion
from replicator.store import Store
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2, peer_pb2
from replicator.wire import (
    Sender,
    info_from_pb,
    info_to_pb,
    node_address_to_pb,
    object_from_pb,
    sender_to_pb,
    version_from_pb,
)

MAX_PENDING = 1 << 17
MAX_STREAMS_PER_BUDDY = 4
MAX_REMEMBERED_VERSIONS = 64

# Job, buddy, and whether it is work in the background.
_Key = tuple[str, str, bool]

log = logging.getLogger(__name__)


class Replicator:
    """Used in the event loop only."""

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        store: Store,
        jobs: Jobs,
        peers: PeerDirectory,
        counters: Counters,
    ) -> None:
        self._config = config
        self._address = address
        self._store = store
        self._jobs = jobs
        self._peers = peers
        self._counters = counters
        self._queues: dict[_Key, OfferQueue] = {}
        self._streams: dict[_Key, set[asyncio.Task[None]]] = {}
        self._timers: dict[_Key, asyncio.TimerHandle] = {}
        self._acks: OrderedDict[ContainerVersion, dict[tuple[str, str], NodeIdentity]] = OrderedDict()
        self._checks: set[asyncio.Task[None]] = set()
        self._closed = False
        # Verifies this node's copy of an object, and sets it aside when it is bad.
        self.check_local: Callable[[ObjectVersion], Awaitable[bool]] | None = None
        # Called with the version whenever a buddy acknowledged an object of it that it had not acknowledged before.
        self.on_acknowledged: Callable[[ContainerVersion], None] = lambda version: None
        # Called with the version when acknowledgements of it turned out to be those of a process that is gone.
        self.on_lost: Callable[[ContainerVersion], None] = lambda version: None
        peers.on_replaced.append(self._forget)

    def replicate(
        self, objects: Sequence[ObjectVersion], epoch: int, deadline_s: float, report: Report
    ) -> tuple[str, ...]:
        """Start copying sealed objects of this node (all of one job) to its buddies; returns their ids at once.

        `report` is called in the loop, later, with an outcome per object and buddy. An object that a buddy holds
        already is acknowledged by one round trip. One that is not sealed here, for instance because its container was
        dropped meanwhile, fails by itself: it is not the fault of those that were asked for with it.

        Args:
            deadline_s: without progress for this long, a buddy is given up with ReplicationError.

        Raises:
            StaleEpochError: a newer incarnation of the job is known.
            ObjectNotFoundError: none of the objects is sealed here.
            InvalidIdError: objects of several jobs.
            ReplicationError: too many objects are on their way already.
        """
        jobs = {one.version.container.job for one in objects}
        if len(jobs) != 1:
            if not jobs:
                return ()
            raise InvalidIdError(
                f"expected objects of one job, found {', '.join(sorted(jobs))}; ask for each by itself"
            )
        job = jobs.pop()
        self._jobs.check(job, epoch)
        infos, missing = self._present(objects)
        chosen = self._jobs.buddies(job)
        self._enter([(job, buddy, False) for buddy in chosen], infos, epoch, deadline_s, report)
        loop = asyncio.get_running_loop()
        for one, error in missing.items():
            for buddy in chosen:
                loop.call_soon(self._report, report, batches.refused(buddy, one, error))
        return chosen

    async def copy_to(
        self, node_id: str, objects: Sequence[ObjectVersion], epoch: int, deadline_s: float
    ) -> dict[ObjectVersion, ReplicatorError]:
        """Copy objects that this node holds (all of one job), whoever owns them, to any node, in the background.

        Returns the objects that were not copied, with the reason, once all have an outcome.

        Raises:
            ReplicatorError: like `replicate`.
        """
        job = objects[0].version.container.job
        self._jobs.check(job, epoch)
        infos, failed = self._present(objects)
        open_ = {info.object for info in infos}
        done = asyncio.Event()

        def report(event: local_pb2.ReplicationEvent | local_pb2.ReplicatedObjects) -> None:
            if isinstance(event, local_pb2.ReplicationEvent):
                one = object_from_pb(event.object)
                open_.discard(one)
                if not event.ok:
                    failed[one] = from_wire(event.error_kind, event.error_message)
            else:
                version = version_from_pb(event.container)
                open_.difference_update(version.object(name) for name in event.names)
            if not open_:
                done.set()

        self._enter([(job, node_id, True)], infos, epoch, deadline_s, report)
        await done.wait()
        return failed

    def is_background(self, one: ObjectVersion, node_id: str) -> bool:
        """Whether the object is on its way to that node by `copy_to`."""
        queue = self._queues.get((one.version.container.job, node_id, True))
        return queue is not None and one in queue

    def _enter(
        self, keys: Sequence[_Key], infos: Sequence[ObjectInfo], epoch: int, deadline_s: float, report: Report
    ) -> None:
        waiting = sum(len(queue) for queue in self._queues.values())
        if waiting + len(infos) * len(keys) > MAX_PENDING:
            raise ReplicationError(
                f"{waiting} copies are on their way already, at most {MAX_PENDING} may be; wait for their outcomes"
            )
        now = self._now()
        for key in keys:
            queue = self._queues.setdefault(key, OfferQueue(key[1], background=key[2]))
            for info in infos:
                queue.add(info, epoch, deadline_s, report, now)
            self._schedule(key, 0.0)

    def ensure(self, objects: Sequence[ObjectVersion], epoch: int) -> None:
        """Offer again what is neither acknowledged nor on its way; the outcome shows in `acknowledged`."""
        names: dict[ContainerVersion, list[str]] = {}
        for one in objects:
            if not self._is_on_its_way(one) and self._store.get(one) is not None:
                names.setdefault(one.version, []).append(one.name)
        due = [one for version, some in names.items() for one in self.unacknowledged(version, some)]
        try:
            self.replicate(due, epoch, self._config.deadline_s, lambda event: None)
        except ReplicatorError as error:
            log.warning("objects cannot be offered to the buddies", extra={"objects": len(due), "reason": error})

    def unacknowledged(self, version: ContainerVersion, names: Iterable[str]) -> list[ObjectVersion]:
        """Objects of which not every buddy of this node, as it is there now, said that it verified and sealed them.

        All, while this node is no member of the job, as after it lost what it knew of it: its buddies are unknown then.
        """
        job = version.container.job
        if not self._jobs.is_member(job):
            return [version.object(name) for name in names]
        acks = self._acks.get(version, {})
        buddies = self._jobs.buddies(job)
        return [version.object(name) for name in names if any((name, buddy) not in acks for buddy in buddies)]

    def may_be_whole(self, version: ContainerVersion, objects: int) -> bool:
        """Whether there are acknowledgements enough for so many objects: if not, nobody need look at each of them."""
        return len(self._acks.get(version, {})) >= objects * len(self._jobs.buddies(version.container.job))

    def lacking(self, version: ContainerVersion, names: Iterable[str]) -> tuple[str, ...]:
        """The buddies of this node that did not acknowledge all of these objects."""
        acks = self._acks.get(version, {})
        buddies = self._jobs.buddies(version.container.job)
        wanted = list(names)
        return tuple(buddy for buddy in buddies if any((name, buddy) not in acks for name in wanted))

    def acknowledged(self, one: ObjectVersion) -> bool:
        """Whether every buddy has the object. See `unacknowledged`."""
        return not self.unacknowledged(one.version, (one.name,))

    def give_up(self, version: ContainerVersion, error: ReplicatorError) -> None:
        """No more copies of this container are made; who waits for some is told `error`."""
        now = self._now()
        for key, queue in self._queues.items():
            if key[0] == version.container.job:
                for item in queue.of(version):
                    queue.done(item)
                    self._tell_failed(queue.buddy, item, error, now)
                self._schedule(key, 0.0)
        self.forget(version)

    def forget(self, version: ContainerVersion) -> None:
        """Nobody needs to know any more who acknowledged objects of this container."""
        self._acks.pop(version, None)

    @property
    def on_their_way(self) -> int:
        """Copies that were asked for and have no outcome yet."""
        return sum(len(queue) for queue in self._queues.values())

    async def close(self) -> None:
        """Give up everything without telling anybody: trainers ask the next agent again."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        tasks = [task for tasks in self._streams.values() for task in tasks] + list(self._checks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one buddy

    def _schedule(self, key: _Key, delay_s: float) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()
        if not self._closed:
            self._timers[key] = asyncio.get_running_loop().call_later(delay_s, self._dispatch, key)

    def _dispatch(self, key: _Key) -> None:
        """Start offers as far as objects are due and streams are free."""
        self._timers.pop(key, None)
        queue = self._queues[key]
        streams = self._streams.setdefault(key, set())
        now = self._now()
        for item in queue.overdue(now):
            self._finish(queue, item, PeerUnavailableError(f"buddy {queue.buddy} answers nothing"), now)
        while len(streams) < MAX_STREAMS_PER_BUDDY:
            batch = queue.take(now)
            if not batch:
                break
            task = asyncio.get_running_loop().create_task(self._offer(queue, batch))
            streams.add(task)
            task.add_done_callback(lambda done: self._ended(key, done))
        due = queue.next_due(now)
        if due is not None and len(streams) < MAX_STREAMS_PER_BUDDY:
            self._schedule(key, due)
        elif not len(queue) and not streams:
            del self._queues[key], self._streams[key]

    def _ended(self, key: _Key, task: asyncio.Task[None]) -> None:
        self._streams[key].discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("an offer ended with an error of this program", exc_info=task.exception())
        self._schedule(key, 0.0)

    async def _offer(self, queue: OfferQueue, batch: list[Pending]) -> None:
        """One offer: every object of it is done, or to be tried again, when this returns."""
        open_items = {item.object: item for item in batch}
        error: ReplicatorError
        try:
            await self._exchange(queue, open_items)
            error = TransferError("the buddy ended the exchange without an outcome for it")
        except ReplicatorError as caught:
            error = caught
        except Exception as caught:
            log.exception("an offer failed", extra={"buddy": queue.buddy})
            error = ReplicationError(f"{type(caught).__name__}: {caught}")
        for item in list(open_items.values()):
            self._failed(queue, item, error)

    async def _exchange(self, queue: OfferQueue, open_items: dict[ObjectVersion, Pending]) -> None:
        first = next(iter(open_items.values()))
        job = first.object.version.container.job
        self._jobs.check(job, first.epoch)
        for item in list(open_items.values()):
            try:
                self._require(item.object)
            except ObjectNotFoundError as error:
                del open_items[item.object]
                self._failed(queue, item, error)
        if not open_items:
            return
        offered = list(open_items.values())
        node = self._peers.resolve(job, queue.buddy)
        request = peer_pb2.OfferRequest(
            sender=sender_to_pb(Sender(self._address.identity, job, first.epoch)),
            objects=[info_to_pb(item.info) for item in offered],
            source=node_address_to_pb(self._address),
            deadline_ms=int(first.deadline_s * 1000),
            batched=True,
            background=queue.background,
        )
        # Whose answers these are: one may be read when its process is no more.
        buddy: NodeIdentity | None = None

        def greeted(identity: NodeIdentity) -> None:
            nonlocal buddy
            buddy = identity

        awaited = f"copies of {len(open_items)} objects, {first.object} first"
        self._counters.add("offers_sent")
        reach("replicate.offering")
        async for event in self._peers.stream(
            node,
            "PeerService/Offer",
            request,
            peer_pb2.OfferEvent,
            awaited=awaited,
            idle_s=first.deadline_s,
            on_greeted=greeted,
        ):
            queue.heard_at = self._now()
            kind = event.WhichOneof("event")
            if kind == "sealed_many":
                self._many_sealed(queue, offered, open_items, event, buddy)
                continue
            one = object_from_pb(event.object)
            if one not in open_items:
                continue
            item = open_items[one]
            if kind == "progress_bytes":
                if event.progress_bytes:
                    queue.progressed(item, self._now())
                continue
            del open_items[one]
            if kind == "sealed":
                self._sealed(queue, item, event, buddy)
            else:
                self._failed(queue, item, from_wire(event.failed.error_kind, event.failed.error_message))

    def _many_sealed(
        self,
        queue: OfferQueue,
        offered: Sequence[Pending],
        open_items: dict[ObjectVersion, Pending],
        event: peer_pb2.OfferEvent,
        buddy: NodeIdentity | None,
    ) -> None:
        many = event.sealed_many
        made = []
        for place, size, crc in zip(many.index, many.size_bytes, many.crc32c, strict=False):
            item = open_items.pop(offered[place].object, None) if place < len(offered) else None
            if item is None:
                continue
            if (size, crc) == (item.info.size, item.info.crc32c):
                made.append(item)
            else:
                self._failed(queue, item, _other_content(queue.buddy, item, size, crc))
        self._made(queue, made, event.lane, buddy)

    def _sealed(self, queue: OfferQueue, item: Pending, event: peer_pb2.OfferEvent, buddy: NodeIdentity | None) -> None:
        try:
            verified = info_from_pb(event.sealed)
            if (verified.object, verified.size, verified.crc32c) != (item.object, item.info.size, item.info.crc32c):
                raise _other_content(queue.buddy, item, verified.size, verified.crc32c)
        except ReplicatorError as error:
            self._failed(queue, item, error)
        else:
            self._made(queue, [item], event.lane, buddy)

    def _made(self, queue: OfferQueue, items: Sequence[Pending], lane: str, buddy: NodeIdentity | None) -> None:
        """The buddy has verified copies of these; what one that was replaced meanwhile had does not count."""
        now = self._now()
        identity = buddy if buddy == self._peers.identity(queue.buddy) else None
        size = 0
        versions: dict[ContainerVersion, None] = {}
        for item in items:
            queue.progressed(item, now)
            queue.done(item)
            size += item.info.size
            if identity is not None:
                acks = self._acks.setdefault(item.object.version, {})
                if acks.get((item.object.name, queue.buddy)) != identity:
                    acks[item.object.name, queue.buddy] = identity
                    versions[item.object.version] = None
        while len(self._acks) > MAX_REMEMBERED_VERSIONS:
            self._acks.popitem(last=False)
        if items:
            reach("replicate.acknowledged")
        self._counters.add("replicas_made", len(items))
        self._counters.add("replica_bytes", size if lane else 0)
        for report, event in batches.made(queue.buddy, items, lane, now):
            self._report(report, event)
        for version in versions:
            self.on_acknowledged(version)

    def _failed(self, queue: OfferQueue, item: Pending, error: ReplicatorError) -> None:
        now = self._now()
        if item.object not in queue:
            return  # it was given up meanwhile
        self._counters.add("replica_attempts_failed")
        if isinstance(error, CorruptObjectError):
            self._suspect(item.object)
        if isinstance(error, NodeDrainingError):
            self._peers.note_draining(queue.buddy)
        if queue.failed(item, error, now):
            log.info(
                "a replica is tried again",
                extra=fields(item.object, buddy=queue.buddy, attempts=item.attempts, reason=error),
            )
        else:
            self._finish(queue, item, error, now)

    def _suspect(self, one: ObjectVersion) -> None:
        """A buddy got bytes that do not match: look at this node's own copy, which may be what is bad."""
        check_local = self.check_local
        if check_local is None or self._store.get(one) is None:
            return

        async def check() -> None:
            with contextlib.suppress(ObjectNotFoundError):
                await check_local(one)

        task = asyncio.get_running_loop().create_task(check())
        self._checks.add(task)
        task.add_done_callback(self._checks.discard)

    def _finish(self, queue: OfferQueue, item: Pending, error: ReplicatorError, now: float) -> None:
        verdict = queue.verdict(item, error, now)
        queue.done(item)
        self._counters.add("replicas_failed")
        log.warning("a replica was not made", extra=fields(item.object, buddy=queue.buddy, reason=verdict))
        self._tell_failed(queue.buddy, item, verdict, now)

    def _tell_failed(self, buddy: str, item: Pending, error: ReplicatorError, now: float) -> None:
        event = batches.failed(buddy, item, error, now)
        for outcome in item.outcomes:
            self._report(outcome, event)

    def _report(self, report: Report, event: local_pb2.ReplicationEvent | local_pb2.ReplicatedObjects) -> None:
        try:
            report(event)
        except Exception:
            log.exception("the outcome of a replica could not be told")

    # -- state

    def _require(self, one: ObjectVersion) -> ObjectInfo:
        info = self._store.get(one)
        if info is None:
            raise ObjectNotFoundError(f"{one} is not sealed on this node, so it cannot be copied; seal it first")
        return info

    def _present(
        self, objects: Sequence[ObjectVersion]
    ) -> tuple[list[ObjectInfo], dict[ObjectVersion, ReplicatorError]]:
        """What is sealed here, and the error of each object that is not. Raises the first one when none is."""
        infos: list[ObjectInfo] = []
        missing: dict[ObjectVersion, ReplicatorError] = {}
        for one in objects:
            try:
                infos.append(self._require(one))
            except ObjectNotFoundError as error:
                missing[one] = error
        if missing and not infos:
            raise next(iter(missing.values()))
        return infos, missing

    def _is_on_its_way(self, one: ObjectVersion) -> bool:
        job = one.version.container.job
        return any(
            one in queue for (of_job, _, background), queue in self._queues.items() if of_job == job and not background
        )

    def _forget(self, before: NodeAddress, now: NodeAddress) -> None:
        """What a former incarnation acknowledged says nothing about the one that is there now."""
        touched = []
        for version, acks in self._acks.items():
            gone = [key for key, identity in acks.items() if key[1] == now.node_id and identity != now.identity]
            for key in gone:
                del acks[key]
            if gone:
                touched.append(version)
        for version in touched:
            self.on_lost(version)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _other_content(buddy: str, item: Pending, size: int, crc: int) -> CorruptObjectError:
    return CorruptObjectError(
        f"buddy {buddy} sealed {item.object} with {size} bytes, checksum {crc:08x}; expected {item.info.size} bytes, "
        f"{item.info.crc32c:08x}"
    )

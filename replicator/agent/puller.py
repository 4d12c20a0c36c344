"""Brings objects of other nodes into this node's store: verified block by block, from whichever source works.

Replication and recovery are the same pull. What differs is who asked for it: a buddy's owner (`take`), or a trainer
of this node (`retrieve`, `window`; `retrieve_later`). Each kind has its own slots, so that none starves another (F20).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from replicator.agent.counters import Counters
from replicator.agent.landing import Landing
from replicator.agent.logs import fields
from replicator.agent.packed import Errand, Packer, Reasons, Wanted
from replicator.agent.ranges import Ranges
from replicator.agent.refill import Quiet, Refill
from replicator.agent.retention import Retention
from replicator.agent.retrieve_small import SmallRetrieval
from replicator.agent.sources import Opener, PeerSource
from replicator.agent.takings import Taken, Taking, Takings
from replicator.agent.windows import Windows, WindowWanted
from replicator.checksum import BLOCK_SIZE
from replicator.config import AgentConfig
from replicator.decide.types import ObjectSource
from replicator.errors import (
    CorruptObjectError,
    DeadlineExceededError,
    NodeDrainingError,
    ObjectExistsError,
    ReplicationError,
    ReplicatorError,
    TransferError,
    TransferStalledError,
)
from replicator.ids import ContainerVersion, NodeAddress, ObjectVersion
from replicator.store import Store
from replicator.store.trailer import ObjectInfo
from replicator.transfer.turns import Patience, PullPolicy
from replicator.v1 import local_pb2

MAX_PULLS = 4
# Of copies that replace lost ones, beside those: a node that comes back empty is filled no faster (F20).
MAX_BACKGROUND_PULLS = 2
MAX_QUEUED_EVENTS = 1024
RESTART_S = 3.0
"""So long an agent may take that is started again, while what it holds is wanted here."""
_PROGRESS_S = 0.25

log = logging.getLogger(__name__)


class Puller:
    """Used in the event loop only. Concurrent pulls are bounded, and one object is pulled once at a time."""

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        client_id: str,
        store: Store,
        opener: Opener,
        landing: Landing,
        packer: Packer,
        retention: Retention,
        counters: Counters,
    ) -> None:
        self._config = config
        self._address = address
        self._client_id = client_id
        self._store = store
        self._opener = opener
        self._landing = landing
        self._retention = retention
        self._counters = counters
        self._ranges = Ranges(address, store, opener, landing)
        self._takings = Takings(address.node_id, counters)
        self._packer = packer
        self._offered_slots = asyncio.Semaphore(MAX_PULLS)
        self._background_slots = asyncio.Semaphore(MAX_BACKGROUND_PULLS)
        self._wanted_slots = asyncio.Semaphore(MAX_PULLS)
        self._quiet = Quiet()
        self._refill = Refill(store, self._takings, retention, counters, self._quiet, self._land_wanted)
        self._windows = Windows(store, opener, landing, self._takings, self._wanted_slots, self._quiet)
        self._small = SmallRetrieval(
            client_id, store, opener, landing, self._takings, packer, self._wanted_slots, self._pull_wanted
        )

        self.draining = False
        """Whether this node takes no copies."""

    @property
    def running(self) -> int:
        """Objects that are on their way here, or wait for a slot."""
        return len(self._takings)

    # -- for owners who made this node their buddy

    def take(
        self, infos: Sequence[ObjectInfo], source: NodeAddress, deadline_s: float, *, background: bool = False
    ) -> list[Taking | ReplicatorError]:
        """Start pulling offered objects; that goes on also when nobody waits for them any more.

        One that is here already, with the same content, is done at once. Small ones are brought many at a time.

        Args:
            deadline_s: without progress for this long, the source is given up.
            background: they wait for a slot of their own kind, so that what was just written is not held up by them.

        Returns:
            For each object, how it is on its way, or why it is not:
            NodeDrainingError: this node is being drained.
            ReplicationError: this node does not take it, or has too much waiting already.
            ObjectExistsError: other content is sealed here under that name, or on its way.
        """
        slots = self._background_slots if background else self._offered_slots
        # An owner that is started again offers again.
        policy = self._policy(deadline_s, 0.0)
        packed: list[Wanted] = []
        taken: list[Taking | ReplicatorError] = []
        for offered in infos:
            info = offered
            if info.client_id != self._client_id:
                info = dataclasses.replace(info, client_id=self._client_id)
            try:
                taken.append(self._take(info, source, policy, slots, packed))
            except ReplicatorError as error:
                taken.append(error)
        self._pull_packed(packed, source, policy, slots)
        return taken

    def _take(
        self,
        info: ObjectInfo,
        source: NodeAddress,
        policy: PullPolicy,
        slots: asyncio.Semaphore,
        packed: list[Wanted],
    ) -> Taking:
        one = info.object
        held = self._store.get(one)
        if held is not None:
            if (held.size, held.crc32c) != (info.size, info.crc32c):
                raise ObjectExistsError(
                    f"{one} is sealed on buddy {self._address.node_id} with {held.size} bytes, checksum "
                    f"{held.crc32c:08x}; offered were {info.size} bytes, {info.crc32c:08x}. Begin a new attempt"
                )
            return self._takings.held(held)
        if self.draining:
            self._counters.add("offers_refused")
            raise NodeDrainingError(
                f"node {self._address.node_id} is being drained and takes no copies; {one} is to go to another node"
            )
        self._require_wanted(one.version)
        taking = self._takings.join(one, info.size, info.crc32c)
        if taking is None and self._packer.takes(info.size, info.block_size):
            taking = self._takings.expect(one, info.size, info.crc32c)
            packed.append(Wanted(taking, info, (source.node_id,)))
        elif taking is None:
            taking = self._takings.start(
                one, info.size, info.crc32c, lambda taking: self._pull_offered(taking, info, source, policy, slots)
            )
        taking.users += 1
        return taking

    def _pull_packed(
        self, wanted: Sequence[Wanted], source: NodeAddress, policy: PullPolicy, slots: asyncio.Semaphore
    ) -> None:
        by_version: dict[ContainerVersion, list[Wanted]] = {}
        for one in wanted:
            by_version.setdefault(one.info.object.version, []).append(one)
        for version, part in by_version.items():

            def require_wanted(version: ContainerVersion = version) -> None:
                self._require_wanted(version)

            errand = Errand(
                version=version,
                patience=Patience(policy),
                resolve=lambda node_id: source,
                slots=slots,
                require_wanted=require_wanted,
                ordinary=lambda one: self._pull_offered(one.taking, one.info, source, policy, slots),
                failure=_not_pulled,
            )
            self._packer.bring(errand, part)

    async def _pull_offered(
        self, taking: Taking, info: ObjectInfo, source: NodeAddress, policy: PullPolicy, slots: asyncio.Semaphore
    ) -> Taken:
        async with slots:
            taking.waiting = False
            self._require_wanted(info.object.version)
            sources = [self._opener.source_at(info.object, source)]
            return await self._land(
                taking, info, sources, Patience(policy), lambda: self._require_wanted(info.object.version)
            )

    def _require_wanted(self, version: ContainerVersion) -> None:
        reason = self._retention.refusal(version)
        if reason:
            self._counters.add("offers_refused")
            raise ReplicationError(
                f"buddy {self._address.node_id} does not take objects of {version} any more: {reason}"
            )

    # -- for trainers of this node

    async def retrieve(
        self, version: ContainerVersion, sources: Sequence[ObjectSource], deadline_s: float, *, observer: bool = False
    ) -> AsyncIterator[local_pb2.RetrieveEvent]:
        """Bring whole objects into this node's store. At least one event per object; failures are events too.

        What is here already is verified, and pulled again when it is not what the source says. Something comes at
        least every quarter of `deadline_s`, also while a source is silent. Without sources the container is only kept.

        Args:
            deadline_s: without progress for this long, a source is given up.
            observer: who wants it takes no part in its job.
        """
        self._retention.note_retrieved(version, observer=observer)
        events: asyncio.Queue[local_pb2.RetrieveEvent] = asyncio.Queue(MAX_QUEUED_EVENTS)
        active: dict[str, Taking] = {}
        patience = Patience(self._policy(deadline_s))
        loop = asyncio.get_running_loop()
        small = [one for one in sources if self._packer.takes(one.size, BLOCK_SIZE)]
        rest = [one for one in sources if not self._packer.takes(one.size, BLOCK_SIZE)]

        async def alone(one: ObjectSource) -> None:
            await self._bring(version.object(one.name), one, patience, active, events)

        tasks = [loop.create_task(alone(one)) for one in rest]
        broken: list[Exception] = []

        async def packs() -> None:
            try:
                await self._small.bring(version, small, patience, active, events, alone)
            except Exception as error:
                # Some are not told of, which nobody must wait for.
                broken.append(error)
                await events.put(local_pb2.RetrieveEvent())

        if small:
            tasks.append(loop.create_task(packs()))
        ticker = loop.create_task(_tell_progress(active, events, deadline_s / 4))
        left = len(sources)
        try:
            with self._quiet.disturbed():
                while left:
                    event = await events.get()
                    if broken:
                        raise broken[0]
                    yield event
                    left -= len(event.done_many.names) or bool(event.done or event.error_kind)
        finally:
            ticker.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(ticker, *tasks, return_exceptions=True)

    async def _bring(
        self,
        one: ObjectVersion,
        source: ObjectSource,
        patience: Patience,
        active: dict[str, Taking],
        events: asyncio.Queue[local_pb2.RetrieveEvent],
    ) -> None:
        """One object; ends with exactly one last event, unless it is cancelled."""
        event = local_pb2.RetrieveEvent(name=source.name)
        try:
            if await self._landing.is_sound(one, source.size, source.crc32c):
                event.was_local = True
            else:
                taken = await self._fetch(one, source, patience, active)
                event.source_node_id, event.lane = taken.node_id, taken.lane
            event.done, event.bytes_done = True, source.size
        except Exception as error:
            if not isinstance(error, ReplicatorError):
                log.exception("an object could not be retrieved", extra=fields(one))
                error = TransferError(f"{type(error).__name__}: {error}")
            event.error_kind, event.error_message = error.kind, str(error)
        finally:
            active.pop(source.name, None)
        await events.put(event)

    async def _fetch(
        self,
        one: ObjectVersion,
        source: ObjectSource,
        patience: Patience,
        active: dict[str, Taking],
        require_wanted: Callable[[], None] = lambda: None,
    ) -> Taken:
        taking = self._takings.join(one, source.size, source.crc32c)
        if taking is not None:
            active[source.name] = taking
            try:
                return await self._takings.wait(taking)
            except ReplicatorError as error:
                # It was somebody else's pull, perhaps from a source that is not the best one.
                log.info("a pull that was joined failed, another one is begun", extra=fields(one, reason=error))
        taking = self._takings.join(one, source.size, source.crc32c) or self._takings.start(
            one,
            source.size,
            source.crc32c,
            lambda taking: self._pull_wanted(taking, source, patience, require_wanted),
        )
        active[source.name] = taking
        return await self._takings.wait(taking)

    async def _pull_wanted(
        self,
        taking: Taking,
        source: ObjectSource,
        patience: Patience,
        require_wanted: Callable[[], None] = lambda: None,
    ) -> Taken:
        async with self._wanted_slots:
            taking.waiting = False
            return await self._land_wanted(taking, source, patience, require_wanted)

    async def bring_again(self, source: ObjectSource, one: ObjectVersion, deadline_s: float) -> Taken:
        """Pull an object of which the copy here was bad. Not when its container was dropped meanwhile.

        Raises:
            ReplicationError: this node does not want it any more.
            StoreFullError, TransferError, CorruptObjectError: with each source's reason.
        """

        def require_wanted() -> None:
            if self._retention.was_dropped(one.version):
                raise ReplicationError(f"{one} is not wanted here any more: its container was dropped")

        return await self._fetch(one, source, Patience(self._policy(deadline_s)), {}, require_wanted)

    async def _land_wanted(
        self,
        taking: Taking,
        source: ObjectSource,
        patience: Patience,
        require_wanted: Callable[[], None],
        pace: Callable[[], Awaitable[None]] | None = None,
    ) -> Taken:
        one = taking.object
        sources = self._opener.sources(one, source.node_ids)
        try:
            info = await self._opener.describe_any(sources, one, source.size, source.crc32c, patience)
            info = dataclasses.replace(info, owner_node_id=source.owner_node_id)

            def before_seal() -> None:
                require_wanted()
                self._landing.give_way(info)

            return await self._land(taking, info, sources, patience, before_seal, pace)
        except (CorruptObjectError, TransferError):
            await self._opener.checked(one)
            raise

    def window(self, wanted: WindowWanted, deadline_s: float) -> AsyncIterator[local_pb2.WindowEvent]:
        """Bring some blocks of an object into a segment of a trainer: see `Windows.bring`.

        Args:
            deadline_s: without progress for this long, a source is given up.
        """
        return self._windows.bring(wanted, Patience(self._policy(deadline_s)))

    def retrieve_later(
        self, version: ContainerVersion, sources: Sequence[ObjectSource], deadline_s: float, *, observer: bool = False
    ) -> None:
        """Bring whole objects into this node's store when no trainer waits for bytes: see `Refill.expect`."""
        self._retention.note_retrieved(version, observer=observer)
        self._refill.expect(version, sources, self._policy(deadline_s))

    def read_object(self, version: ContainerVersion, source: ObjectSource, deadline_s: float) -> AsyncIterator[bytes]:
        """The object's bytes in pieces of at most 1 MiB, each verified: local, or forwarded from a holder.

        Raises:
            ObjectNotFoundError, TransferError, CorruptObjectError: with each source's reason.
        """
        return self._ranges.read(version.object(source.name), source, Patience(self._policy(deadline_s)))

    async def check_local(self, one: ObjectVersion) -> bool:
        """Verify every block of this node's copy. A copy that fails goes to quarantine, and the answer is False.

        Raises:
            ObjectNotFoundError: there is no copy here.
        """
        return await self._landing.check(one)

    async def close(self) -> None:
        """Give up all pulls, and close the lanes."""
        await self._packer.close()
        await self._takings.close()
        await self._opener.close()
        await self._landing.close()

    # -- both

    def _policy(self, deadline_s: float, restart_s: float = RESTART_S) -> PullPolicy:
        return PullPolicy(deadline_s, self._config.lane, patience_s=min(restart_s, deadline_s))

    async def _land(
        self,
        taking: Taking,
        info: ObjectInfo,
        sources: Sequence[PeerSource],
        patience: Patience,
        before_seal: Callable[[], None],
        pace: Callable[[], Awaitable[None]] | None = None,
    ) -> Taken:
        def progressed(done: int) -> None:
            taking.bytes_done = done

        sealed, report = await self._landing.land(info, sources, patience, progressed, before_seal, pace)
        main = report.main_part
        taken = Taken(sealed, main.lane if main else "", main.node_id if main else "")
        self._counters.add("objects_pulled")
        self._counters.add("bytes_pulled", info.size)
        log.info(
            "object pulled",
            extra=fields(
                info.object, bytes=info.size, source=taken.node_id, lane=taken.lane, seconds=round(report.seconds, 3)
            ),
        )
        return taken


async def _tell_progress(
    active: dict[str, Taking], events: asyncio.Queue[local_pb2.RetrieveEvent], quiet_s: float
) -> None:
    """How far each object is, when it got further; and something in any case after `quiet_s`."""
    told: dict[str, int] = {}
    loop = asyncio.get_running_loop()
    spoke = loop.time()
    while True:
        await asyncio.sleep(min(_PROGRESS_S, quiet_s))
        quiet = loop.time() - spoke >= quiet_s
        for name, taking in list(active.items()):
            if (quiet or taking.bytes_done != told.get(name, 0)) and not events.full():
                told[name] = taking.bytes_done
                events.put_nowait(local_pb2.RetrieveEvent(name=name, bytes_done=taking.bytes_done))
                spoke, quiet = loop.time(), False
        for name in told.keys() - active.keys():
            del told[name]


def _not_pulled(one: ObjectVersion, reasons: Reasons) -> ReplicatorError:
    """The error of an offered object, like that of `pull`."""
    stalled = all(isinstance(error, TransferStalledError | DeadlineExceededError) for _, error in reasons)
    listed = "; ".join(f"{node_id}: {error}" for node_id, error in reasons)
    kind = TransferStalledError if stalled else TransferError
    return kind(f"{one} could not be pulled from any of {len(reasons)} sources: {listed}")

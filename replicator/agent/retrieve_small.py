"""Small objects that a trainer wants here: what is here is verified many at a time, and the rest brought in packs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from replicator.agent.landing import Landing
from replicator.agent.packed import Errand, Packer, Wanted
from replicator.agent.sources import Opener, failure_of
from replicator.agent.takings import Outcomes, Taken, Taking, Takings, outcome_of
from replicator.checksum import BLOCK_SIZE
from replicator.decide.types import ObjectSource
from replicator.errors import CorruptObjectError, ObjectNotFoundError, ReplicatorError, to_wire
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.native import crc32c
from replicator.packs import MAX_PIECE_OBJECTS
from replicator.store import Store
from replicator.store.reader import open_object
from replicator.store.trailer import ObjectInfo
from replicator.transfer.turns import Patience
from replicator.v1 import local_pb2

Events = asyncio.Queue[local_pb2.RetrieveEvent]


class SmallRetrieval:
    """Used in the event loop only."""

    def __init__(
        self,
        client_id: str,
        store: Store,
        opener: Opener,
        landing: Landing,
        takings: Takings,
        packer: Packer,
        slots: asyncio.Semaphore,
        pull: Callable[[Taking, ObjectSource, Patience], Coroutine[Any, Any, Taken]],
    ) -> None:
        self._client_id = client_id
        self._store = store
        self._opener = opener
        self._landing = landing
        self._takings = takings
        self._packer = packer
        self._slots = slots
        self._pull = pull

    async def bring(
        self,
        version: ContainerVersion,
        sources: Sequence[ObjectSource],
        patience: Patience,
        active: dict[str, Taking],
        events: Events,
        alone: Callable[[ObjectSource], Awaitable[None]],
    ) -> None:
        """Bring small objects; each is told of exactly once as done or failed, many in one event.

        Args:
            active: gets what is on its way, by name, while it is.
            alone: brings one object by itself, and tells of it.
        """
        missing, others = await self._check_local(version, sources, events)
        own: list[tuple[ObjectSource, Wanted]] = []
        failed: list[tuple[ObjectSource, ReplicatorError]] = []
        for source in missing:
            try:
                wanted = self._announce(version.object(source.name), source)
            except ReplicatorError as error:
                failed.append((source, error))
                continue
            if wanted is None:
                others.append(source)
            else:
                own.append((source, wanted))
        self._packer.bring(self._errand(version, own, patience), [wanted for _, wanted in own])
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell_outcomes(own, active, events))
            for source in others:
                group.create_task(_run(alone(source)))
            for source, reason in failed:
                await events.put(_failure(source, reason))

    def _announce(self, one: ObjectVersion, source: ObjectSource) -> Wanted | None:
        """None for an object that somebody else brings already, or has brought since it was looked for."""
        if self._takings.join(one, source.size, source.crc32c) is not None:
            return None
        held = self._store.get(one)
        if held is not None and (held.size, held.crc32c) == (source.size, source.crc32c):
            return None
        # An object of one block has its checksum, so nobody need describe it.
        crcs = (source.crc32c,) if source.size else ()
        info = ObjectInfo(one, source.size, source.crc32c, BLOCK_SIZE, crcs, source.owner_node_id, self._client_id)
        node_ids = [peer.node_id for peer in self._opener.sources(one, source.node_ids)]
        return Wanted(self._takings.expect(one, source.size, source.crc32c), info, node_ids)

    def _errand(
        self, version: ContainerVersion, own: Sequence[tuple[ObjectSource, Wanted]], patience: Patience
    ) -> Errand:
        job = version.container.job
        sources = {wanted: source for source, wanted in own}
        return Errand(
            version=version,
            patience=patience,
            resolve=lambda node_id: self._opener.peers.resolve(job, node_id),
            slots=self._slots,
            require_wanted=lambda: None,
            ordinary=lambda one: self._pull(one.taking, sources[one], patience),
            failure=lambda one, reasons: (
                failure_of(one, reasons)
                if reasons
                else ObjectNotFoundError(f"no other node is known to hold {one}; ask for a new plan with a lookup")
            ),
        )

    async def _tell_outcomes(
        self,
        own: Sequence[tuple[ObjectSource, Wanted]],
        active: dict[str, Taking],
        events: Events,
    ) -> None:
        outcomes: Outcomes[ObjectSource] = Outcomes()
        for source, wanted in own:
            wanted.taking.users += 1
            active[source.name] = wanted.taking
            outcomes.add(source, wanted.taking)
        try:
            while outcomes.open:
                done: dict[tuple[str, str], list[str]] = {}
                for source, taking in await outcomes.next():
                    del active[source.name]
                    try:
                        taken = outcome_of(taking)
                        done.setdefault((taken.node_id, taken.lane), []).append(source.name)
                    except Exception as error:
                        await events.put(_failure(source, error))
                for (node_id, lane), names in done.items():
                    await events.put(_done(names, False, node_id, lane))
        finally:
            for source, wanted in own:
                active.pop(source.name, None)
                wanted.taking.leave()

    # -- what is here

    async def _check_local(
        self, version: ContainerVersion, sources: Sequence[ObjectSource], events: Events
    ) -> tuple[list[ObjectSource], list[ObjectSource]]:
        """Tell of those that are here; (those that are not, or did not verify; those here with other content)."""
        missing: list[ObjectSource] = []
        others: list[ObjectSource] = []
        for start in range(0, len(sources), MAX_PIECE_OBJECTS):
            part = sources[start : start + MAX_PIECE_OBJECTS]
            held = [source for source in part if self._store.get(version.object(source.name)) is not None]
            here = set(held)
            missing += [source for source in part if source not in here]
            if not held:
                continue
            sound, bad, other = await self._landing.check_many(lambda h=held: self._verify(version, h))  # type: ignore[misc]
            others += other
            for source, error in bad:
                missing.append(source)
                if error is not None:
                    await self._landing.set_aside(version.object(source.name), error)
            if sound:
                await events.put(_done([source.name for source in sound], True, "", ""))
        return missing, others

    def _verify(
        self, version: ContainerVersion, sources: Sequence[ObjectSource]
    ) -> tuple[list[ObjectSource], list[tuple[ObjectSource, CorruptObjectError | None]], list[ObjectSource]]:
        """In a thread: (those that are right, those that are bad and why or gone, those of other content)."""
        sound: list[ObjectSource] = []
        bad: list[tuple[ObjectSource, CorruptObjectError | None]] = []
        other: list[ObjectSource] = []
        for source in sources:
            one = version.object(source.name)
            try:
                with open_object(self._store.paths, one) as reader:
                    info = reader.info
                    crc = crc32c(os.pread(reader.fd, info.size, 0))
            except ObjectNotFoundError:
                bad.append((source, None))
            except CorruptObjectError as error:
                bad.append((source, error))
            else:
                if crc != info.crc32c:
                    bad.append((source, CorruptObjectError(f"expected checksum {info.crc32c:08x}, found {crc:08x}")))
                elif (info.size, crc) != (source.size, source.crc32c):
                    other.append(source)
                else:
                    sound.append(source)
        return sound, bad, other


async def _run(work: Awaitable[None]) -> None:
    await work


def _done(names: Sequence[str], was_local: bool, node_id: str, lane: str) -> local_pb2.RetrieveEvent:
    done = local_pb2.RetrievedObjects(names=names, was_local=was_local, source_node_id=node_id, lane=lane)
    return local_pb2.RetrieveEvent(done_many=done)


def _failure(source: ObjectSource, error: BaseException) -> local_pb2.RetrieveEvent:
    kind, message = to_wire(error)
    return local_pb2.RetrieveEvent(name=source.name, error_kind=kind, error_message=message)

"""The workload: a job as a launcher runs it. All ranks start, save steps, and when one fails all start anew."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from replicator.decide.types import Manifest, ManifestEntry
from replicator.errors import DeadlineExceededError, ReplicatorError, StaleEpochError
from replicator.ids import ContainerVersion, NodeAddress
from replicator.store.trailer import ObjectInfo
from replicator.v1 import local_pb2, types_pb2
from replicator.wire import node_address_to_pb, version_from_pb, version_to_pb

from .history import Opened, Restored
from .node import SimNode
from .rank import SimRank

if TYPE_CHECKING:
    from .world import World

SIZES = (0, 1, 100, 1000, 4096, 4097, 9000, 20_000)
BLOCK_SIZES = (4096, 8192, 4 << 20)
_PLANS = 12


class Incarnation:
    """One start of a job, from its ranks' meeting to the end of all of them.

    Attributes:
        over: done when a rank failed, with why, or when all are finished, with None.
    """

    def __init__(self, job: SimJob, nodes: Sequence[SimNode], steps: int) -> None:
        self.job = job
        self.world = job.world
        self.steps = steps
        self.ranks = [SimRank(job.world, node, job.name, rank) for rank, node in enumerate(nodes)]
        self.over: asyncio.Future[str | None] = job.world.loop.create_future()
        self.failed_saves: list[ContainerVersion] = []
        self._meetings: dict[str, tuple[dict[int, Any], asyncio.Event]] = {}
        self._finished = 0

    async def run(self) -> str | None:
        """Until it is over; why it failed."""
        for rank in self.ranks:
            rank.process.on_killed.append(lambda rank=rank: self.end(f"rank {rank.rank} was killed"))  # type: ignore[misc]
        for rank in self.ranks:
            try:
                rank.process.call(rank.begin)
                rank.process.spawn(self._guard(rank))
            except ReplicatorError as error:
                self.end(f"rank {rank.rank} cannot start: {error.kind}")
        outcome = await self.over
        for rank in self.ranks:
            is_left = rank.rank == 0 and rank.process.alive and rank.epoch > 0 and outcome is not None
            if is_left and self.world.rng.random() < self.job.lingers:
                rank.process.spawn(self._linger(rank))
            else:
                rank.leave()
        return outcome

    def end(self, reason: str | None) -> None:
        if not self.over.done():
            self.over.set_result(reason)

    async def _guard(self, rank: SimRank) -> None:
        try:
            await self._main(rank)
        except ReplicatorError as error:
            self.world.trace("rank fails", rank=rank.rank, error=f"{error.kind}: {error}")
            self.end(f"rank {rank.rank}: {error.kind}")
            return
        self._finished += 1
        if self._finished == len(self.ranks):
            self.end(None)

    async def meet(self, rank: SimRank, what: str, value: Any = None) -> list[Any]:
        """What every rank brings to a common point, in the order of ranks. Raises when one does not come."""
        values, complete = self._meetings.setdefault(what, ({}, asyncio.Event()))
        values[rank.rank] = value
        if len(values) == len(self.ranks):
            complete.set()
        limit = 8 * self.job.deadline_s
        try:
            async with asyncio.timeout(limit):
                await complete.wait()
        except TimeoutError:
            raise DeadlineExceededError.of(what, "the other ranks", limit) from None
        # Each rank hears of it at its own time.
        await asyncio.sleep(0.001 * self.world.rng.random())
        return [values[number] for number in range(len(self.ranks))]

    # -- a rank's life

    async def _main(self, rank: SimRank) -> None:
        await self._open(rank)
        version = await self._restore(rank)
        step = 0 if version is None else version.container.step + 1
        for number in range(self.steps):
            await self._save(rank, step + number)
            await asyncio.sleep(self.job.pause_s * self.world.rng.random())
        await self.meet(rank, "the end")

    async def _open(self, rank: SimRank) -> None:
        agent = rank.node.agent
        members: list[NodeAddress] = await self.meet(rank, "who is here", agent.address if agent is not None else None)
        addresses = [node_address_to_pb(member) for member in members]
        epoch = 0
        if rank.rank == 0:
            begin, calm = self.world.loop.time(), self.world.calm_mark()
            known = max(node.known_epoch(self.job.name) for node in self.world.nodes)
            request = local_pb2.OpenJobRequest(job=self.job.name, members=addresses)
            reply = await rank.call_patiently("OpenJob", request, local_pb2.OpenJobReply, 2 * self.job.deadline_s)
            epoch = reply.epoch
            self.job.history.add(
                Opened(begin, self.world.loop.time(), epoch, known, calm is not None and calm == self.world.calm_mark())
            )
            names = [one.node_id for one in members]
            self.world.oracle.opened(self.job.name, names)
            self.world.trace("opened", job=self.job.name, epoch=epoch, members=names)
        rank.epoch = (await self.meet(rank, "the epoch", epoch))[0]
        join = local_pb2.JoinJobRequest(
            job=self.job.name, epoch=rank.epoch, members=addresses, replicas=self.job.replicas
        )
        await rank.call_patiently("JoinJob", join, local_pb2.JoinJobReply)
        await self.meet(rank, "joined")

    async def _restore(self, rank: SimRank) -> ContainerVersion | None:
        """All ranks load what rank 0's agent plans; another plan is asked for when that cannot be had."""
        for attempt in range(_PLANS):
            begin, calm = self.world.loop.time(), self.world.calm_mark()
            newest = self.world.oracle.newest_recoverable(self.job.name)
            plan = None
            if rank.rank == 0 or self.job.all_look_up:
                plan = await self._lookup(rank, calm, newest)
            plans: list[types_pb2.Plan | None] = await self.meet(rank, f"plan {attempt}", plan)
            chosen = plans[0]
            assert chosen is not None
            if calm is not None and calm == self.world.calm_mark():
                self._compare(plans)
            version = version_from_pb(chosen.container) if chosen.found else None
            error: ReplicatorError | None = None
            loaded: dict[str, bytes] = {}
            if version is not None:
                try:
                    loaded = await rank.retrieve(version, chosen.sources[rank.rank :: len(self.ranks)])
                except ReplicatorError as caught:
                    error = caught
                    self.world.trace("not retrieved", rank=rank.rank, version=version, error=str(caught))
            wrong = () if version is None else self.world.oracle.check_bytes(version, loaded)
            met = await self.meet(rank, f"restored {attempt}", (error, version, wrong))
            if any(failed is not None for failed, _, _ in met):
                continue
            if rank.rank == 0:
                is_calm = calm is not None and calm == self.world.calm_mark()
                self._restored(begin, rank.epoch, is_calm, version, met)
            return version
        raise ReplicatorError(f"no plan of {_PLANS} could be carried out")

    async def _lookup(self, rank: SimRank, calm: int | None, newest: ContainerVersion | None) -> types_pb2.Plan:
        begin, limit = self.world.loop.time(), self.job.deadline_s / 3
        plan = await rank.lookup(limit)
        for rejected in plan.rejected:
            self.world.trace("rejected", version=version_from_pb(rejected.container), reason=rejected.reason)
        is_calm = calm is not None and calm == self.world.calm_mark()
        self.world.oracle.checked["a lookup answers within its deadline"] += 1
        if is_calm and self.world.loop.time() - begin > limit + 0.5:
            self.world.broken(f"a lookup with a deadline of {limit} s took {self.world.loop.time() - begin:.3f} s")
        self.world.oracle.check_plan(rank.node, self.job.name, plan, is_calm, newest)
        return plan

    def _compare(self, plans: list[types_pb2.Plan | None]) -> None:
        self.world.oracle.checked["all agents plan the same"] += 1
        found = {
            (plan.found, plan.container.SerializeToString(deterministic=True)) for plan in plans if plan is not None
        }
        if len(found) > 1:
            self.world.broken(f"agents plan different checkpoints: {sorted(str(version) for version in found)}")

    def _restored(self, begin: float, epoch: int, calm: bool, version: ContainerVersion | None, met: list[Any]) -> None:
        wrong = tuple(name for _, _, names in met for name in names)
        restored = Restored(
            begin, self.world.loop.time(), epoch, version, calm, tuple(loaded for _, loaded, _ in met), wrong
        )
        self.job.history.add(restored)
        self.world.trace("restored", job=self.job.name, version=version, calm=calm)
        if version is not None:
            self.world.oracle.restores += 1

    # -- a rank that nobody stopped

    async def _linger(self, rank: SimRank) -> None:
        """An old incarnation that does not know that it is one: it goes on saving, until it is refused."""
        self.world.faults["old incarnation goes on"] += 1
        rng = self.world.rng
        for number in range(rng.randrange(1, 6)):
            await asyncio.sleep(rng.choice((0.01, 0.5, 3.0)) * rng.random())
            is_stale = rank.node.known_epoch(self.job.name) > rank.epoch
            self.world.oracle.checked["an old incarnation is refused"] += 1
            try:
                await self._save_alone(rank, 1000 + number)
            except ReplicatorError as error:
                self.world.trace("old incarnation is refused", rank=rank.rank, epoch=rank.epoch, error=error.kind)
                if isinstance(error, StaleEpochError):
                    break
                continue
            if is_stale:
                self.world.broken(
                    f"epoch {rank.epoch} of {self.job.name} saved a step on {rank.node}, which knew a newer"
                )
        rank.leave()

    async def _save_alone(self, rank: SimRank, step: int) -> None:
        begin = local_pb2.BeginRequest(job=self.job.name, step=step, epoch=rank.epoch)
        version = version_from_pb((await rank.call("Begin", begin, local_pb2.BeginReply)).container)
        self.world.oracle.begun(version, dict.fromkeys(one.node.name for one in self.ranks), self.job.replicas)
        infos = await self._write(rank, version)
        await rank.replicate([info.object for info in infos])
        await self._commit(rank, version, infos)

    # -- a save

    async def _save(self, rank: SimRank, step: int) -> None:
        version = None
        if rank.rank == 0:
            begin = local_pb2.BeginRequest(
                job=self.job.name,
                step=step,
                epoch=rank.epoch,
                abandons=[version_to_pb(failed) for failed in self.failed_saves],
            )
            reply = await rank.call_patiently("Begin", begin, local_pb2.BeginReply)
            self.failed_saves.clear()
            version = version_from_pb(reply.container)
            members = [one.node.name for one in self.ranks]
            self.world.oracle.begun(version, dict.fromkeys(members), self.job.replicas)
        begun: ContainerVersion = (await self.meet(rank, f"begun {step}", version))[0]
        infos: list[ObjectInfo] = []
        error: ReplicatorError | None = None
        try:
            infos = await self._write(rank, begun)
        except StaleEpochError:
            raise
        except ReplicatorError as caught:
            error = caught
            self.world.trace("save fails", rank=rank.rank, version=begun, error=str(caught))
        if infos:
            await rank.replicate([info.object for info in infos])
        written = await self.meet(rank, f"written {step}", (infos, error))
        if rank.rank != 0:
            return
        if any(failed is not None for _, failed in written):
            self.failed_saves.append(begun)
            return
        await self._commit(rank, begun, [info for part, _ in written for info in part])

    async def _write(self, rank: SimRank, version: ContainerVersion) -> list[ObjectInfo]:
        rng = self.world.rng
        infos = []
        for number in range(rng.choice(self.job.objects)):
            if rng.random() < self.job.write_fails:
                self.world.faults["write fails"] += 1
                raise ReplicatorError("a tensor could not be serialised")
            one = version.object(f"shard-{rank.rank}-{number}")
            data = content(self.world.seed, str(one), rng.choice(SIZES))
            infos.append(await rank.write(one, data, rng.choice(BLOCK_SIZES)))
            await asyncio.sleep(0.01 * rng.random())
        return infos

    async def _commit(self, rank: SimRank, version: ContainerVersion, infos: list[ObjectInfo]) -> None:
        entries = sorted(
            (ManifestEntry(info.object.name, info.size, info.crc32c, info.owner_node_id) for info in infos),
            key=lambda entry: entry.name,
        )
        if not entries:
            self.failed_saves.append(version)
            return
        manifest = Manifest(
            version=version,
            epoch=rank.epoch,
            coordinator_node_id=rank.node.name,
            replicas=self.job.replicas,
            world_size=len(self.ranks),
            created_unix_ms=0,
            entries=tuple(entries),
            resumable=self.world.rng.random() >= self.job.model_only,
        )
        self.world.oracle.commit_asked(manifest)
        wait_protected = self.world.rng.random() < self.job.waits_protected
        self.world.trace("commits", version=version, resumable=manifest.resumable)
        try:
            event = await rank.commit(manifest, wait_protected, 2 * self.job.deadline_s)
        except StaleEpochError:
            raise
        except ReplicatorError as error:
            self.world.trace("not committed", version=version, error=str(error))
            return
        if event is not None:
            self.world.trace(
                "commit", version=version, ok=event.ok, protected=event.is_protected, why=event.error_message
            )


class SimJob:
    """A job over all its incarnations."""

    def __init__(self, world: World, name: str, replicas: int) -> None:
        rng = world.rng
        self.world = world
        self.name = name
        self.replicas = replicas
        self.deadline_s = world.deadline_s
        self.history = world.oracle.history(name)
        self.objects = rng.choice(((1,), (1, 2), (0, 1, 3)))
        self.pause_s = rng.choice((0.05, 0.5, 2.0))
        self.write_fails = rng.choice((0.0, 0.0, 0.02))
        # How often a save is of the model alone, so that no job goes on from it.
        self.model_only = rng.choice((0.0, 0.0, 0.5))
        self.all_look_up = rng.random() < 0.5
        self.waits_protected = rng.choice((0.0, 0.7, 1.0))
        # How often a rank of an incarnation that failed is not stopped.
        self.lingers = rng.choice((0.0, 0.0, 0.3))
        self.current: Incarnation | None = None

    async def run(self, incarnations: int) -> None:
        """Start it so often, whatever comes of each."""
        rng = self.world.rng
        for _ in range(incarnations):
            nodes = await self._wait_for_nodes()
            self.current = Incarnation(self, nodes, rng.randrange(1, 4))
            outcome = await self.current.run()
            self.world.trace("incarnation over", job=self.name, why=outcome or "finished")
            self.current = None
            await asyncio.sleep(rng.random())

    async def last(self) -> None:
        """With nothing wrong any more: it restores, and what it saves gets protected."""
        oracle = self.world.oracle
        oracle.checked["a save is protected when all is well"] += 1
        self.pause_s, self.write_fails, self.objects, self.all_look_up = 0.01, 0.0, (1,), True
        self.waits_protected, self.model_only = 1.0, 0.0
        nodes = await self._wait_for_nodes()
        if len(nodes) < len(self.world.nodes):
            self.world.broken(f"of {len(self.world.nodes)} nodes only {len(nodes)} came up")
        self.current = last = Incarnation(self, nodes, 2)
        outcome = await last.run()
        self.current = None
        if outcome is not None:
            self.world.broken(f"with nothing wrong any more, job {self.name} failed: {outcome}")
        elif not self._is_crowded() and not any(
            oracle.containers[version].protected for version in last.ranks[0].commits
        ):
            self.world.broken(f"with nothing wrong any more, no save of job {self.name} was protected")

    def _is_crowded(self) -> bool:
        """Whether a store is full of what was committed and never protected: nobody may drop it (docs/testing.md)."""
        usages = [node.store.usage() for node in self.world.nodes if node.store is not None]
        return any(usage.used_bytes > usage.budget_bytes * 0.8 for usage in usages)

    async def _wait_for_nodes(self) -> list[SimNode]:
        """The nodes of the next incarnation, one of which at least took part in the last one.

        Nodes of which none knows the job give its epochs anew, while those that know it are away (docs/testing.md).
        """
        while True:
            up = [node for node in self.world.nodes if node.is_up]
            if up and (len(up) == len(self.world.nodes) or self.world.rng.random() < 0.3):
                newest = max(node.known_epoch(self.name) for node in self.world.nodes)
                if newest == 0:
                    self.world.oracle.forget(self.name)
                if any(node.known_epoch(self.name) == newest for node in up):
                    return up
            await asyncio.sleep(0.2)


def content(seed: int, name: str, size: int) -> bytes:
    """Bytes that no other object has."""
    word = f"{seed}/{name}/{zlib.crc32(name.encode()):08x};".encode()
    return (word * (size // len(word) + 1))[:size]

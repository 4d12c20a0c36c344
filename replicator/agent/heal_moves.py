"""Carries out what is to be healed: bounded pieces, newest first, a few at a time, none twice.

Each piece is one offer: the receiver decides when it pulls, and the rate is that of `heal_limit_bytes_per_s`
(transfer/serve_limit.py), which all pieces of this node share.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.logs import fields
from replicator.agent.manifests import Manifests
from replicator.agent.peers import PeerDirectory
from replicator.agent.replicate import Replicator
from replicator.config import AgentConfig
from replicator.decide.heal import Move
from replicator.errors import (
    CommitError,
    NodeDrainingError,
    ObjectExistsError,
    ObjectNotFoundError,
    ReplicationError,
    ReplicatorError,
    StaleEpochError,
)
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, NodeIdentity, ObjectVersion
from replicator.store import Store
from replicator.v1 import peer_pb2, types_pb2
from replicator.wire import manifest_chunks, sender_to_pb, version_to_pb

MAX_PIECES_AT_ONCE = 4
MAX_PIECE_OBJECTS = 64
# Larger objects go one by one.
MAX_PIECE_BYTES = 1 << 30
# How many deadlines a node that cannot take copies is left alone.
PAUSE_DEADLINES = 4
MAX_REMEMBERED = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Piece:
    version: ContainerVersion
    new_holder: str
    names: tuple[str, ...]
    size_bytes: int

    @property
    def keys(self) -> Iterator[tuple[ContainerVersion, str, str]]:
        return ((self.version, name, self.new_holder) for name in self.names)


class Moves:
    """Used in the event loop only.

    Args:
        on_done: called when nothing is under way and nothing waits any more, with whether any copy was made.
    """

    def __init__(
        self,
        config: AgentConfig,
        store: Store,
        jobs: Jobs,
        peers: PeerDirectory,
        manifests: Manifests,
        replicator: Replicator,
        counters: Counters,
        on_done: Callable[[bool], None],
    ) -> None:
        self._deadline_s = config.deadline_s
        self._store = store
        self._jobs = jobs
        self._peers = peers
        self._manifests = manifests
        self._replicator = replicator
        self._counters = counters
        self._on_done = on_done
        self._todo: dict[str, list[_Piece]] = {}
        self._running: dict[asyncio.Task[None], _Piece] = {}
        self._under_way: set[tuple[ContainerVersion, str, str]] = set()
        self._closed: dict[str, float] = {}
        self._refused: dict[tuple[ContainerVersion, str], float] = {}
        # Until when, and the epoch in which they were offered.
        self._superseded: dict[tuple[ContainerVersion, str], tuple[float, int]] = {}
        self._told: dict[tuple[ContainerVersion, NodeIdentity], None] = {}
        self._made = False
        self._ended = False
        self.objects_moved = 0
        self.bytes_moved = 0

    @property
    def objects_left(self) -> int:
        """Copies that are being made or wait for it."""
        return sum(len(piece.names) for piece in self._pieces())

    @property
    def bytes_left(self) -> int:
        return sum(piece.size_bytes for piece in self._pieces())

    @property
    def idle(self) -> bool:
        return not self._running and not any(self._todo.values())

    def closed(self) -> frozenset[str]:
        """Nodes that could not take copies just now."""
        now = self._now()
        self._closed = {node: until for node, until in self._closed.items() if until > now}
        return frozenset(self._closed)

    def refused(self) -> frozenset[tuple[ContainerVersion, str]]:
        """Copies of these containers were refused by these nodes just now."""
        now = self._now()
        self._refused = {key: until for key, until in self._refused.items() if until > now}
        self._superseded = {
            key: (until, epoch)
            for key, (until, epoch) in self._superseded.items()
            if until > now and self._jobs.epoch(key[0].container.job) == epoch
        }
        return frozenset((*self._refused, *self._superseded))

    def replace(self, job: str, moves: Sequence[Move]) -> None:
        """What is to be done for the job from now on. What is under way goes on; what waited is forgotten."""
        self._todo[job] = list(self._cut(moves))
        self._pump()

    def forget_node(self, node_id: str) -> None:
        """It is another process, or takes copies again."""
        self._closed.pop(node_id, None)
        for refused in (self._refused, self._superseded):
            for key in [key for key in refused if key[1] == node_id]:
                del refused[key]

    async def close(self) -> None:
        """Give up everything."""
        self._ended = True
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- parts

    def _pieces(self) -> Iterable[_Piece]:
        yield from self._running.values()
        for pieces in self._todo.values():
            yield from pieces

    def _cut(self, moves: Sequence[Move]) -> Iterator[_Piece]:
        for move in moves:
            names: list[str] = []
            size = 0
            for name in move.names:
                if (move.version, name, move.new_holder) in self._under_way:
                    continue
                info = self._store.get(move.version.object(name))
                more = 0 if info is None else info.size
                if names and (len(names) == MAX_PIECE_OBJECTS or size + more > MAX_PIECE_BYTES):
                    yield _Piece(move.version, move.new_holder, tuple(names), size)
                    names, size = [], 0
                names.append(name)
                size += more
            if names:
                yield _Piece(move.version, move.new_holder, tuple(names), size)

    def _pump(self) -> None:
        for pieces in self._todo.values():
            while pieces and len(self._running) < MAX_PIECES_AT_ONCE and not self._ended:
                piece = pieces.pop(0)
                task = asyncio.get_running_loop().create_task(self._move(piece))
                self._running[task] = piece
                self._under_way.update(piece.keys)
                task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        piece = self._running.pop(task)
        self._under_way.difference_update(piece.keys)
        if not task.cancelled() and task.exception() is not None:
            log.error("healing failed", exc_info=task.exception(), extra=fields(piece.version))
        if not self._ended:
            self._pump()
            if self.idle:
                made, self._made = self._made, False
                self._on_done(made)

    async def _move(self, piece: _Piece) -> None:
        job = piece.version.container.job
        epoch = self._jobs.epoch(job)
        objects = [piece.version.object(name) for name in piece.names]
        began = self._now()
        try:
            await self._tell_of(piece, epoch)
            reach("heal.told")
            failed = await self._replicator.copy_to(piece.new_holder, objects, epoch, self._deadline_s)
        except ReplicatorError as error:
            failed = dict.fromkeys(objects, error)
        made = [one for one in objects if one not in failed]
        if made:
            reach("heal.copied")
        size = sum(info.size for one in made if (info := self._store.get(one)) is not None)
        self.objects_moved += len(made)
        self.bytes_moved += size
        self._counters.add("objects_healed", len(made))
        self._counters.add("bytes_healed", size)
        self._counters.add("heal_attempts_failed", len(failed))
        if made:
            self._made = True
            log.info(
                "lost copies were made again",
                extra=fields(
                    piece.version,
                    objects=len(made),
                    bytes=size,
                    holder=piece.new_holder,
                    seconds=round(self._now() - began, 3),
                ),
            )
        self._note_failures(piece, failed, epoch)

    async def _tell_of(self, piece: _Piece, epoch: int) -> None:
        """The new holder gets the manifest, and hears that the container is protected when it is. Raises."""
        version = piece.version
        node = self._peers.resolve(version.container.job, piece.new_holder)
        identity = self._peers.identity(piece.new_holder)
        if identity is not None and (version, identity) in self._told:
            return
        stored = await asyncio.to_thread(self._manifests.data, version)
        if stored is None:
            raise ObjectNotFoundError(f"the manifest of {version} is not on this node (any more)")
        sender = self._peers.sender_of(version.container.job)
        await self._peers.upload(
            node,
            "PeerService/PutManifest",
            lambda: manifest_chunks(*stored, sender),
            types_pb2.ManifestChunk,
            peer_pb2.PutManifestReply,
            awaited=f"storing the manifest of {version}",
        )
        if self._store.is_protected(version):
            await self._peers.unary(
                node,
                "PeerService/MarkProtected",
                peer_pb2.MarkProtectedRequest(
                    sender=sender_to_pb(sender), container=version_to_pb(version), passed_on=True
                ),
                peer_pb2.MarkProtectedReply,
                awaited=f"taking note that {version} is protected",
            )
        identity = self._peers.identity(piece.new_holder)
        # Of what is not protected yet it will have to be told again.
        if identity is not None and self._store.is_protected(version):
            self._told[version, identity] = None
            while len(self._told) > MAX_REMEMBERED:
                self._told.pop(next(iter(self._told)))

    def _note_failures(self, piece: _Piece, failed: dict[ObjectVersion, ReplicatorError], epoch: int) -> None:
        if not failed:
            return
        until = self._now() + PAUSE_DEADLINES * self._deadline_s
        for error in failed.values():
            if isinstance(error, StaleEpochError):
                # The job goes on in an epoch that this node has not heard of, maybe without it.
                self._superseded[piece.version, piece.new_holder] = until, epoch
                continue
            if isinstance(error, ObjectNotFoundError | NodeDrainingError):
                continue  # What is to be done is another matter now; who drains is known to do so.
            if isinstance(error, ReplicationError | ObjectExistsError | CommitError):
                self._refused[piece.version, piece.new_holder] = until
            else:
                self._closed[piece.new_holder] = until
        one, error = next(iter(failed.items()))
        log.warning(
            "lost copies were not made again yet",
            extra=fields(one, objects=len(failed), holder=piece.new_holder, reason=error),
        )

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

"""One agent's parts, put together: who owns what, and in which order it starts and ends.

core = build_core(config, address, store, jobs, counters)      # in the event loop, after the gRPC port is bound
add_peer_services(server, core)                                # PeerService and DataService of the TCP server
await core.start()                                             # after the server started
...
await core.close()
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from replicator.agent.abandon import Abandonment
from replicator.agent.alike import Alike
from replicator.agent.commit import Committer
from replicator.agent.counters import Counters
from replicator.agent.drain import Drain
from replicator.agent.heal import Healer
from replicator.agent.health import HealthMonitor, NodeHealth, NodeState
from replicator.agent.jobs import Jobs
from replicator.agent.landing import Landing
from replicator.agent.lookup import Lookup
from replicator.agent.manifests import Manifests
from replicator.agent.packed import Packer
from replicator.agent.peer_service import PeerService
from replicator.agent.peers import PeerDirectory
from replicator.agent.prefault import Prefaulter
from replicator.agent.puller import Puller
from replicator.agent.repair import Repairer
from replicator.agent.replicate import Replicator
from replicator.agent.retention import Retention
from replicator.agent.scrub import Scrubber
from replicator.agent.sources import Opener
from replicator.agent.transport import BulkEndpoint, SocketTransport, Transport
from replicator.config import AgentConfig
from replicator.errors import InvalidIdError, ObjectNotFoundError
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, NodeAddress, NodeIdentity
from replicator.packs import MAX_CALL_BYTES, is_small, pieces_of
from replicator.store import Store
from replicator.store.client_lock import is_client_alive
from replicator.store.paths import StorePaths
from replicator.store.read_many import read_many
from replicator.store.reader import ObjectReader
from replicator.store.trailer import ObjectInfo
from replicator.transfer.grpc_lane import GrpcLane, data_service
from replicator.transfer.lane import Lane
from replicator.transfer.packed import encode_piece, packed_service
from replicator.transfer.serve_limit import ServeLimit
from replicator.transfer.tickets import TicketOffice
from replicator.v1 import data_pb2, types_pb2
from replicator.v1.peer_pb2_grpc import add_PeerServiceServicer_to_server
from replicator.wire import object_from_pb, sender_from_pb, sender_to_pb, version_from_pb

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)


@dataclass
class AgentCore:
    """All parts of one agent. `bulk` is None where no bulk lane is served (lane = grpc, or TLS).

    `client_id` is the agent's own as a client of its store: what it pulls is written under it.
    `on_failed` is called, with its name, when a part ended without which an agent is only half alive.
    """

    config: AgentConfig
    identity: NodeIdentity
    address: NodeAddress
    client_id: str
    store: Store
    jobs: Jobs
    counters: Counters
    tickets: TicketOffice
    serve_limit: ServeLimit
    bulk: BulkEndpoint | None
    peers: PeerDirectory
    alike: Alike
    health: HealthMonitor
    manifests: Manifests
    retention: Retention
    prefaulter: Prefaulter
    landing: Landing
    puller: Puller
    replicator: Replicator
    abandonment: Abandonment
    committer: Committer
    lookup: Lookup
    repairer: Repairer
    scrubber: Scrubber
    healer: Healer
    drain: Drain
    on_failed: Callable[[str], None] = lambda what: None
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _closed: bool = False

    @property
    def bulk_address(self) -> str:
        """`host:port` at which peers reach the bulk lane; empty when it is not served."""
        if self.bulk is None:
            return ""
        host = self.config.host
        return f"[{host}]:{self.bulk.address[1]}" if ":" in host else f"{host}:{self.bulk.address[1]}"

    async def start(self) -> None:
        """Take up again what was unfinished when the last agent of this store ended. Does not wait for peers."""
        self.store.on_pressure = self.retention.on_pressure
        self._spawn(self._take_up(), "taking up unfinished work")
        self._spawn(self.prefaulter.run(), "touching memory ahead of need")
        self.health.on_change.append(self._peer_changed)
        self._spawn(self.health.run(), "the watch over the peers", vital=True)
        self._spawn(self.repairer.run(), "bringing again what was damaged", vital=True)
        self._spawn(self.scrubber.run(), "verifying what is held")
        self.peers.source.on_change.append(self.health.wake)
        self._spawn(self.peers.source.run(), "the source of members", vital=True)
        self._spawn(self.healer.run(), "the watch over copies", vital=True)

    async def close(self) -> None:
        """Stop serving data, give up what is under way, close all channels. Idempotent; waits for no peer."""
        if self._closed:
            return
        self._closed = True
        self.prefaulter.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.drain.close()
        await self.healer.close()
        await self.replicator.close()
        await self.committer.close()
        await self.abandonment.close()
        await self.puller.close()
        await self.peers.close()
        if self.bulk is not None:
            await asyncio.to_thread(self.bulk.stop)

    async def _take_up(self) -> None:
        if excess := self.store.excess():
            freed = await asyncio.to_thread(self.retention.on_pressure, excess)
            log.warning("more is held than the budget allows", extra={"excess_bytes": excess, "freed_bytes": freed})
        paths = self.store.paths
        for client_id in paths.client_ids():
            if client_id.startswith("agent-") and not is_client_alive(paths, client_id):
                self.store.client_gone(client_id)
        await self.peers.announce()
        self.committer.resume()
        reach("restart.resumed")

    def _peer_changed(self, old: NodeHealth | None, new: NodeHealth) -> None:
        """Whoever was away may have missed that this agent is reached elsewhere since its last start (F34)."""
        if new.state is NodeState.ALIVE and not self._closed:
            self._spawn(self.peers.announce_to(new.node), "telling a peer where this agent is")

    def _spawn(self, work: Coroutine[Any, Any, None], what: str, *, vital: bool = False) -> None:
        task = asyncio.get_running_loop().create_task(work)

        def ended(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            if not done.cancelled() and done.exception() is not None:
                log.error("%s failed", what, exc_info=done.exception())
                if vital:
                    self.on_failed(what)

        task.add_done_callback(ended)
        self._tasks.add(task)


def build_core(
    config: AgentConfig,
    address: NodeAddress,
    store: Store,
    jobs: Jobs,
    counters: Counters,
    transport: Transport | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AgentCore:
    """All parts, with the bulk server listening. Call it in the event loop, once the gRPC port is bound.

    Args:
        address: this agent's identity and the address under which peers reach its gRPC port.
        transport: how others are reached; default: sockets, as `config` says.
        clock: monotonic seconds, for what is timed outside the event loop.

    Raises:
        ConfigError: the bulk port cannot be bound, a TLS file cannot be used, or the congestion control is unknown.
    """
    client_id = f"agent-{address.identity.incarnation:016x}"
    transport = transport or SocketTransport(config)
    tickets = TicketOffice(clock=clock)
    serve_limit = ServeLimit(
        config.serve_limit_bytes_per_s, config.heal_limit_bytes_per_s, is_background=tickets.is_background
    )
    peers = PeerDirectory(config, address, jobs, counters, transport.channel)
    alike = Alike(config, address, jobs, counters)
    peers.on_settings = alike.heard
    manifests = Manifests(store, counters)
    retention = Retention(config, address, store, jobs, manifests, counters)
    opener = Opener(config, address.node_id, peers, counters)
    lanes: dict[str, Lane] = {
        "grpc": GrpcLane(peers.channel, lambda one: sender_to_pb(peers.sender_of(one.version.container.job)))
    }
    landing = Landing(client_id, store, opener, lanes, counters)
    bulk: BulkEndpoint | None = None
    if config.lane != "grpc" and not config.tls:
        lanes["bulk"] = transport.bulk_lane()

        def open_ticket(ticket: str) -> ObjectReader:
            return landing.open_to_serve(tickets.resolve(ticket))

        bulk = transport.serve_bulk(open_ticket, serve_limit)
    prefaulter = Prefaulter(config, client_id, store, landing, counters)
    packer = Packer(config, store, peers, opener, landing, counters)
    puller = Puller(config, address, client_id, store, opener, landing, packer, retention, counters)
    replicator = Replicator(config, address, store, jobs, peers, counters)
    replicator.check_local = puller.check_local
    abandonment = Abandonment(config, address, store, jobs, peers, replicator, retention, counters)
    committer = Committer(config, address, store, jobs, peers, manifests, replicator, retention, abandonment, counters)
    lookup = Lookup(config, address, store, jobs, peers, manifests, retention, abandonment, counters)
    repairer = Repairer(config, store, retention, lookup, puller, counters)
    landing.on_quarantined = repairer.note
    health = HealthMonitor(config, peers, counters, clock=clock)

    def on_health(old: NodeHealth | None, new: NodeHealth) -> None:
        if new.state is NodeState.ALIVE:
            committer.node_is_back(new.node.node_id)

    health.on_change.append(on_health)
    lookup.is_dead = lambda node_id: health.state(node_id) is NodeState.DEAD
    scrubber = Scrubber(config, store, landing, counters, lambda: bool(puller.running or replicator.on_their_way))
    healer = Healer(
        config,
        address,
        store,
        jobs,
        peers,
        health,
        manifests,
        lookup,
        replicator,
        retention,
        committer,
        counters,
    )
    return AgentCore(
        config=config,
        identity=address.identity,
        address=address,
        client_id=client_id,
        store=store,
        jobs=jobs,
        counters=counters,
        tickets=tickets,
        serve_limit=serve_limit,
        bulk=bulk,
        peers=peers,
        alike=alike,
        health=health,
        manifests=manifests,
        retention=retention,
        prefaulter=prefaulter,
        landing=landing,
        puller=puller,
        replicator=replicator,
        abandonment=abandonment,
        committer=committer,
        lookup=lookup,
        repairer=repairer,
        scrubber=scrubber,
        healer=healer,
        drain=Drain(config, address.node_id, jobs, peers, puller, healer, counters),
    )


def add_peer_services(server: grpc.aio.Server, core: AgentCore) -> None:
    """Register PeerService and DataService on the server that peers reach."""
    add_PeerServiceServicer_to_server(PeerService(core), server)  # type: ignore[no-untyped-call]

    def open_for_read(request: data_pb2.ReadRequest) -> ObjectReader:
        one = object_from_pb(request.object)
        sender = sender_from_pb(request.sender)
        if sender.epoch:
            core.jobs.check(sender.job, sender.epoch)
        if core.store.get(one) is None:
            raise ObjectNotFoundError(f"{one} is not held by node {core.identity.node_id} (any more)")
        return core.landing.open_to_serve(one)

    def open_packed(request: data_pb2.ReadPackedRequest) -> Iterator[Callable[[], bytes]]:
        sender = sender_from_pb(request.sender)
        if sender.epoch:
            core.jobs.check(sender.job, sender.epoch)
        version = version_from_pb(request.container)
        held = core.store.objects(version)
        return read_pieces(core.store.paths, version, [held.get(name) for name in request.names])

    def is_background(node_id: str, container: types_pb2.ContainerRef, names: Iterable[str]) -> bool:
        version = version_from_pb(container)
        return any(core.replicator.is_background(version.object(name), node_id) for name in names)

    deadline_s, limit = core.config.deadline_s, core.serve_limit
    server.add_generic_rpc_handlers(
        (
            data_service(
                open_for_read,
                send_timeout_s=deadline_s,
                serve_limit=limit,
                is_background=lambda request: is_background(
                    request.sender.node.node_id, request.object.container, (request.object.name,)
                ),
            ),
            packed_service(
                open_packed,
                send_timeout_s=deadline_s,
                serve_limit=limit,
                is_background=lambda request: is_background(
                    request.sender.node.node_id, request.container, request.names
                ),
            ),
        )
    )


def read_pieces(
    paths: StorePaths, version: ContainerVersion, infos: Sequence[ObjectInfo | None]
) -> Iterator[Callable[[], bytes]]:
    """What reads the messages with packed objects, in order; one that is not small, or not held, is left out.

    Raises:
        InvalidIdError: more bytes than one call may have.
    """
    small = [info if info is not None and is_small(info.size) else None for info in infos]
    sizes = [info.size if info is not None else 0 for info in small]
    if sum(sizes) > MAX_CALL_BYTES:
        raise InvalidIdError(f"expected at most {MAX_CALL_BYTES} bytes of packed objects, found {sum(sizes)}")

    def read(part: Sequence[ObjectInfo | None]) -> bytes:
        payloads = iter(read_many(paths, version, [info for info in part if info is not None]))
        return encode_piece([None if info is None else next(payloads) for info in part])

    return (functools.partial(read, small[piece]) for piece in pieces_of(sizes))

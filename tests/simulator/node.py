"""One node: a store on the machine's tmpfs, and the agent process that has it at the moment, if any."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicator.agent.clients import ClientRegistry
from replicator.agent.core import AgentCore, add_peer_services, build_core
from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.agent.local_service import LocalServicer
from replicator.agent.servers import LOCAL_SERVICES, PEER_SERVICES, Server
from replicator.config import AgentConfig
from replicator.errors import ReplicatorError
from replicator.ids import ContainerVersion, NodeAddress, NodeIdentity
from replicator.store import Store
from replicator.store.client_lock import is_client_alive
from replicator.store.paths import StorePaths, open_root
from replicator.v1.local_pb2_grpc import add_LocalServiceServicer_to_server

from .bulk import SimTransport
from .loop import Process
from .machine import lock_lost
from .rpc_server import SimServer

if TYPE_CHECKING:
    from .world import World

LOCAL_PORT = 1
# From the begin of one pass of a scrubber to that of the next.
SCRUB_PASS_S = 10.0
# Of the watch over trainers: a quarter of what a real agent looks, for most of a run is waiting.
_POLL_S = 1.0


class WatchedStore(Store):
    """A real store that tells when a container is protected, and before and after it drops one."""

    on_drop: Callable[[ContainerVersion], Callable[[], None]] = staticmethod(lambda version: lambda: None)

    on_protected: Callable[[ContainerVersion], None] = staticmethod(lambda version: None)

    def mark_protected(self, version: ContainerVersion) -> bool:
        is_protected = super().mark_protected(version)
        if is_protected:
            self.on_protected(version)
        return is_protected

    def drop(self, version: ContainerVersion) -> int:
        dropped = self.on_drop(version)
        size = super().drop(version)
        dropped()
        return size


class Agent:
    """One agent process, built as `daemon.Agent` builds it, without sockets."""

    def __init__(self, node: SimNode, port: int) -> None:
        self.node = node
        self.process = Process(node.world.loop, f"agent of {node.name}", node)
        self.port = port
        self.address: NodeAddress
        self.core: AgentCore
        self.clients: ClientRegistry
        self.is_ready = False

    async def run(self) -> None:
        """Start; the parts go on by themselves. What cannot start ends, and its supervisor tries again."""
        try:
            await self._start()
        except (ReplicatorError, OSError) as error:
            self.node.world.trace("agent cannot start", node=self.node.name, error=str(error))
            self.node.world.loop.call_soon(self.node.start_again, self, context=self.node.world.network.context)

    async def _start(self) -> None:
        node, world = self.node, self.node.world
        paths = open_root(node.root, create=True)
        store = WatchedStore(paths, node.config.budget_bytes)
        store.on_drop = lambda version: world.oracle.dropping(node, version)
        store.on_protected = world.oracle.protected
        self.process.on_killed.append(store.close)
        store.rebuild()
        node.store, node.paths = store, paths
        identity = NodeIdentity(node.name, world.rng.getrandbits(64))
        self.address = NodeAddress(identity, f"{node.name}:{self.port}", node.config.node_labels)
        transport = SimTransport(world.network, self.process, node.name, self.port + 1)
        jobs = Jobs(store, self.address, node.config.replicas)
        self.core = build_core(node.config, self.address, store, jobs, Counters(), transport, world.loop.time)
        self._scrub_in_virtual_time(store)
        self.process.on_killed.append(lambda: lock_lost(paths, self.core.client_id))
        self.clients = ClientRegistry(
            lambda client_id: is_client_alive(paths, client_id), store.client_gone, clock=world.loop.time
        )
        self.clients.track(paths.client_ids())
        store.is_attached = self.clients.is_attached
        local = self._server(LOCAL_SERVICES, f"{node.name}:{LOCAL_PORT}")
        peers = self._server(PEER_SERVICES, self.address.grpc_address)
        add_LocalServiceServicer_to_server(LocalServicer(self.core, self.clients), local.grpc)  # type: ignore[no-untyped-call]
        add_peer_services(peers.grpc, self.core)
        for server in (local, peers):
            await server.start(self.address.identity)
        await self.core.start()
        for server in (local, peers):
            await server.set_serving()
        self.process.spawn(self.clients.watch(_POLL_S))
        self.is_ready = True
        world.trace("agent ready", node=node.name, incarnation=f"{self.address.identity.incarnation:016x}")

    def _scrub_in_virtual_time(self, store: Store) -> None:
        """It gives way to what is on its way, but not to CPU pressure, nor by the real clock."""
        core, scrubber = self.core, self.core.scrubber
        scrubber._pass_s = SCRUB_PASS_S
        scrubber._is_busy = lambda: bool(  # type: ignore[method-assign]
            core.puller.running or core.replicator.on_their_way or store.usage().reserved_bytes
        )

    def _server(self, services: Sequence[str], address: str) -> Server:
        """As the daemon has it, with health, on the simulated network."""
        simulated: Any = SimServer(self.node.world.network, self.process, address, self.node.name)
        return Server(services, simulated)


class SimNode:
    """A host of the cluster.

    Attributes:
        store: of the agent that runs, or that ran last; None when there is nothing on this node.
        full: every file that is made now fails with ENOSPC.
    """

    def __init__(self, world: World, name: str, config: AgentConfig) -> None:
        self.world = world
        self.name = name
        self.config = config
        self.root = Path(config.root)
        self.agent: Agent | None = None
        self.store: Store | None = None
        self.paths: StorePaths | None = None
        self.full = False
        self.present = True
        self.epochs: dict[str, int] = {}
        self._port = 7000

    def __repr__(self) -> str:
        return self.name

    @property
    def is_up(self) -> bool:
        """Whether its agent serves."""
        return self.agent is not None and self.agent.process.alive and self.agent.is_ready

    def known_epoch(self, job: str) -> int:
        """The epoch of a job as the node's store has it; 0 when it knows nothing of the job."""
        state = self.store.job_state(job) if self.store is not None else None
        return 0 if state is None else state.epoch

    def refuses_file(self, path: Any) -> bool:
        """Whether a new file cannot be made there, counted."""
        if self.full and str(path).startswith(str(self.root)):
            self.world.faults["disk full"] += 1
            return True
        return False

    def start(self, other_port: bool = False) -> Agent:
        """Start an agent, or a new one where one died."""
        assert self.agent is None or not self.agent.process.alive
        if other_port:
            self._port += 2
        self.present = True
        self.world.network.host_gone(self.name, False)
        self.agent = Agent(self, self._port)
        self.agent.process.spawn(self.agent.run())
        return self.agent

    def start_again(self, failed: Agent) -> None:
        """The supervisor sees that an agent ended at once."""
        if self.agent is failed and failed.process.alive:
            failed.process.kill()
            self.world.network.later(1.0, self._start_if_none)

    def _start_if_none(self) -> None:
        if self.present and (self.agent is None or not self.agent.process.alive):
            self.start()

    def crash(self) -> None:
        """The agent's process is gone; its store stays."""
        if self.agent is not None and self.agent.process.alive:
            self.agent.process.kill()

    def lose(self) -> None:
        """The host is gone, with all that it had."""
        self.crash()
        self.present = False
        self.world.network.host_gone(self.name, True)
        self.world.oracle.node_lost(self)
        self.store = None
        self.paths = None
        self.epochs.clear()
        shutil.rmtree(self.root, ignore_errors=True)

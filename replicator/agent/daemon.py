"""The agent process: builds the parts, serves them on one event loop, and takes them down again.

A start goes store, ports, parts, servers, agent.json, and only then says SERVING; a stop goes the other way.
Whatever goes wrong at a start is raised as a ReplicatorError with what to do next, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import secrets
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replicator.agent import logs, scheduling
from replicator.config import AgentConfig
from replicator.errors import ReplicatorError, StoreRootError
from replicator.faultpoints import reach
from replicator.ids import NodeAddress, NodeIdentity
from replicator.version import version

if TYPE_CHECKING:
    from replicator.agent.clients import ClientRegistry
    from replicator.agent.core import AgentCore
    from replicator.agent.servers import Server
    from replicator.store.store import Store

# Of a stop: for calls under way, and after that for everything else.
MAX_GRACE_S = 5.0
_MAX_CLOSING_S = 10.0
MAX_DESCRIPTORS = 65_536

log = logging.getLogger(__name__)


def run(config: AgentConfig) -> int:
    """Run an agent in this process until SIGTERM or SIGINT, or until it is idle. Returns the exit status.

    Raises:
        ReplicatorError: it cannot start.
    """
    # What gRPC's core has to say is raised as an error and logged from here.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    logs.configure(config.log_level, config.log_format, config.node_id)
    _raise_descriptor_limit()
    scheduling.apply(config)
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config))


async def _serve(config: AgentConfig) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    hurry = asyncio.Event()

    def on_signal(number: int) -> None:
        log.info("told to stop", extra={"signal": signal.Signals(number).name})
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    agent = await Agent.start(config)
    waiting = asyncio.ensure_future(stop.wait())
    ended = asyncio.ensure_future(agent.ended.wait())
    await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    if config.drain_grace_s and not agent.ended.is_set():
        await agent.drain(hurry)
    # Threads that do not come back from the kernel cannot keep the process.
    watchdog = threading.Timer(MAX_GRACE_S + _MAX_CLOSING_S, _give_up)
    watchdog.daemon = True
    watchdog.start()
    await agent.stop(hurry)
    for task in (waiting, ended):
        task.cancel()
    return agent.status


def _raise_descriptor_limit() -> None:
    """Peers, trainers and objects being served have a descriptor each; the usual soft limit of 1024 is for select()."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _give_up() -> None:
    log.error("could not stop in time, ending all the same")
    sys.stderr.flush()
    os._exit(0)


class Agent:
    """A running agent. Made by `start`, ended by `stop`; both in the same event loop.

    Attributes:
        core: its parts. clients: the trainers of its node. socket: the path of its unix socket.
        ended: set when it should be stopped of its own accord, with the exit status in `status`.
    """

    def __init__(self, config: AgentConfig, store: Store) -> None:
        self.config = config
        self.store = store
        self.ended = asyncio.Event()
        self.status = 0
        self.socket = ""
        self.core: AgentCore
        self.clients: ClientRegistry
        self._servers: list[Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._undo = contextlib.AsyncExitStack()

    @classmethod
    async def start(cls, config: AgentConfig) -> Agent:
        """Start everything; peers and trainers are served when this returns.

        Raises:
            StoreRootError: the root cannot be used, or another agent uses it.
            ConfigError: a port or a certificate cannot be used.
        """
        from replicator.store.own_mount import mount_own
        from replicator.store.paths import open_root
        from replicator.store.store import Store

        began = time.monotonic()
        if config.mount_size and (warning := mount_own(config.root, config.mount_size)):
            log.warning("%s", warning)
        paths = open_root(config.root, create=True)
        if paths.warning:
            log.warning("%s", paths.warning)
        agent = cls(config, Store(paths, config.budget_bytes))
        agent._undo.callback(agent.store.close)
        try:
            await agent._build(began)
        except BaseException as error:
            await agent._undo.aclose()
            if isinstance(error, OSError) and not isinstance(error, ReplicatorError):
                raise StoreRootError(f"the agent cannot start with the root {paths.root}: {error}") from error
            raise
        return agent

    async def _build(self, began: float) -> None:
        from replicator.agent.admin_service import AdminServicer
        from replicator.agent.clients import ClientRegistry
        from replicator.agent.core import add_peer_services, build_core
        from replicator.agent.counters import Counters
        from replicator.agent.jobs import Jobs
        from replicator.agent.local_service import LocalServicer
        from replicator.agent.placing import PlacementChoice
        from replicator.agent.published import Published, last_address, publish, socket_path, withdraw
        from replicator.agent.servers import LOCAL_SERVICES, PEER_SERVICES, Server
        from replicator.store.client_lock import is_client_alive
        from replicator.v1 import local_pb2_grpc

        root = Path(self.store.paths.root)
        report = await asyncio.to_thread(self.store.rebuild)
        reach("restart.rebuilt")
        log.info("store opened: %s", report, extra={"root": str(root), "seconds": round(time.monotonic() - began, 3)})

        peer_server = Server(PEER_SERVICES)
        # Peers, and their agents that start at the same moment, look for this one where it was.
        host, port = last_address(root, self.config.node_id)
        grpc_address = peer_server.listen_tcp(self.config, port if host == self.config.host else 0)
        self._undo.push_async_callback(peer_server.stop, 0)
        identity = NodeIdentity(self.config.node_id, secrets.randbits(64))
        address = NodeAddress(identity, grpc_address, self.config.node_labels)
        choice = PlacementChoice(self.config.placement, self.config.placement_map)
        jobs = Jobs(self.store, address, self.config.replicas, choice)
        self.core = build_core(self.config, address, self.store, jobs, Counters())
        self._undo.push_async_callback(self.core.close)

        paths = self.store.paths
        self.clients = ClientRegistry(lambda client_id: is_client_alive(paths, client_id), self.store.client_gone)
        self.clients.track(paths.client_ids())
        self.store.is_attached = self.clients.is_attached
        self.socket = socket_path(root)
        self._undo.callback(withdraw, root, self.socket)
        local_server = Server(LOCAL_SERVICES)
        local_server.listen_unix(self.socket, int(self.config.socket_mode, 8))
        self._undo.push_async_callback(local_server.stop, 0)

        admin = AdminServicer(self.core, self.clients)
        local = LocalServicer(self.core, self.clients)
        local_pb2_grpc.add_LocalServiceServicer_to_server(local, local_server.grpc)  # type: ignore[no-untyped-call]
        admin.register(local_server.grpc)
        add_peer_services(peer_server.grpc, self.core)
        admin.register(peer_server.grpc)
        self._servers = [local_server, peer_server]
        for server in self._servers:
            await server.start(identity)
        self.core.on_failed = self._part_failed
        await self.core.start()
        for level in self.config.unlabelled:
            log.warning(
                "this node has no label for the level %s: it counts as in one domain with all others that have none",
                level,
            )
        self._spawn(self._tell_interface(), "the look at the network interfaces")
        self._spawn(self.clients.watch(), "the watch over the trainers")
        if self.config.idle_exit_s > 0:
            self._spawn(self._end_when_idle(), "the watch for idleness")

        reach("restart.publishing")
        publish(
            root,
            Published(
                pid=os.getpid(),
                node_id=identity.node_id,
                incarnation=identity.incarnation,
                socket=self.socket,
                grpc_address=grpc_address,
                bulk_address=self.core.bulk_address,
                version=version(),
                started_unix_ms=time.time_ns() // 1_000_000,
            ),
        )
        for server in self._servers:
            await server.set_serving()
        # What was imported lives for ever; the collector need not look at it again.
        gc.freeze()
        log.info(
            "agent ready",
            extra={
                "incarnation": f"{identity.incarnation:016x}",
                "socket": self.socket,
                "grpc": grpc_address,
                "bulk": self.core.bulk_address or "none",
                "tls": self.config.tls,
                "version": version(),
                "seconds": round(time.monotonic() - began, 3),
            },
        )

    async def drain(self, hurry: asyncio.Event) -> None:
        """Give what only this node provides to others, for at most `drain_grace_s`, and no longer once in a `hurry`."""
        drained = asyncio.ensure_future(self.core.drain.finish(self.config.drain_grace_s))
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait((drained, hurried), return_when=asyncio.FIRST_COMPLETED)
        for waiting in (drained, hurried):
            waiting.cancel()
        await asyncio.gather(drained, hurried, return_exceptions=True)
        progress = self.core.drain.progress()
        log.log(
            logging.WARNING if progress.objects_left or not progress.done else logging.INFO,
            "drained before the end" if progress.done else "not all was moved in the time that there was",
            extra={
                "objects_moved": progress.objects_moved,
                "bytes_moved": progress.bytes_moved,
                "objects_left": progress.objects_left,
                "reason": progress.reason,
            },
        )

    async def stop(self, hurry: asyncio.Event | None = None) -> None:
        """Stop: say so, let calls under way end for a while (less when `hurry` gets set), and leave the root tidy.

        What trainers have reserved stays theirs, for the agent that comes next.
        """
        from replicator.agent.published import withdraw

        began = time.monotonic()
        grace = min(MAX_GRACE_S, self.config.rpc_deadline_s)
        for server in self._servers:
            await server.set_stopping()
        withdraw(Path(self.store.paths.root), "")
        for task in self._tasks:
            task.cancel()
        self.clients.close()
        await self._stop_servers(grace, hurry)
        try:
            await self._undo.aclose()
        except Exception:
            log.exception("the agent did not stop as it should")
        log.info("agent stopped", extra={"seconds": round(time.monotonic() - began, 3)})

    async def _stop_servers(self, grace_s: float, hurry: asyncio.Event | None) -> None:
        stopping = asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        hurried = asyncio.ensure_future(hurry.wait() if hurry else asyncio.Event().wait())
        await asyncio.wait((stopping, hurried), return_when=asyncio.FIRST_COMPLETED)
        for waiting in (stopping, hurried):
            waiting.cancel()
        await asyncio.gather(stopping, hurried, return_exceptions=True)
        await asyncio.gather(*(server.stop(0) for server in self._servers))

    def _spawn(self, work: Coroutine[Any, Any, None], what: str) -> None:
        """Run something for the agent's life. An agent of which a part died is ended, not left half alive."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)

        def done(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and task.exception() is not None:
                log.error("%s failed", what, exc_info=task.exception())
                self._part_failed(what)

        task.add_done_callback(done)

    def _part_failed(self, what: str) -> None:
        log.error("without %s the agent ends, for it would be half alive", what)
        self.status = ReplicatorError.exit_code
        self.ended.set()

    async def _tell_interface(self) -> None:
        from replicator.agent.interface import interface_of

        # A name is looked up for it, which may take its time.
        name = await asyncio.to_thread(interface_of, self.core.address.grpc_address)
        log.info("peers reach this agent through %s", name, extra={"grpc": self.core.address.grpc_address})

    async def _end_when_idle(self) -> None:
        limit = self.config.idle_exit_s
        while True:
            rest = limit - self.clients.idle_s()
            if rest <= 0:
                break
            await asyncio.sleep(max(rest, 0.05))
        log.info("no trainer was attached for %.1f s, the agent ends", limit)
        self.ended.set()

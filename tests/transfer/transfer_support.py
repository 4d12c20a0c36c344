"""Nodes that serve real objects over both lanes: in this process, or in one of their own that can be killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from replicator.config import split_address
from replicator.errors import TransferError
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity, ObjectVersion
from replicator.native import block_crcs, combine_blocks
from replicator.rpc_options import channel_options, server_options
from replicator.store.paths import StorePaths, open_root
from replicator.store.reader import open_object
from replicator.store.trailer import ObjectInfo, capacity_for, encode_trailer
from replicator.transfer.bulk_lane import BulkLane
from replicator.transfer.bulk_server import BulkLimits, BulkServer
from replicator.transfer.grpc_lane import GrpcLane, data_service
from replicator.transfer.lane import Lane, ServedObject, Source
from replicator.transfer.pull import PullSource
from replicator.transfer.tickets import TicketOffice
from replicator.transfer.turns import PullPolicy
from replicator.wire import Sender, object_from_pb, sender_to_pb

BLOCK = 64 << 10
LANES = ("bulk", "grpc")
VERSION = ContainerVersion(CheckpointContainerId("job", 7), 1 << 20)
QUICK = PullPolicy(progress_timeout_s=0.5)
PATIENT = PullPolicy(progress_timeout_s=30.0)


def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + size).randbytes(size)


def describe(one: ObjectVersion, data: bytes, block_size: int = BLOCK) -> ObjectInfo:
    crcs = tuple(block_crcs(data, block_size))
    return ObjectInfo(one, len(data), combine_blocks(crcs, len(data), block_size), block_size, crcs, "owner", "c0ffee")


def place(paths: StorePaths, info: ObjectInfo, data: bytes) -> Path:
    """Put a sealed object into a store, as its writer and the rename would."""
    path = paths.object(info.object)
    path.parent.mkdir(parents=True, exist_ok=True)
    capacity = capacity_for(info.size, info.block_size)
    with path.open("wb") as file:
        file.truncate(capacity)
        file.write(data)
        for offset, piece in encode_trailer(info, capacity):
            file.seek(offset)
            file.write(piece)
    return path


def flip_bit(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def node_address(node_id: str, grpc_address: str) -> NodeAddress:
    return NodeAddress(NodeIdentity(node_id, 1), grpc_address)


@contextlib.asynccontextmanager
async def open_lanes(
    *, connections: int = 2, connect_timeout_s: float = 2.0, max_threads: int = 16
) -> AsyncIterator[dict[str, Lane]]:
    """Both lanes, with channels of their own."""
    channels: dict[str, grpc.aio.Channel] = {}

    async def channel_of(node: NodeAddress) -> grpc.aio.Channel:
        if node.grpc_address not in channels:
            channels[node.grpc_address] = grpc.aio.insecure_channel(node.grpc_address, options=channel_options())
        return channels[node.grpc_address]

    sender = sender_to_pb(Sender(NodeIdentity("puller", 2)))
    bulk = BulkLane(connections=connections, connect_timeout_s=connect_timeout_s, max_threads=max_threads)
    try:
        yield {"bulk": bulk, "grpc": GrpcLane(channel_of, lambda _: sender)}
    finally:
        await bulk.close()
        for channel in channels.values():
            await channel.close(None)


class Peer:
    """A node that serves the objects of a root over both lanes."""

    def __init__(self, node_id: str, root: Path, limits: BulkLimits | None = None) -> None:
        self.node_id = node_id
        self.paths = open_root(root, create=True)
        self.tickets = TicketOffice()
        self.asked: list[ObjectVersion] = []
        self.on_open: Callable[[ObjectVersion], None] = lambda one: None
        self.bulk = BulkServer("127.0.0.1", 0, self.open_by_ticket, limits=limits)
        self.grpc = grpc.aio.server(options=server_options())
        self.grpc.add_generic_rpc_handlers((data_service(lambda request: self._open(object_from_pb(request.object))),))
        self.node = node_address(node_id, "")
        self.bulk_address = ""

    def open_by_ticket(self, ticket: str) -> ServedObject:
        return self._open(self.tickets.resolve(ticket))

    def _open(self, one: ObjectVersion) -> ServedObject:
        self.asked.append(one)
        served = open_object(self.paths, one)
        self.on_open(one)
        return served

    async def start(self, bulk_port: int = 0, grpc_port: int = 0) -> None:
        if bulk_port:
            self.bulk = BulkServer("127.0.0.1", bulk_port, self.open_by_ticket)
        self.bulk.start()
        self.bulk_address = "{}:{}".format(*self.bulk.address)
        port = self.grpc.add_insecure_port(f"127.0.0.1:{grpc_port}")
        await self.grpc.start()
        self.node = node_address(self.node_id, f"127.0.0.1:{port}")

    async def stop(self) -> None:
        self.bulk.stop()
        await self.grpc.stop(0)

    def add(self, name: str, data: bytes, block_size: int = BLOCK) -> ObjectInfo:
        info = describe(VERSION.object(name), data, block_size)
        place(self.paths, info, data)
        return info

    def path(self, info: ObjectInfo) -> Path:
        return self.paths.object(info.object)

    def source(self, one: ObjectVersion) -> Source:
        return Source(self.node, self.bulk_address, self.tickets.issue(one)[0])

    def pull_source(self, info: ObjectInfo) -> PullSource:
        async def open_it() -> Source:
            return self.source(info.object)

        return PullSource(self.node_id, open_it)


class PeerProcess:
    """The same in a process of its own: `start`, then real signals. Serves the objects that are in its root."""

    def __init__(self, node_id: str, root: Path) -> None:
        self.node_id = node_id
        self.paths = open_root(root, create=True)
        self._process: asyncio.subprocess.Process | None = None
        self.node = node_address(node_id, "")
        self.bulk_address = ""

    async def start(self) -> None:
        """Start it, on the same ports as before when it was started before."""
        ports = [split_address(a)[1] if a else 0 for a in (self.bulk_address, self.node.grpc_address)]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            self.node_id,
            str(self.paths.root),
            *map(str, ports),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        ready = await self._read_answer()
        self.bulk_address = ready["bulk"]
        self.node = node_address(self.node_id, ready["grpc"])

    async def _read_answer(self) -> dict[str, str]:
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(30):
            line = await self._process.stdout.readline()
        answer: dict[str, str] = json.loads(line)
        return answer

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    async def source(self, one: ObjectVersion) -> Source:
        """With a ticket that the process has issued."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(f"{one.name}\n".encode())
        return Source(self.node, self.bulk_address, (await self._read_answer())["ticket"])

    def add(self, name: str, data: bytes, block_size: int = BLOCK) -> ObjectInfo:
        info = describe(VERSION.object(name), data, block_size)
        place(self.paths, info, data)
        return info

    def pull_source(self, info: ObjectInfo) -> PullSource:
        async def open_it() -> Source:
            if self._process is None or self._process.returncode is not None:
                raise TransferError("no agent is there to issue a ticket")
            return await self.source(info.object)

        return PullSource(self.node_id, open_it)


@dataclass
class Relay:
    """A TCP proxy in front of one server, to make a network of any speed, or to act at a certain byte.

    Attributes:
        target: `host:port` of the server.
        act_after: bytes towards the client, over all connections, after which `act` is called once.
        pause_s: before each piece of `piece` bytes towards the client.
    """

    target: str
    act_after: int = 0
    act: Callable[[], None] | None = None
    pause_s: float = 0.0
    piece: int = 256 << 10

    def __post_init__(self) -> None:
        self.passed = 0
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._closed.is_set():
                client.close()
                return
            try:
                server = socket.create_connection(split_address(self.target), timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                thread = threading.Thread(target=self._pump, args=(source, sink, sink is client))
                self._threads.append(thread)
                thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, to_client: bool) -> None:
        try:
            while data := source.recv(self.piece):
                if to_client:
                    if self.pause_s and self._closed.wait(self.pause_s):
                        return
                    with self._lock:
                        self.passed += len(data)
                        act = self.act if self.act_after and self.passed >= self.act_after else None
                        if act is not None:
                            self.act = None
                    if act is not None:
                        act()
                sink.sendall(data)
        except OSError:
            pass
        finally:
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def hang_up(self) -> None:
        """Cut the connections that are there."""
        for sock in list(self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._closed.set()
        # Closing alone does not wake an accept.
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.hang_up()
        for thread in self._threads:
            thread.join(10)
        for sock in self._sockets:
            sock.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def in_front_of(self, source: Source, lane: str) -> Source:
        """The same source, reached through this relay."""
        if lane == "bulk":
            return Source(source.node, self.address, source.ticket)
        return Source(node_address(source.node_id, self.address), source.bulk_address, source.ticket)


class Mute:
    """Accepts connections and never says anything: what a hung process looks like."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"

    def source(self, node_id: str = "mute") -> Source:
        return Source(node_address(node_id, self.address), self.address, "ticket")

    def pull_source(self, node_id: str = "mute") -> PullSource:
        async def open_it() -> Source:
            return self.source(node_id)

        return PullSource(node_id, open_it)

    def __enter__(self) -> Mute:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()


async def fetch(lane: Lane, source: Source, info: ObjectInfo, timeout_s: float = 5.0) -> bytes:
    """A whole object over one lane, without the pull around it; what the lane says of its blocks is checked."""
    target = bytearray(info.size)
    found: dict[int, int] = {}
    await lane.fetch(
        source,
        info.object,
        0,
        info.size,
        memoryview(target),
        block_size=info.block_size,
        progress_timeout_s=timeout_s,
        on_bytes=lambda count: None,
        on_blocks=lambda first, crcs: found.update(enumerate(crcs, first)),
    )
    assert [found[block] for block in sorted(found)] == list(info.block_crcs)
    return bytes(target)


def policy_for(lane: str, progress_timeout_s: float = 30.0) -> PullPolicy:
    return PullPolicy(progress_timeout_s=progress_timeout_s, lane=lane)


def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> bool:
    """For what happens in another thread or process and gives no event."""
    end = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


async def _serve(node_id: str, root: str, bulk_port: int, grpc_port: int) -> None:
    peer = Peer(node_id, Path(root))
    await peer.start(bulk_port, grpc_port)
    print(json.dumps({"bulk": peer.bulk_address, "grpc": peer.node.grpc_address}), flush=True)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps({"ticket": peer.tickets.issue(VERSION.object(line.strip()))[0]}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

"""Other agents: one channel per address, a Hello before it is used, a deadline on every call.

Identity is not the address (F34). A node is found by its id; the address where it was last met is only a hint, and
whoever answers there says who it is. When that is a new incarnation, what was believed of the old one is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TypeVar

import grpc.aio
from google.protobuf.message import Message

from replicator.agent.counters import Counters
from replicator.agent.jobs import EpochAnswer, Jobs
from replicator.agent.link import Link, LinkBrokenError
from replicator.agent.membership import Source, build_source
from replicator.config import AgentConfig
from replicator.errors import DeadlineExceededError, InvalidIdError, PeerUnavailableError, ReplicatorError
from replicator.ids import AgreedPlacement, NodeAddress, NodeIdentity
from replicator.v1 import peer_pb2
from replicator.wire import (
    Sender,
    identity_from_pb,
    identity_to_pb,
    labels_from_pb,
    node_address_from_pb,
    placement_from_pb,
    sender_to_pb,
    validate_address,
)

# Channels that are kept while nothing is asked over them; those in use are never closed for it.
MAX_IDLE_LINKS = 512
MAX_MET = 8192
# Claims that are verified at the same time; others are left to the next Hello.
MAX_CLAIMS = 256
_RESOLVE_AGAIN_S = 0.25

log = logging.getLogger(__name__)

RequestT = TypeVar("RequestT", bound=Message)
ReplyT = TypeVar("ReplyT", bound=Message)
# Called with the node as it was and as it is now: same node id, another incarnation.
ReplacedCallback = Callable[[NodeAddress, NodeAddress], None]


class PeerDirectory:
    """All other agents that this one talks to. Used in the event loop only.

    Args:
        connect: makes a channel to an address.
        source: where others are learned of, beside the jobs.
    """

    def __init__(
        self,
        config: AgentConfig,
        address: NodeAddress,
        jobs: Jobs,
        counters: Counters,
        connect: Callable[[str], grpc.aio.Channel],
        source: Source | None = None,
    ) -> None:
        self._config = config
        self._address = address
        self._jobs = jobs
        self._counters = counters
        self._connect = connect
        self._links: dict[str, Link] = {}
        self._met: dict[str, NodeAddress] = {}
        self._met_revision = 0
        self._known: tuple[tuple[int, int, tuple[str, ...]], tuple[NodeAddress | str, ...]] | None = None
        self._claims: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._closed = False
        self._draining: dict[str, NodeIdentity] = {}
        self.on_replaced: list[ReplacedCallback] = []
        # Called when another node is being drained, or no longer is.
        self.on_draining: list[Callable[[], None]] = []
        # Called with the node id and the settings of a node that answered a Hello.
        self.on_settings: Callable[[str, Iterable[peer_pb2.AlikeSetting]], None] = lambda node_id, settings: None
        self.own_draining = False
        """Whether this agent says of itself that it is being drained."""
        self._own_names = {address.grpc_address}
        self.source = source or build_source(config, address)

    @property
    def rpc_deadline_s(self) -> float:
        """What a call takes at most when nothing else is said."""
        return self._config.rpc_deadline_s

    @property
    def sender(self) -> Sender:
        """This agent, speaking for no job."""
        return Sender(self._address.identity)

    def sender_of(self, job: str) -> Sender:
        """This agent, speaking for the job in the newest epoch known here."""
        return Sender(self._address.identity, job, self._jobs.epoch(job))

    # -- who is where

    async def ask_epoch(self, job: str, address: str, expected: NodeAddress | None, deadline_s: float) -> EpochAnswer:
        """For `Jobs.open_job`: what the agent at `address` knows of the job. An `EpochAsker`.

        Raises:
            PeerUnavailableError: nobody answers there, or somebody else than `expected` (by node id).
            DeadlineExceededError: no answer in time.
        """
        target: NodeAddress | str = NodeAddress(expected.identity, address) if expected else address
        _, reply = await self._hello(target, job, self._now() + deadline_s, deadline_s)
        members = []
        for message in reply.known_members:
            with contextlib.suppress(InvalidIdError):
                members.append(node_address_from_pb(message))
        node = NodeAddress(identity_from_pb(reply.node), address, labels_from_pb(reply.labels))
        return EpochAnswer(node, reply.highest_epoch, tuple(members), reply.members_epoch)

    async def ask_placement(self, job: str, node: NodeAddress, deadline_s: float) -> AgreedPlacement | None:
        """The placement of the newest epoch whose members the node knows, or None. Raises like `unary`."""
        request = peer_pb2.HelloRequest(sender=sender_to_pb(self.sender_of(job)), want_placement=True)
        reply = await self.unary(
            node,
            "PeerService/Hello",
            request,
            peer_pb2.HelloReply,
            awaited=f"the placement of job {job}",
            deadline_s=deadline_s,
        )
        return placement_from_pb(reply.placement)

    @property
    def configured(self) -> tuple[str, ...]:
        """What the source of members gives, this agent's own addresses left out."""
        return tuple(one for one in self.source.addresses if one not in self._own_names)

    def resolve(self, job: str, node_id: str) -> NodeAddress:
        """Where the node was last known to be: a member, a remembered node, or one met through its address.

        Raises:
            PeerUnavailableError: nobody told this agent of the node.
        """
        for node in self._jobs.everyone(job):
            if node.node_id == node_id:
                return node
        if node_id in self._met:
            return self._met[node_id]
        raise PeerUnavailableError(
            f"no address is known of node {node_id}: it is not a member of job {job}, now or before, and never "
            "answered; let it join the job, or list its address in `peers`"
        )

    def identity(self, node_id: str) -> NodeIdentity | None:
        """The incarnation of the node that answered last; None when it never did."""
        node = self._met.get(node_id)
        return None if node is None else node.identity

    def at(self, address: str) -> NodeAddress | None:
        """The node that answered last at an address."""
        link = self._links.get(address)
        return None if link is None else link.node

    @property
    def draining(self) -> frozenset[str]:
        """Nodes that said, in the incarnation that is there now, that they are being drained."""
        return frozenset(self._draining)

    def note_draining(self, node_id: str, identity: NodeIdentity | None = None, *, draining: bool = True) -> None:
        """The node (by default the incarnation that answered last) said of itself whether it is being drained."""
        known = self._met.get(node_id)
        identity = identity or (known.identity if known is not None else None)
        if identity is None or (known is not None and known.identity != identity):
            return
        before = self._draining.get(node_id)
        if draining:
            self._draining[node_id] = identity
        else:
            self._draining.pop(node_id, None)
        if (before is not None) != draining:
            log.info("a peer is being drained" if draining else "a peer takes copies again", extra={"peer": node_id})
            for callback in self.on_draining:
                callback()

    def known(self) -> tuple[NodeAddress | str, ...]:
        """Every other node of every job, and configured addresses whose node is not known yet.

        The same tuple as before as long as nothing changed: whoever looks often needs to look at it once only.
        """
        configured = self.configured
        state = self._jobs.revision, self._met_revision, configured
        if self._known is None or self._known[0] != state:
            self._known = state, self._all_known(configured)
        return self._known[1]

    def _all_known(self, configured: Sequence[str]) -> tuple[NodeAddress | str, ...]:
        nodes: dict[str, NodeAddress] = {}
        for job in self._jobs.names():
            for node in self._jobs.everyone(job):
                nodes.setdefault(node.node_id, node)
        for node in self._met.values():
            nodes.setdefault(node.node_id, node)
        nodes.pop(self._address.node_id, None)
        addresses = {node.grpc_address for node in nodes.values()}
        return (*sorted(nodes.values()), *(peer for peer in configured if peer not in addresses))

    async def bulk_address(self, node: NodeAddress | str) -> str:
        """Where the node serves the bulk lane, as it said in its Hello; empty when it does not. Raises like `unary`."""
        deadline_s = self._config.rpc_deadline_s
        return (await self._greeted(node, self._now() + deadline_s, deadline_s)).bulk_address

    async def channel(self, node: NodeAddress | str) -> grpc.aio.Channel:
        """A channel on which the node was greeted, for calls that this class does not know. Raises like `unary`."""
        deadline_s = self._config.rpc_deadline_s
        return (await self._greeted(node, self._now() + deadline_s, deadline_s)).channel

    async def confirm(self, job: str, node_id: str) -> None:
        """Ask a node anew who it is; `on_replaced` tells when it was replaced meanwhile. Raises like `unary`."""
        deadline_s = self._config.rpc_deadline_s
        await self._hello(self.resolve(job, node_id), "", self._now() + deadline_s, deadline_s)

    async def greet(self, address: str, deadline_s: float) -> None:
        """Ask anew who is at an address: that is where the node is from now on. Raises like `unary`."""
        await self._hello(address, "", self._now() + deadline_s, deadline_s)

    async def announce(self) -> None:
        """Tell everybody where this agent is reached now; those who do not answer will hear it another time."""
        await asyncio.gather(*(self.announce_to(node) for node in self.known()), return_exceptions=True)

    async def announce_to(self, node: NodeAddress | str) -> None:
        """Tell one node where this agent is reached now, for every job that it takes part in."""
        limit = self._config.rpc_deadline_s
        with contextlib.suppress(ReplicatorError):
            for job in self._jobs.names():
                if isinstance(node, str) or any(one.node_id == node.node_id for one in self._jobs.everyone(job)):
                    await self._hello(node, job, self._now() + limit, limit)

    def look_at(self, job: str, claims: Iterable[NodeAddress]) -> None:
        """Somebody says where nodes are; ask there wherever that is not what is known. Does not wait."""
        known = set(self._jobs.everyone(job)) | {self._address}
        for claim in claims:
            if claim.node_id != self._address.node_id and claim not in known and len(self._claims) < MAX_CLAIMS:
                task = asyncio.get_running_loop().create_task(self.verify_claim(job, claim))
                self._claims.add(task)
                task.add_done_callback(self._claims.discard)

    async def verify_claim(self, job: str, claimed: NodeAddress) -> None:
        """A node said of itself that it is at an address: ask there, and believe only what is answered."""
        for node in self._jobs.everyone(job):
            if node == claimed:
                return
        if any(node.node_id == claimed.node_id for node in self._jobs.everyone(job)):
            with contextlib.suppress(ReplicatorError):
                await self.ask_epoch(job, claimed.grpc_address, claimed, self._config.rpc_deadline_s)

    # -- calls

    async def unary(
        self,
        node: NodeAddress | str,
        method: str,
        request: Message,
        reply_type: type[ReplyT],
        *,
        awaited: str,
        deadline_s: float | None = None,
    ) -> ReplyT:
        """One call, after a Hello where that is due. Repeated once when the peer turns out to have been replaced.

        Args:
            node: a node, which must answer by its node id, or a mere address, where whoever is there will do.
            method: "<Service>/<Method>" of package replicator.v1, or "/<package>.<Service>/<Method>".
            awaited: what the reply is, for the error message.
            deadline_s: for the call, Hello included; default `config.rpc_deadline_s`.

        Raises:
            PeerUnavailableError: nobody, or somebody else, answers there.
            DeadlineExceededError: no answer in time; says what was awaited, from whom, for how long.
            ReplicatorError: what the peer raised.
        """
        limit = self._config.rpc_deadline_s if deadline_s is None else deadline_s

        async def call(link: Link, seconds: float) -> ReplyT:
            return await link.unary(method, request, reply_type, awaited, seconds, limit)

        return await self._twice(node, limit, call)

    async def upload(
        self,
        node: NodeAddress | str,
        method: str,
        requests: Callable[[], Iterable[RequestT]],
        request_type: type[RequestT],
        reply_type: type[ReplyT],
        *,
        awaited: str,
        deadline_s: float | None = None,
    ) -> ReplyT:
        """A client-streaming call; `requests` gives the messages anew for each attempt. Otherwise like `unary`."""
        limit = self._config.rpc_deadline_s if deadline_s is None else deadline_s

        async def call(link: Link, seconds: float) -> ReplyT:
            return await link.upload(method, requests(), request_type, reply_type, awaited, seconds, limit)

        return await self._twice(node, limit, call)

    async def stream(
        self,
        node: NodeAddress | str,
        method: str,
        request: Message,
        reply_type: type[ReplyT],
        *,
        awaited: str,
        idle_s: float,
        on_greeted: Callable[[NodeIdentity], None] = lambda identity: None,
    ) -> AsyncIterator[ReplyT]:
        """A server-streaming call, each message of which must come within `idle_s`. Raises like `unary`.

        Repeated once, like `unary`, as long as no message has come.

        Args:
            on_greeted: called with the process that is asked, before its first message.
        """
        again = True
        while True:
            limit = min(idle_s, self._config.rpc_deadline_s)
            link = await self._greeted(node, self._now() + limit, limit)
            if link.node is not None:
                on_greeted(link.node.identity)
            replies = link.stream(method, request, reply_type, awaited, idle_s)
            try:
                async for reply in replies:
                    again = False
                    yield reply
                return
            except LinkBrokenError as broken:
                self._drop(link)
                if not again:
                    raise broken.error from None
                again = False
            finally:
                await replies.aclose()  # type: ignore[attr-defined]

    async def close(self) -> None:
        """Close all channels. Idempotent."""
        self._closed = True
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.channel.close(None)
        tasks = [*self._closing, *self._claims]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- connections

    async def _twice(
        self, node: NodeAddress | str, limit: float, call: Callable[[Link, float], Awaitable[ReplyT]]
    ) -> ReplyT:
        """Make a call within `limit`, once more when the connection turns out to lead to nobody, or somebody else."""
        end = self._now() + limit
        again = True
        while True:
            link = await self._greeted(node, end, limit)
            try:
                return await call(link, end - self._now())
            except LinkBrokenError as broken:
                self._drop(link)
                if not again:
                    raise broken.error from None
                again = False

    async def _greeted(self, node: NodeAddress | str, end: float, deadline_s: float) -> Link:
        """A link to the node on which a Hello was answered since it was connected."""
        address = node if isinstance(node, str) else node.grpc_address
        link = self._links.get(address)
        if link is not None and link.greeted:
            self._links[address] = self._links.pop(address)
            self._require(node, link.node)
            return link
        link, _ = await self._hello(node, "", end, deadline_s, only_if_due=True)
        return link

    async def _hello(
        self, node: NodeAddress | str, job: str, end: float, deadline_s: float, *, only_if_due: bool = False
    ) -> tuple[Link, peer_pb2.HelloReply]:
        """Ask who is there. A name that is not resolved is tried again until `end` (F34)."""
        address = node if isinstance(node, str) else node.grpc_address
        request = peer_pb2.HelloRequest(
            sender=sender_to_pb(self.sender_of(job) if job else self.sender),
            grpc_address=self._address.grpc_address,
            known_digest=self._jobs.digest(job) if job else 0,
            draining=self.own_draining,
        )
        if not isinstance(node, str):
            request.expected.CopyFrom(identity_to_pb(node.identity))
        fresh = address not in self._links
        while True:
            link = self._link(address)
            try:
                async with asyncio.timeout_at(end):
                    await link.greeting.acquire()
                try:
                    if only_if_due and link.greeted:
                        self._require(node, link.node)
                        return link, peer_pb2.HelloReply()
                    seconds = end - self._now()
                    reply = await link.unary(
                        "PeerService/Hello", request, peer_pb2.HelloReply, "its Hello", seconds, deadline_s
                    )
                    self._meet(link, reply)
                finally:
                    link.greeting.release()
            except TimeoutError as error:
                # Also DeadlineExceededError of the call itself. A silent connection is not waited for a second time.
                self._drop(link)
                if isinstance(error, DeadlineExceededError):
                    raise
                raise DeadlineExceededError.of("its Hello", link.whom, deadline_s) from None
            except LinkBrokenError as broken:
                self._drop(link)
                if broken.unresolved and self._now() + _RESOLVE_AGAIN_S < end:
                    await asyncio.sleep(_RESOLVE_AGAIN_S)
                elif fresh:
                    raise broken.error from None
                fresh = True
                continue
            self._require(node, link.node)
            return link, reply

    def _meet(self, link: Link, reply: peer_pb2.HelloReply) -> None:
        """Somebody answered at the link's address."""
        node = NodeAddress(identity_from_pb(reply.node), link.address, labels_from_pb(reply.labels))
        link.node = node
        link.bulk_address = validate_address(reply.bulk_address) if reply.bulk_address else ""
        if node.identity == self._address.identity:
            self._own_names.add(link.address)
            return
        before = self._met.pop(node.node_id, None)
        self._met[node.node_id] = node
        if before != node:
            self._met_revision += 1
        if len(self._met) > MAX_MET:
            self._met.pop(next(iter(self._met)))
        for other in [one for one in self._met.values() if one.grpc_address == link.address and one is not node]:
            del self._met[other.node_id]
            self._met_revision += 1
        for job in self._jobs.names():
            for known in self._jobs.everyone(job):
                if known.node_id == node.node_id and known != node:
                    before = before or known
                    self._jobs.learn(job, [node], first_hand=True)
        if before is not None and before.identity != node.identity:
            self._counters.add("peers_replaced")
            log.info(
                "a peer is there in a new incarnation; what was known of the old one is dropped",
                extra={"peer": node.node_id, "address": link.address, "was": before.identity, "is": node.identity},
            )
            for callback in self.on_replaced:
                callback(before, node)
        self.note_draining(node.node_id, node.identity, draining=reply.draining)
        self.on_settings(node.node_id, reply.alike)

    def _require(self, wanted: NodeAddress | str, found: NodeAddress | None) -> None:
        if isinstance(wanted, str) or found is None or found.node_id == wanted.node_id:
            return
        raise PeerUnavailableError(
            f"expected node {wanted.node_id} at {wanted.grpc_address}, found node {found.node_id} there; "
            f"{wanted.node_id} is gone or has moved, and is found again once it says where it is"
        )

    def _link(self, address: str) -> Link:
        if self._closed:
            raise PeerUnavailableError(f"this agent is stopping, so {address} is not asked any more")
        link = self._links.get(address)
        if link is None:
            link = self._links[address] = Link(address, self._connect(address))
            idle = [one for one in self._links.values() if one is not link and not one.calls]
            for one in idle[: max(0, len(idle) - MAX_IDLE_LINKS)]:
                self._drop(one, idle=True)
        return link

    def _drop(self, link: Link, *, idle: bool = False) -> None:
        """Never use this link again; calls that still run on it may end."""
        if self._links.get(link.address) is link:
            del self._links[link.address]
        if not idle:
            self.source.poke()
        grace = self._config.rpc_deadline_s if link.calls else None
        task = asyncio.get_running_loop().create_task(link.channel.close(grace))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

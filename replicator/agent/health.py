"""Which other nodes are alive: each is asked again and again, by the gRPC health protocol, with a deadline.

health = HealthMonitor(config, peers, counters)
health.on_change.append(lambda old, new: ...)     # in the event loop, on every change of state
task = asyncio.create_task(health.run())
health.view()["node-7"].state                     # a node is in the view once it was asked

Who answers is confirmed by a Hello: node id and incarnation, never the address. Nothing is deleted for a state here.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from grpc_health.v1 import health_pb2

from replicator.agent.counters import Counters
from replicator.agent.peers import PeerDirectory
from replicator.config import AgentConfig
from replicator.decide.health import HealthSettings, NodeHealth, NodeState, Observation, Standing, next_state
from replicator.errors import PeerUnavailableError, ReplicatorError
from replicator.ids import NodeAddress

__all__ = ["HealthMonitor", "NodeHealth", "NodeState"]

# Questions under way at the same time, and begun per second: with more nodes each is asked less often.
MAX_ASKED = 64
MAX_PER_S = 100.0
# How far an interval is from what was meant, either way, so that nodes are not asked in step.
_JITTER = 0.25
# A question that took this many times its deadline says that this process did not run.
_STALLED = 2.0

_SERVICE = "replicator.v1.PeerService"
_METHOD = "/grpc.health.v1.Health/Check"

log = logging.getLogger(__name__)

ChangeCallback = Callable[[NodeHealth | None, NodeHealth], None]
# Who answers there, with whatever incarnation; ReplicatorError when nobody does in that many seconds.
Ask = Callable[[NodeAddress | str, float], Awaitable[NodeAddress]]


@dataclass
class _Watched:
    """One node, or (until somebody answered there) one configured address."""

    target: NodeAddress | str
    due_s: float
    standing: Standing | None = None
    health: NodeHealth | None = None
    asking: asyncio.Task[None] | None = None


class HealthMonitor:
    """Watches every node that the directory knows: those of all jobs, and configured peers. In the event loop only.

    Args:
        ask, clock, unix: replaced in tests. `clock` only moves forward; `unix` is what people read.

    Attributes:
        on_change: called with what was believed of a node and what is believed now. When a node comes back in
            another incarnation that is two calls: the old one is dead, then (None, the new one is alive).
    """

    def __init__(
        self,
        config: AgentConfig,
        peers: PeerDirectory,
        counters: Counters,
        *,
        ask: Ask | None = None,
        clock: Callable[[], float] = time.monotonic,
        unix: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._peers = peers
        self._counters = counters
        self._ask = ask or self._check
        self._clock = clock
        self._unix = unix
        self._settings = HealthSettings(config.dead_after_s)
        self._watched: dict[str, _Watched] = {}
        self._known: tuple[NodeAddress | str, ...] | None = None
        # When whose turn is, the soonest first. What is not as `_watched` has it is passed over.
        self._turns: list[tuple[float, str]] = []
        self._asking: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self.on_change: list[ChangeCallback] = []
        peers.on_replaced.append(self._on_replaced)

    def view(self) -> dict[str, NodeHealth]:
        """What is believed of each node that was asked at least once, by node id. Never this node itself."""
        return {
            one.health.node.node_id: one.health
            for one in self._watched.values()
            if one.health is not None and not isinstance(one.target, str)
        }

    def state(self, node_id: str) -> NodeState | None:
        """Of one node; None while nothing is known."""
        one = self._watched.get(node_id)
        return None if one is None or one.health is None else one.health.state

    async def run(self) -> None:
        """Watch until cancelled."""
        try:
            while True:
                self._wake.clear()
                self.refresh()
                pause = self.begin_due()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._wake.wait()
        finally:
            await self.close()

    def wake(self) -> None:
        """Nodes came or moved: look at once."""
        self._wake.set()

    async def close(self) -> None:
        """Give up all questions under way."""
        tasks = [one.asking for one in self._watched.values() if one.asking is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def refresh(self) -> None:
        """Take in nodes that became known, where each is reached now, and forget those that nobody knows any more."""
        told = self._peers.known()
        if told is self._known:
            return
        self._known, now = told, self._clock()
        known = {_key(target): target for target in told}
        for key, target in known.items():
            one = self._watched.get(key)
            if one is None:
                # The first question soon, and not of all nodes at once.
                due_s = now + random.random() * self._interval_s(len(known)) / 4
                self._watched[key] = _Watched(target, due_s)
                heapq.heappush(self._turns, (due_s, key))
            else:
                one.target = target
        for key in [key for key in self._watched if key not in known]:
            gone = self._watched.pop(key)
            if gone.asking is not None:
                gone.asking.cancel()

    def begin_due(self) -> float:
        """Ask those whose turn it is, as many as may be asked at once; returns the seconds until the next turn."""
        now = self._clock()
        while self._turns:
            due_s, key = self._turns[0]
            one = self._watched.get(key)
            if one is not None and one.asking is None and one.due_s == due_s:
                if due_s > now:
                    return min(due_s - now, self._config.health_interval_s)
                if len(self._asking) >= MAX_ASKED:
                    break
                one.asking = asyncio.get_running_loop().create_task(self._question(one))
                self._asking.add(one.asking)
                one.asking.add_done_callback(self._asking.discard)
            heapq.heappop(self._turns)
        return self._config.health_interval_s

    async def _question(self, one: _Watched) -> None:
        """Ask one node once."""
        target, limit_s, began = one.target, self._limit_s(one), self._clock()
        before = one.standing
        try:
            answered, problem = await self._answer(target, limit_s)
            took_s = self._clock() - began
            if isinstance(target, str):
                return  # Whoever answered there is watched by its node id from the next `refresh` on.
            if answered is not None:
                self._saw(one, answered, Observation(answered.identity))
            elif took_s > _STALLED * limit_s + 1:
                log.info("this agent did not run for %.1f s, so that a peer's silence says nothing", took_s)
            elif before is None or (one.standing is not None and one.standing.identity == before.identity):
                identity = target.identity if before is None else before.identity
                self._saw(one, replace(target, identity=identity), Observation(None, problem))
        finally:
            one.asking = None
            one.due_s = self._clock() + self._pause_s(one)
            heapq.heappush(self._turns, (one.due_s, _key(target)))
            self._wake.set()

    async def _answer(self, target: NodeAddress | str, limit_s: float) -> tuple[NodeAddress | None, str]:
        try:
            return await self._ask(target, limit_s), ""
        except ReplicatorError as error:
            return None, str(error)

    async def _check(self, target: NodeAddress | str, limit_s: float) -> NodeAddress:
        """An `Ask` by the gRPC health protocol, on a channel on which the node was greeted."""
        reply = await self._peers.unary(
            target,
            _METHOD,
            health_pb2.HealthCheckRequest(service=_SERVICE),
            health_pb2.HealthCheckResponse,
            awaited="its health",
            deadline_s=limit_s,
        )
        address = target if isinstance(target, str) else target.grpc_address
        answered = self._peers.at(address)
        if reply.status != health_pb2.HealthCheckResponse.SERVING or answered is None:
            found = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
            raise PeerUnavailableError(f"the agent at {address} answers that its health is {found}: it starts or stops")
        if isinstance(target, str) and self.state(answered.node_id) is not NodeState.ALIVE:
            # It was believed to be elsewhere, where another one of its name had come and gone.
            await self._peers.greet(target, limit_s)
        return answered

    def _on_replaced(self, before: NodeAddress, now: NodeAddress) -> None:
        one = self._watched.get(now.node_id)
        if one is not None and one.standing is not None:
            self._saw(one, now, Observation(now.identity))

    def _saw(self, one: _Watched, node: NodeAddress, seen: Observation) -> None:
        """Judge what asking a node gave, and tell."""
        now = self._clock()
        known = one.standing
        state, reason = next_state(known, seen, now, self._settings)
        if known is not None and seen.identity is not None and known.identity != seen.identity:
            if known.state is not NodeState.DEAD:
                self._believe(one, replace(node, identity=known.identity), state, reason, now)
            one.standing, one.health = None, None
            state, reason = next_state(None, seen, now, self._settings)
        self._believe(one, node, state, reason, now)

    def _believe(self, one: _Watched, node: NodeAddress, state: NodeState, reason: str, now: float) -> None:
        known, old = one.standing, one.health
        changed = known is None or known.state is not state
        misses = 0 if state is NodeState.ALIVE else 1 + (known.misses if known is not None else 0)
        since_s = now if known is None or changed else known.since_s
        since_unix_s = self._unix() if old is None or changed else old.since_unix_s
        one.standing = Standing(node.identity, state, reason, since_s, misses)
        one.health = NodeHealth(node, state, reason, since_unix_s)
        if not changed:
            return
        if state is not NodeState.ALIVE:
            self._counters.add(f"peers_{state.value}")
        log.log(
            logging.INFO if state is NodeState.ALIVE else logging.WARNING,
            "a peer is %s: %s",
            state.value,
            reason,
            extra={"peer": node.identity, "address": node.grpc_address},
        )
        for callback in self.on_change:
            callback(old, one.health)

    def _interval_s(self, nodes: int) -> float:
        """Between two questions to a node that answers."""
        return max(self._config.health_interval_s, nodes / MAX_PER_S)

    def _limit_s(self, one: _Watched) -> float:
        """For one answer. The last question to a suspect ends when it is time to call it dead."""
        limit = self._config.rpc_deadline_s
        if one.standing is None or one.standing.state is not NodeState.SUSPECT:
            return limit
        rest = one.standing.since_s + self._settings.dead_after_s - self._clock()
        return min(limit, max(rest, limit / 4))

    def _pause_s(self, one: _Watched) -> float:
        """Until the next question."""
        state = one.standing.state if one.standing is not None else None
        if state is NodeState.SUSPECT:
            pause = self._config.health_interval_s / 2
        elif state is NodeState.ALIVE:
            pause = self._interval_s(len(self._watched))
        else:
            # It may never come back; whoever does says so itself.
            pause = max(self._config.deadline_s, self._interval_s(len(self._watched)))
        return pause * random.uniform(1 - _JITTER, 1 + _JITTER)


def _key(target: NodeAddress | str) -> str:
    return target if isinstance(target, str) else target.node_id

"""`AdminService.Verify`: all copies are read and checked, here or on every node, while an operator waits."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from replicator import wire
from replicator.agent.core import AgentCore
from replicator.agent.pieces import Pieces, verify
from replicator.errors import InvalidIdError, ReplicatorError
from replicator.ids import ContainerVersion, NodeAddress, validate_job, validate_step
from replicator.v1 import admin_pb2, types_pb2

MAX_QUEUED = 1024
# Nodes that verify at the same time.
MAX_NODES = 64
_TOLD_S = 0.25

log = logging.getLogger(__name__)


def check_request(request: admin_pb2.VerifyRequest) -> None:
    """Raises InvalidIdError for what cannot be asked."""
    if request.job:
        validate_job(request.job)
    if request.has_step:
        validate_step(request.step)
        if not request.job:
            raise InvalidIdError("expected a job with the step that is to be verified, found none")


async def verify_here(core: AgentCore, request: admin_pb2.VerifyRequest) -> AsyncIterator[admin_pb2.VerifyEvent]:
    """Verify this node's copies. What is bad is set aside, and brought again from another node."""

    def wanted(version: ContainerVersion) -> bool:
        container = version.container
        return (not request.job or container.job == request.job) and (
            not request.has_step or container.step == request.step
        )

    loop = asyncio.get_running_loop()
    pieces = Pieces(core.store, None, wanted)
    event = admin_pb2.VerifyEvent(node=wire.node_address_to_pb(core.address))
    told = loop.time()
    while parts := pieces.next():
        for one, error in await core.landing.check_many(lambda parts=parts: verify(core.store.paths, parts)):  # type: ignore[misc]
            await core.landing.set_aside(one, error)
            event.bad.append(admin_pb2.BadCopy(object=wire.object_to_pb(one), reason=str(error)))
        event.objects += sum(part.is_last for part in parts)
        event.size_bytes += sum(part.size for part in parts)
        if event.bad or loop.time() - told >= _TOLD_S:
            yield event
            told = loop.time()
            del event.bad[:]
    event.done = True
    yield event


async def verify_everywhere(
    core: AgentCore, request: admin_pb2.VerifyRequest, deadline_s: float
) -> AsyncIterator[admin_pb2.VerifyEvent]:
    """The events of all nodes that this agent knows, as they come; a node that fails has a last one that says why.

    Args:
        deadline_s: a node that says nothing for so long is given up.
    """
    events: asyncio.Queue[admin_pb2.VerifyEvent] = asyncio.Queue(MAX_QUEUED)
    gate = asyncio.Semaphore(MAX_NODES)
    here_only = admin_pb2.VerifyRequest()
    here_only.CopyFrom(request)
    here_only.everywhere = False

    async def follow(node: types_pb2.NodeAddress, found: AsyncIterator[admin_pb2.VerifyEvent]) -> None:
        last = admin_pb2.VerifyEvent(node=node)
        try:
            async with gate:
                async for event in found:
                    last = admin_pb2.VerifyEvent()
                    last.CopyFrom(event)
                    await events.put(last)
            reason = "it ended without saying that it is done"
        except ReplicatorError as error:
            reason = str(error)
        except Exception as error:
            log.exception("the copies of a node could not be verified")
            reason = f"{type(error).__name__}: {error}"
        if not last.done:
            ended = admin_pb2.VerifyEvent(
                node=last.node, objects=last.objects, size_bytes=last.size_bytes, done=True, reason=reason
            )
            await events.put(ended)

    def there(node: NodeAddress | str) -> AsyncIterator[admin_pb2.VerifyEvent]:
        return core.peers.stream(
            node,
            "AdminService/Verify",
            here_only,
            admin_pb2.VerifyEvent,
            awaited="how its copies are",
            idle_s=deadline_s,
        )

    work = [follow(wire.node_address_to_pb(core.address), verify_here(core, here_only))]
    for node in core.peers.known():
        address = types_pb2.NodeAddress(grpc_address=node) if isinstance(node, str) else wire.node_address_to_pb(node)
        work.append(follow(address, there(node)))
    tasks = [asyncio.get_running_loop().create_task(one) for one in work]
    left = len(tasks)
    try:
        while left:
            event = await events.get()
            left -= event.done
            yield event
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

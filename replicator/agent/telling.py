"""One message to many members, each told again and again for a while; who does not hear it is named in the log."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from google.protobuf.message import Message

from replicator.agent.logs import fields
from replicator.agent.patience import repeat
from replicator.agent.peers import PeerDirectory
from replicator.errors import ReplicatorError
from replicator.ids import ContainerVersion, NodeAddress

log = logging.getLogger(__name__)


async def tell_all(
    peers: PeerDirectory,
    nodes: Iterable[NodeAddress],
    method: str,
    request: Message,
    reply_type: type[Message],
    *,
    about: ContainerVersion,
    awaited: str,
    deadline_s: float,
    final: tuple[type[ReplicatorError], ...],
    unheard: str,
    on_told: Callable[[], None] = lambda: None,
) -> None:
    """Tell all at once. Never raises for what a node did or did not.

    Args:
        about: for its job the nodes are members, and it is named in the log.
        deadline_s: for each node.
        final: errors after which a node is not told again.
        unheard: what the log says of a node that was not told.
        on_told: called for each node that was.
    """

    async def tell(node: NodeAddress) -> None:
        async def once() -> None:
            where = peers.resolve(about.container.job, node.node_id)
            await peers.unary(where, method, request, reply_type, awaited=awaited)

        try:
            await repeat(once, deadline_s, final=final)
        except ReplicatorError as error:
            log.warning(unheard, extra=fields(about, peer=node.node_id, reason=error))
        else:
            on_told()

    await asyncio.gather(*(tell(node) for node in nodes))

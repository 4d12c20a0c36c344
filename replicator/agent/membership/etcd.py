"""`membership = etcd`: every agent keeps a record of itself under a prefix, with a lease, and watches those of others.

The record goes when its agent is silent for the time of the lease, or ends. While etcd is not reached the members known
last are kept, and the status says since when and why. The key is the node's id; the record says which incarnation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from replicator.agent.membership.etcd_session import Change, EtcdLostError, EtcdSession, credentials
from replicator.agent.membership.source import MAX_ADDRESSES, Source
from replicator.config import AgentConfig
from replicator.errors import ConfigError, InvalidIdError
from replicator.ids import NodeAddress, NodeIdentity
from replicator.wire import validate_address

# etcd itself makes shorter ones longer, as its elections take their time.
MIN_LEASE_S = 2
_FIRST_RETRY_S = 0.25

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Key:
    """Where the records are."""

    prefix: str

    def of(self, node_id: str) -> bytes:
        return f"{self.prefix}{node_id}".encode()

    def node_id(self, key: bytes) -> str:
        return key.decode(errors="replace").removeprefix(self.prefix)


class EtcdSource(Source):
    """See above. Any of the configured endpoints will do; after a failure the next one is tried."""

    kind = "etcd"

    def __init__(self, config: AgentConfig, me: NodeAddress) -> None:
        super().__init__()
        self._config = config
        self._me = me
        self._key = _Key(config.etcd_prefix.rstrip("/") + "/nodes/")
        self._lease_s = max(MIN_LEASE_S, math.ceil(config.deadline_s))
        self._nodes: dict[str, NodeAddress] = {}
        self._rival = ""
        if config.etcd_ca:
            credentials(config)

    @property
    def addresses(self) -> tuple[str, ...]:
        others = (node.grpc_address for node_id, node in sorted(self._nodes.items()) if node_id != self._me.node_id)
        return tuple(dict.fromkeys(others))[:MAX_ADDRESSES]

    async def run(self) -> None:
        """Keep this agent's record and the view of the others, whatever happens to etcd, until cancelled."""
        turn = random.randrange(len(self._config.etcd_endpoints))
        retry_s = _FIRST_RETRY_S
        while True:
            endpoint = self._config.etcd_endpoints[turn % len(self._config.etcd_endpoints)]
            try:
                await self._session(endpoint)
            except EtcdLostError as error:
                if error.was_held:
                    retry_s = _FIRST_RETRY_S
                self._report(str(error))
            except ConfigError as error:
                self._report(str(error))
            turn += 1
            await self._pause(retry_s / 4, retry_s)
            retry_s = min(2 * retry_s, self._config.resolve_interval_s)

    async def _session(self, endpoint: str) -> None:
        """Enter, look, and watch; only ever ends with an error."""
        session = EtcdSession(self._config, endpoint)
        held = False
        try:
            await session.begin(self._lease_s)
            await session.put(self._key.of(self._me.node_id), encode_record(self._me))
            revision = self._replace(await session.read(self._key.prefix, MAX_ADDRESSES))
            self._report(self._rival)
            held = True
            await session.hold(self._key.prefix, revision + 1, self._apply)
        except EtcdLostError as error:
            error.was_held = held
            raise
        except asyncio.CancelledError:
            await session.leave()
            raise
        finally:
            await session.close()

    def _replace(self, read: tuple[int, Iterable[Change]]) -> int:
        """Take over all records there are; returns the revision at which they were read."""
        revision, changes = read
        before, self._nodes = self.addresses, {}
        for change in changes:
            self._take(change)
        if self.addresses != before:
            self._changed()
        return revision

    def _apply(self, changes: Iterable[Change]) -> None:
        """Records that came, changed or went.

        Raises:
            EtcdLostError: this agent's own record went, and has to be made again.
        """
        before = self.addresses
        for change in changes:
            if change.value is None and self._key.node_id(change.key) == self._me.node_id:
                raise EtcdLostError("this agent's own record was removed, and is made again")
            self._take(change)
        self._report(self._rival)
        if self.addresses != before:
            self._changed()

    def _take(self, change: Change) -> None:
        node_id = self._key.node_id(change.key)
        if change.value is None:
            self._nodes.pop(node_id, None)
            return
        try:
            node = decode_record(change.value)
            if node.node_id != node_id:
                raise InvalidIdError(f"it speaks of node {node.node_id}")
        except InvalidIdError as error:
            log.warning("the record %r in etcd is passed over: %s", node_id[:200], error)
            self._nodes.pop(node_id, None)
            return
        self._nodes[node_id] = node
        if node_id == self._me.node_id:
            self._rival = ""
            if node.identity != self._me.identity:
                self._rival = (
                    f"another agent calls itself {node_id}, too, at {node.grpc_address}; give each node a node_id of "
                    "its own, or end the agent that was replaced"
                )


def encode_record(node: NodeAddress) -> bytes:
    """What an agent writes of itself."""
    record = {
        "node_id": node.node_id,
        "incarnation": f"{node.identity.incarnation:016x}",
        "grpc_address": node.grpc_address,
    }
    return json.dumps(record).encode()


def decode_record(data: bytes) -> NodeAddress:
    """What `encode_record` made; keys of newer agents are passed over.

    Raises:
        InvalidIdError: it is no such record.
    """
    try:
        record = json.loads(data)
        node_id, incarnation, address = (record[key] for key in ("node_id", "incarnation", "grpc_address"))
        identity = NodeIdentity(node_id, int(incarnation, 16))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidIdError(f"expected a record of a node, found {data[:80]!r} ({error})") from None
    return NodeAddress(identity, validate_address(str(address)))

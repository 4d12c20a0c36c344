"""Settings that must be alike on all nodes of a job: each agent says its own in its Hello, and hears those of others.

A node that differs is no reason to refuse it: what was saved is still there. It is told, once in the log of every node
that hears of it, and in the status as long as it is so.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from replicator.agent.counters import Counters
from replicator.agent.jobs import Jobs
from replicator.config import AgentConfig
from replicator.ids import NodeAddress
from replicator.v1 import admin_pb2, peer_pb2

# Nodes whose other settings are remembered, and of one difference how many are named in a status.
MAX_NODES = 8192
MAX_NAMED = 16
# Of a value that another node says.
MAX_CHARS = 80

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting that is `here` on this node, and `there` on those that are named."""

    setting: str
    here: str
    there: str
    node_ids: tuple[str, ...]


class Alike:
    """Used in the event loop only."""

    def __init__(self, config: AgentConfig, address: NodeAddress, jobs: Jobs, counters: Counters) -> None:
        self._own = config.alike
        self._node_id = address.node_id
        self._jobs = jobs
        self._counters = counters
        self._differing: dict[str, dict[str, str]] = {}  # node -> what differs there
        self._told: set[tuple[str, str]] = set()  # (setting, its value elsewhere)

    def own(self) -> list[peer_pb2.AlikeSetting]:
        """This node's, for its Hello."""
        return [peer_pb2.AlikeSetting(name=name, value=value) for name, value in self._own.items()]

    def heard(self, node_id: str, settings: Iterable[peer_pb2.AlikeSetting]) -> None:
        """A node said its settings. Those that this version does not know say nothing."""
        found = {one.name: one.value[:MAX_CHARS] for one in settings}
        differing = {name: found[name] for name, value in self._own.items() if found.get(name, value) != value}
        self._differing.pop(node_id, None)
        if not differing:
            return
        self._differing[node_id] = differing
        if len(self._differing) > MAX_NODES:
            self._differing.pop(next(iter(self._differing)))
        self.look()

    def look(self) -> None:
        """Warn of what was not warned of yet. Call it when the members of a job became known."""
        for one in self.differences():
            if (one.setting, one.there) in self._told or len(self._told) >= MAX_NODES:
                continue
            self._told.add((one.setting, one.there))
            self._counters.add("settings_that_differ")
            log.warning(
                "%s is %s on node %s and %s on node %s, and both take part in one job: give all agents of a job the "
                "same, or what one node keeps or waits for another one does not",
                one.setting,
                one.here,
                self._node_id,
                one.there,
                one.node_ids[0],
                extra={"setting": one.setting, "here": one.here, "there": one.there, "peer": one.node_ids[0]},
            )

    def differences(self) -> list[Difference]:
        """All of them now, between this node and those with which it takes part in a job."""
        if not self._differing:
            return []
        fellows = {
            member.node_id
            for job in self._jobs.names()
            if self._jobs.is_member(job)
            for member in self._jobs.members(job)
        }
        nodes: dict[tuple[str, str], list[str]] = {}
        for node_id in sorted(fellows & self._differing.keys()):
            for setting, there in self._differing[node_id].items():
                nodes.setdefault((setting, there), []).append(node_id)
        return [
            Difference(setting, self._own[setting], there, tuple(found))
            for (setting, there), found in sorted(nodes.items())
        ]

    def to_pb(self) -> list[admin_pb2.SettingDifference]:
        """`differences`, for a status."""
        return [
            admin_pb2.SettingDifference(
                setting=one.setting,
                here=one.here,
                there=one.there,
                node_ids=one.node_ids[:MAX_NAMED],
                nodes=len(one.node_ids),
            )
            for one in self.differences()[:MAX_NAMED]
        ]

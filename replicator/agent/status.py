"""What one agent says of itself: its store, its jobs, its counts. Reads what is in memory, waits for nobody."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

from replicator import native, wire
from replicator.agent.clients import ClientRegistry
from replicator.agent.membership import SourceStatus
from replicator.decide.health import NodeHealth
from replicator.decide.types import recency
from replicator.ids import ContainerVersion
from replicator.store.paths import StorePaths
from replicator.v1 import admin_pb2
from replicator.version import version

if TYPE_CHECKING:
    from replicator.agent.core import AgentCore
    from replicator.agent.drain import DrainProgress

# Containers short of copies in one status.
MAX_SHORT = 64
# Of thousands of peers that are all dead, the reasons still fit into one reply.
MAX_REASON_CHARS = 200


def status_of(core: AgentCore, clients: ClientRegistry, started: float, *, brief: bool) -> admin_pb2.StatusReply:
    """The status now.

    Args:
        started: `time.monotonic()` at the start of the agent.
        brief: leave out what is believed of the peers.
    """
    usage = core.store.usage()
    return admin_pb2.StatusReply(
        node=wire.node_address_to_pb(core.address),
        bulk_address=core.bulk_address,
        version=version(),
        root=str(core.store.paths.root),
        filesystem=_filesystem(core.store.paths),
        uptime_ms=int((time.monotonic() - started) * 1000),
        budget_bytes=usage.budget_bytes,
        sealed_bytes=usage.sealed_bytes,
        reserved_bytes=usage.reserved_bytes,
        free_segment_bytes=usage.free_bytes,
        sealed_objects=usage.sealed_objects,
        quarantined_objects=usage.quarantined_objects,
        clients=clients.attached,
        native_core=native.IMPLEMENTATION == "native",
        jobs=[_job_status(core, job) for job in core.jobs.names()],
        counters=core.counters.snapshot(),
        membership=_membership(core.peers.source.status),
        peers=() if brief else [health_to_pb(one) for _, one in sorted(core.health.view().items())],
        scrub_began_unix_ms=core.scrubber.progress.began_unix_ms,
        scrub_finished_unix_ms=core.scrubber.progress.finished_unix_ms,
        scrub_bytes_per_s=core.config.scrub_bytes_per_s,
        healing=_healing(core),
        differing=core.alike.to_pb(),
    )


def health_to_pb(health: NodeHealth) -> admin_pb2.PeerHealth:
    return admin_pb2.PeerHealth(
        node=wire.node_address_to_pb(health.node),
        state=health.state.value,
        reason=health.reason[:MAX_REASON_CHARS],
        since_unix_ms=int(health.since_unix_s * 1000),
    )


def _membership(status: SourceStatus) -> admin_pb2.MembershipStatus:
    return admin_pb2.MembershipStatus(
        kind=status.kind,
        addresses=status.addresses,
        problem=status.problem[:MAX_REASON_CHARS],
        problem_since_unix_ms=int(status.problem_since_unix_s * 1000),
    )


def drain_event(core: AgentCore, progress: DrainProgress) -> admin_pb2.DrainEvent:
    """How far the drain of this node is, as a message."""
    return admin_pb2.DrainEvent(node_id=core.identity.node_id, **dataclasses.asdict(progress))


def _healing(core: AgentCore) -> admin_pb2.Healing:
    """The newest containers that are short of copies: an operator looks at those, and a message has a bound."""
    scarce_objects, scarce_bytes = core.healer.scarce()
    return admin_pb2.Healing(
        draining=core.drain.active,
        scarce_objects=scarce_objects,
        scarce_bytes=scarce_bytes,
        objects_moving=core.healer.moves.objects_left,
        bytes_moving=core.healer.moves.bytes_left,
        short=[
            admin_pb2.ShortContainer(
                container=wire.version_to_pb(short.version),
                objects=short.objects,
                size_bytes=short.size_bytes,
                unplaced=short.unplaced,
                lost=short.lost,
            )
            for short in core.healer.short()[:MAX_SHORT]
        ],
    )


def _filesystem(paths: StorePaths) -> str:
    return f"{paths.filesystem} huge={paths.huge_pages}" if paths.huge_pages else paths.filesystem


def _job_status(core: AgentCore, job: str) -> admin_pb2.JobStatus:
    versions = sorted(core.store.versions(job), key=recency, reverse=True)
    committed = _newest([version for version in versions if core.store.manifest(version) is not None])
    protected = _newest([version for version in versions if core.store.is_protected(version)])
    skipped, skipped_steps = core.committer.skipping.named(job)
    return admin_pb2.JobStatus(
        job=job,
        epoch=core.jobs.epoch(job),
        members=[wire.node_address_to_pb(member) for member in core.jobs.members(job)],
        buddy_node_ids=core.jobs.buddies(job),
        replicas=core.jobs.replicas(job),
        has_committed=committed is not None,
        newest_committed_step=committed or 0,
        has_protected=protected is not None,
        newest_protected_step=protected or 0,
        skipped=skipped,
        skipped_steps=skipped_steps,
        placement=core.jobs.placement(job).strategy,
    )


def _newest(versions: list[ContainerVersion]) -> int | None:
    return versions[0].container.step if versions else None

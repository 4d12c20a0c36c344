"""Replies of the agent as plain dictionaries: the JSON schema of docs/admin.md, and what the printers print.

A change here is a change of the schema: add keys, never rename or remove them without a new SCHEMA_VERSION.
Sizes are bytes and times are seconds. Checksums, incarnations and generations are hexadecimal text, since
64-bit numbers do not survive every JSON parser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from replicator.ids import split_generation

if TYPE_CHECKING:
    from replicator.v1 import admin_pb2, types_pb2

SCHEMA_VERSION = 1
View = dict[str, Any]


def node(address: types_pb2.NodeAddress) -> View:
    return {
        "node_id": address.identity.node_id,
        "incarnation": f"{address.identity.incarnation:016x}",
        "grpc_address": address.grpc_address,
        "labels": {label.level: label.value for label in address.labels},
    }


def container(ref: types_pb2.ContainerRef) -> View:
    epoch, attempt = split_generation(ref.generation)
    return {
        "container": f"{ref.job}/step-{ref.step}_ckpt",
        "job": ref.job,
        "step": ref.step,
        "epoch": epoch,
        "attempt": attempt,
        "generation": f"{ref.generation:016x}",
    }


def unanswered(nodes: Iterable[types_pb2.UnansweredNode]) -> list[View]:
    return [{"node_id": who.node_id, "grpc_address": who.grpc_address, "reason": who.reason} for who in nodes]


def status(reply: admin_pb2.StatusReply) -> View:
    return {
        "node": node(reply.node),
        "bulk_address": reply.bulk_address,
        "version": reply.version,
        "root": reply.root,
        "filesystem": reply.filesystem.partition(" ")[0],
        "huge_pages": reply.filesystem.partition(" huge=")[2] or None,
        "uptime_seconds": reply.uptime_ms / 1000,
        "budget_bytes": reply.budget_bytes,
        "sealed_bytes": reply.sealed_bytes,
        "reserved_bytes": reply.reserved_bytes,
        "free_segment_bytes": reply.free_segment_bytes,
        "sealed_objects": reply.sealed_objects,
        "quarantined_objects": reply.quarantined_objects,
        "clients": reply.clients,
        "native_core": reply.native_core,
        "jobs": [job(item) for item in reply.jobs],
        "counters": dict(sorted(reply.counters.items())),
        "membership": membership(reply.membership),
        "peers": [{"node": node(peer.node), **health(peer)} for peer in reply.peers],
        "scrub": {
            "bytes_per_second": reply.scrub_bytes_per_s,
            "began_unix_seconds": reply.scrub_began_unix_ms / 1000 or None,
            "finished_unix_seconds": reply.scrub_finished_unix_ms / 1000 or None,
        },
        "draining": reply.healing.draining,
        "healing": healing(reply.healing),
        "differing": [
            {
                "setting": one.setting,
                "here": one.here,
                "there": one.there,
                "node_ids": list(one.node_ids),
                "nodes": one.nodes,
            }
            for one in reply.differing
        ],
    }


def healing(reply: admin_pb2.Healing) -> View:
    return {
        "objects_moving": reply.objects_moving,
        "bytes_moving": reply.bytes_moving,
        "short": [
            {
                **container(short.container),
                "objects": short.objects,
                "size_bytes": short.size_bytes,
                "unplaced": short.unplaced,
                "lost": short.lost,
            }
            for short in reply.short
        ],
        "scarce_objects": reply.scarce_objects,
        "scarce_bytes": reply.scarce_bytes,
    }


def drain(reply: admin_pb2.DrainEvent) -> View:
    return {
        "node_id": reply.node_id,
        "draining": reply.draining,
        "done": reply.done,
        "objects_moved": reply.objects_moved,
        "bytes_moved": reply.bytes_moved,
        "objects_left": reply.objects_left,
        "bytes_left": reply.bytes_left,
        "objects_exposed": reply.objects_exposed,
        "reason": reply.reason,
    }


def membership(reply: admin_pb2.MembershipStatus) -> View:
    return {
        "source": reply.kind,
        "addresses": reply.addresses,
        "problem": reply.problem,
        "problem_since_unix_seconds": reply.problem_since_unix_ms / 1000 if reply.problem else None,
    }


def health(reply: admin_pb2.PeerHealth) -> View:
    return {"state": reply.state, "reason": reply.reason, "since_unix_seconds": reply.since_unix_ms / 1000}


def job(reply: admin_pb2.JobStatus) -> View:
    return {
        "job": reply.job,
        "epoch": reply.epoch,
        "replicas": reply.replicas,
        "members": [node(member) for member in reply.members],
        "buddy_node_ids": list(reply.buddy_node_ids),
        "placement": reply.placement or None,
        "newest_committed_step": reply.newest_committed_step if reply.has_committed else None,
        "newest_protected_step": reply.newest_protected_step if reply.has_protected else None,
        "skipped": reply.skipped,
        "skipped_steps": list(reply.skipped_steps),
    }


def nodes(reply: admin_pb2.NodesReply) -> View:
    return {
        "nodes": [
            {
                "node": node(report.node),
                "reachable": report.reachable,
                "reason": report.reason,
                "status": status(report.status) if report.reachable else None,
                "health": health(report.health) if report.HasField("health") else None,
            }
            for report in reply.nodes
        ]
    }


def containers(reply: admin_pb2.ListContainersReply) -> View:
    return {
        "containers": [
            {
                **container(report.container),
                "committed": report.committed,
                "protected": report.is_protected,
                "recoverable": report.recoverable,
                "objects": report.objects,
                "size_bytes": report.size_bytes,
                "min_copies": report.min_copies,
                "manifest_on": list(report.manifest_on),
                "reason": report.reason,
            }
            for report in reply.containers
        ],
        "unanswered": unanswered(reply.unanswered),
    }


def inspection(reply: admin_pb2.InspectReply) -> View:
    """`matches_manifest` of a copy is None where its generation has no manifest to compare with."""
    entry = reply.entry
    of = container(reply.manifest_of) if reply.in_manifest and reply.HasField("manifest_of") else None
    copies = []
    for copy in reply.copies:
        held = copy.descriptor
        ref = held.object.container
        comparable = reply.in_manifest and (of is None or ref == reply.manifest_of)
        copies.append(
            {
                "node_id": copy.node.node_id,
                "incarnation": f"{copy.node.incarnation:016x}",
                **container(ref),
                "size_bytes": held.size_bytes,
                "crc32c": f"{held.crc32c:08x}",
                "block_size_bytes": held.block_size_bytes,
                "blocks": len(held.block_crc32c),
                "owner_node_id": held.owner_node_id,
                "matches_manifest": (held.size_bytes, held.crc32c) == (entry.size_bytes, entry.crc32c)
                if comparable
                else None,
            }
        )
    return {
        "in_manifest": reply.in_manifest,
        "manifest_of": of,
        "manifest_entry": {
            "name": entry.name,
            "size_bytes": entry.size_bytes,
            "crc32c": f"{entry.crc32c:08x}",
            "owner_node_id": entry.owner_node_id,
        }
        if reply.in_manifest
        else None,
        "copies": copies,
        "unanswered": unanswered(reply.unanswered),
    }


def plan(reply: types_pb2.Plan) -> View:
    return {
        "found": reply.found,
        "chosen": container(reply.container) if reply.found else None,
        "reason": reply.reason,
        "rejected": [{**container(item.container), "reason": item.reason} for item in reply.rejected],
        "sources": sources(reply.sources),
        "nodes": [node(item) for item in reply.nodes],
        "unanswered": unanswered(reply.unanswered),
        "world_size": reply.world_size,
    }


def verified(events: Iterable[admin_pb2.VerifyEvent]) -> list[View]:
    """What all events of a check say, by node, sorted."""
    found: dict[str, View] = {}
    for event in events:
        view = found.setdefault(event.node.identity.node_id or event.node.grpc_address, {"bad": []})
        view.update(
            node=node(event.node),
            objects=event.objects,
            size_bytes=event.size_bytes,
            reason=event.reason,
        )
        for bad in event.bad:
            of = {**container(bad.object.container), "object": bad.object.name, "reason": bad.reason}
            view["bad"].append(of)
    return [found[key] for key in sorted(found)]


def sources(items: Iterable[types_pb2.ObjectSource]) -> list[View]:
    return [
        {
            "name": item.name,
            "size_bytes": item.size_bytes,
            "crc32c": f"{item.crc32c:08x}",
            "owner_node_id": item.owner_node_id,
            "node_ids": list(item.node_ids),
        }
        for item in items
    ]

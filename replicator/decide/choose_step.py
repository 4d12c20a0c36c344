"""The decision of every recovery: which checkpoint to restore, and where each of its objects comes from.

The same inputs give the same answer in whatever order they arrive, so whoever decides, all ranks can be given
one plan (F09, F41). All nodes and all tiers are looked through before anything is chosen (F12, F13).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicator.decide.assess import Assessment, Evidence
from replicator.decide.types import (
    Decision,
    Manifest,
    ManifestEntry,
    NodeInventory,
    ObjectSource,
    Rejected,
    Unanswered,
    counted,
    describe,
    listed,
    recency,
    sentence,
)
from replicator.errors import InvalidIdError
from replicator.ids import ContainerVersion


def choose_step(
    inventories: Sequence[NodeInventory],
    manifests: Mapping[ContainerVersion, Manifest],
    *,
    step: int | None = None,
    unanswered: Sequence[Unanswered] = (),
) -> Decision:
    """Choose the newest recoverable container of a job; one that is not resumable only when its step is asked for.

    A container is recoverable when its manifest is known and every entry of it has a holder whose copy has
    the manifest's size and checksum. "Newest" is the order of `types.recency`. Sources of an object are
    its owner first, then other nodes' memory, then durable tiers.

    Args:
        inventories: one answer per node, all about the same job.
        manifests: the manifests that could be read and verified, of any of the containers.
        step: consider this step only (0 is a step, F14).
        unanswered: nodes that were asked in vain; named in the reasons, for they may hold what is missing.

    Raises:
        InvalidIdError: the inventories or manifests are of more than one job.
    """
    evidence = Evidence(inventories, unanswered)
    versions = set(evidence.by_version) | set(manifests)
    jobs = sorted({version.container.job for version in versions})
    if len(jobs) > 1:
        raise InvalidIdError(f"expected inventories of one job, found {listed(jobs)}; choose for each job by itself")
    rejected: list[Rejected] = []
    for version in sorted(versions, key=recency, reverse=True):
        if step is not None and version.container.step != step:
            continue
        manifest = manifests.get(version)
        found = evidence.assess(version, manifest)
        if manifest is not None and found.recoverable and step is None and not manifest.resumable:
            rejected.append(Rejected(version, "It was saved as not resumable: no job goes on from it unless asked to."))
            continue
        if manifest is not None and found.recoverable:
            sources = _sources(manifest.entries, found.holders, evidence.durable)
            reason = _why_chosen(found, evidence, step, rejected)
            return Decision(version, sources, reason, tuple(rejected))
        rejected.append(Rejected(version, found.reason))
    return Decision(None, (), _why_none(evidence, step, jobs, rejected), tuple(rejected))


def _sources(
    entries: Sequence[ManifestEntry], holders: Sequence[tuple[str, ...]], durable: frozenset[str]
) -> tuple[ObjectSource, ...]:
    """Sources of each entry: the owner, then the rest in a circle that starts at the node with the least to send.

    Only bytes whose owner is gone count as load: in a restart most objects are still on their owner's node.
    """
    load: dict[str, int] = {}
    result = []
    for entry, nodes in zip(entries, holders, strict=True):
        order = nodes
        if len(nodes) == 2 and entry.owner_node_id in nodes:
            order = nodes if nodes[0] == entry.owner_node_id else (nodes[1], nodes[0])
        elif len(nodes) > 1:
            owner = tuple(node for node in nodes if node == entry.owner_node_id)
            near = [node for node in nodes if node not in durable and node != entry.owner_node_id]
            far = [node for node in nodes if node in durable and node != entry.owner_node_id]
            others: list[str] = []
            for group in (near, far):
                if group:
                    start = min(range(len(group)), key=lambda i: (load.get(group[i], 0), i))
                    others += group[start:] + group[:start]
            order = (*owner, *others)
        if order[0] != entry.owner_node_id:
            load[order[0]] = load.get(order[0], 0) + max(entry.size, 1)
        result.append(ObjectSource(entry.name, entry.size, entry.crc32c, entry.owner_node_id, order))
    return tuple(result)


def _why_chosen(found: Assessment, evidence: Evidence, step: int | None, rejected: Sequence[Rejected]) -> str:
    what = sentence(describe(found.version))
    if step is None:
        sentences = [f"{what} is the newest recoverable checkpoint."]
    else:
        sentences = [f"{what} is recoverable, as was asked for."]
    sentences.append(found.reason)
    only_durable = sum(1 for nodes in found.holders if all(node in evidence.durable for node in nodes))
    if only_durable:
        sentences.append(f"Only a durable tier has {counted(only_durable, 'object')} of it, to be read from there.")
    if rejected:
        names = [describe(item.version) for item in rejected]
        sentences.append(f"{counted(len(names), 'newer attempt')} cannot be restored: {listed(names)}.")
    if evidence.unanswered:
        silent = sentence(evidence.silent(with_reasons=True))
        sentences.append(f"{silent}; a newer checkpoint that only they hold would not be seen.")
    return " ".join(sentences)


def _why_none(evidence: Evidence, step: int | None, jobs: Sequence[str], rejected: Sequence[Rejected]) -> str:
    job = f" of job {jobs[0]}" if jobs else ""
    text = f"No checkpoint{job} can be restored" if step is None else f"Step {step}{job} cannot be restored"
    if rejected:
        attempts = "the only attempt" if len(rejected) == 1 else f"the newest of {len(rejected)} attempts"
        text += f"; {attempts} is {describe(rejected[0].version)}. {rejected[0].reason}"
    elif evidence.nodes:
        what = "this job" if step is None else "it"
        text += f": nothing of {what} is held by the {counted(len(evidence.nodes), 'node')} that answered."
    else:
        text += ": no node answered."
    if evidence.unanswered:
        text += f" {sentence(evidence.silent(with_reasons=True))}, where checkpoints may be."
    return text

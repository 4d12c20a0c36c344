"""Recovery as the trainer asks for it: which checkpoint, and its bytes into this node. These calls wait for peers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replicator.client.local_agent import LocalAgent
from replicator.decide.types import ObjectSource
from replicator.errors import AgentUnavailableError, ReplicatorError, from_wire
from replicator.faultpoints import reach
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.v1 import admin_pb2, local_pb2, types_pb2
from replicator.wire import source_to_pb, version_from_pb, version_to_pb

logger = logging.getLogger("replicator.client")

MAX_OBJECTS_PER_CALL = 4096


@dataclass(frozen=True, slots=True)
class Retrieved:
    """An object that is verified in this node's store. `lane` and `source_node_id` are empty when it was there."""

    object: ObjectVersion
    was_local: bool
    source_node_id: str
    lane: str


def lookup(agent: LocalAgent, job: str, epoch: int, deadline_s: float, step: int | None = None) -> types_pb2.Plan:
    """Ask this node's agent what to load; it asks all others, for at most `deadline_s`.

    Raises:
        StaleEpochError: a newer incarnation of the job exists.
        AgentUnavailableError, DeadlineExceededError: no answer.
    """
    request = local_pb2.LookupRequest(job=job, epoch=epoch, deadline_ms=int(deadline_s * 1000))
    if step is not None:
        request.has_step = True
        request.step = step
    wait_s = deadline_s + agent.call_deadline_s
    return agent.call_patiently("Lookup", request, types_pb2.Plan, wait_s, f"the recovery plan of job {job}")


def recoverable(agent: LocalAgent, job: str, deadline_s: float) -> list[ContainerVersion]:
    """All containers of the job that could be loaded now, newest first, as this node's agent learns from the others.

    Raises:
        AgentUnavailableError, DeadlineExceededError: no answer.
    """
    request = admin_pb2.ListContainersRequest(job=job, deadline_ms=int(deadline_s * 1000))
    wait_s = deadline_s + agent.call_deadline_s
    method = "AdminService/ListContainers"
    reply = agent.call_patiently(method, request, admin_pb2.ListContainersReply, wait_s, f"the containers of job {job}")
    found = [version_from_pb(one.container) for one in reply.containers if one.recoverable]
    return sorted(found, key=lambda one: (one.container.step, one.generation), reverse=True)


def keep(agent: LocalAgent, version: ContainerVersion, epoch: int) -> None:
    """Have this node keep what it holds of a container that is about to be loaded, also under pressure.

    Only the agent that was asked for the plan knows what is recoverable. To another one this container may look
    superseded by a newer one of which it has everything, while objects of that are gone elsewhere.
    """
    request = local_pb2.RetrieveRequest(client_id=agent.client_id, epoch=epoch, container=version_to_pb(version))
    try:
        for _ in agent.connection().stream(
            "Retrieve", request, local_pb2.RetrieveEvent, agent.call_deadline_s, f"that {version} is kept"
        ):
            pass
    except ReplicatorError as error:
        # One rank's trouble must not make its plan another one than that of the others.
        logger.warning("the agent of this node was not told to keep %s: %s", version, error)


def retrieve(
    agent: LocalAgent,
    version: ContainerVersion,
    sources: Sequence[ObjectSource],
    epoch: int,
    deadline_s: float,
    on_progress: Callable[[str, int], None] | None = None,
) -> list[Retrieved]:
    """Bring whole objects into this node's store, verified; those that are there already cost nothing.

    Args:
        deadline_s: without progress for this long, a source, or the agent, is given up.
        on_progress: called with an object's name and how many of its bytes are here.

    Returns:
        One item per source, in their order.

    Raises:
        ReplicatorError: the first object that no source could give, with all of its reasons; others may be here.
    """
    done: dict[str, Retrieved] = {}
    failed: dict[str, ReplicatorError] = {}
    while True:
        missing = [source for source in sources if source.name not in done]
        if failed or not missing:
            break
        agent.wait_connected(deadline_s)
        before = len(done)
        started = time.monotonic()
        try:
            _retrieve_some(agent, version, missing[:MAX_OBJECTS_PER_CALL], epoch, deadline_s, done, failed, on_progress)
        except AgentUnavailableError:
            # Replaced while it worked: the next one is asked for the rest, as long as something moves.
            if len(done) == before and time.monotonic() - started >= deadline_s:
                raise
    if failed:
        name, error = next(iter(failed.items()))
        others = f" ({len(failed) - 1} more objects failed)" if len(failed) > 1 else ""
        raise type(error)(f"cannot bring {name} of {version} to this node: {error}{others}")
    reach("load.retrieved")
    return [done[source.name] for source in sources]


def _retrieve_some(
    agent: LocalAgent,
    version: ContainerVersion,
    sources: Sequence[ObjectSource],
    epoch: int,
    deadline_s: float,
    done: dict[str, Retrieved],
    failed: dict[str, ReplicatorError],
    on_progress: Callable[[str, int], None] | None,
) -> None:
    request = local_pb2.RetrieveRequest(
        client_id=agent.client_id,
        epoch=epoch,
        container=version_to_pb(version),
        objects=[source_to_pb(source) for source in sources],
        deadline_ms=int(deadline_s * 1000),
        batched=True,
    )
    sizes = {source.name: source.size for source in sources}
    awaited = f"{len(sources)} objects of {version}"
    # The agent gives up a silent source after deadline_s and goes on to the next; it is silent itself for longer
    # only when it hangs.
    idle_s = 2 * deadline_s + agent.call_deadline_s
    for event in agent.connection().stream("Retrieve", request, local_pb2.RetrieveEvent, idle_s, awaited):
        many = event.done_many
        for name in many.names:
            done[name] = Retrieved(version.object(name), many.was_local, many.source_node_id, many.lane)
            if on_progress is not None:
                on_progress(name, sizes[name])
        if many.names:
            continue
        if event.error_kind:
            failed[event.name] = from_wire(event.error_kind, event.error_message)
        elif event.done:
            one = version.object(event.name)
            done[event.name] = Retrieved(one, event.was_local, event.source_node_id, event.lane)
        if on_progress is not None and not event.error_kind:
            on_progress(event.name, event.bytes_done)


def retrieve_later(
    agent: LocalAgent, version: ContainerVersion, sources: Sequence[ObjectSource], epoch: int, deadline_s: float
) -> None:
    """Have this node's agent bring whole objects into its store when nobody waits for bytes. Does not wait for them.

    That is for later recoveries, so when it cannot be asked for, a line in the log is all.
    """
    try:
        for start in range(0, len(sources), MAX_OBJECTS_PER_CALL):
            request = local_pb2.RetrieveRequest(
                client_id=agent.client_id,
                epoch=epoch,
                container=version_to_pb(version),
                objects=[source_to_pb(source) for source in sources[start : start + MAX_OBJECTS_PER_CALL]],
                deadline_ms=int(deadline_s * 1000),
                later=True,
            )
            awaited = f"taking note that {version} is to be brought here"
            for _ in agent.connection().stream(
                "Retrieve", request, local_pb2.RetrieveEvent, agent.call_deadline_s, awaited
            ):
                pass
    except ReplicatorError as error:
        logger.warning("%s was loaded and is not brought into this node's store: %s", version, error)

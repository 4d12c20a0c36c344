"""Small objects whose bytes a trainer gives with the call: one call and one write for many of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from replicator.agent.threads import run_to_end
from replicator.errors import CorruptObjectError, InvalidIdError, ObjectExistsError, ReplicatorError, to_wire
from replicator.native import crc32c
from replicator.packs import MAX_PIECE_BYTES, MAX_PIECE_OBJECTS, is_small
from replicator.store.ingest import Item
from replicator.v1 import local_pb2
from replicator.wire import info_from_pb

if TYPE_CHECKING:
    from replicator.agent.core import AgentCore
    from replicator.store.trailer import ObjectInfo


async def seal_many(core: AgentCore, request: local_pb2.SealManyRequest) -> local_pb2.SealManyReply:
    """Write and seal them. Each one that is not sealed is among the reply's failures, and the others are.

    The agent writes them, so they are its own as a client of the store.

    Raises:
        InvalidIdError: there are too many, or descriptors and payloads contradict each other.
        StaleEpochError, CommitError: an incarnation, or an attempt, that is over.
    """
    infos = [info_from_pb(one, core.client_id) for one in request.descriptors]
    _require_bounds(infos, len(request.payloads))
    for info in infos:
        if info.owner_node_id != core.identity.node_id:
            raise InvalidIdError(
                f"{info.object}: expected this node {core.identity.node_id} as its owner, found "
                f"{info.owner_node_id}; an object is sealed with the agent of the node that wrote it"
            )
    versions = {info.object.version for info in infos}
    for version in versions:
        core.jobs.check(version.container.job, version.epoch)

    def require_wanted() -> None:
        for version in versions:
            core.abandonment.check(version)

    require_wanted()
    core.landing.hold()
    errors = await run_to_end(lambda: _seal(core, infos, memoryview(request.payloads), require_wanted))
    sealed = [info for info, error in zip(infos, errors, strict=True) if error is None]
    core.counters.add("objects_sealed", len(sealed))
    core.counters.add("bytes_sealed", sum(info.size for info in sealed))
    return local_pb2.SealManyReply(
        failures=[_failure(index, error) for index, error in enumerate(errors) if error is not None]
    )


def _require_bounds(infos: Sequence[ObjectInfo], size: int) -> None:
    if not 0 < len(infos) <= MAX_PIECE_OBJECTS or size > MAX_PIECE_BYTES:
        raise InvalidIdError(
            f"expected 1 to {MAX_PIECE_OBJECTS} objects of at most {MAX_PIECE_BYTES} bytes together, found "
            f"{len(infos)} of {size} bytes"
        )
    for info in infos:
        if not is_small(info.size) or info.size > info.block_size:
            raise InvalidIdError(f"{info.object}: its {info.size} bytes are too many to be sealed with others")
    if sum(info.size for info in infos) != size:
        raise InvalidIdError(f"expected {sum(info.size for info in infos)} bytes of payloads, found {size}")


def _seal(
    core: AgentCore, infos: Sequence[ObjectInfo], payloads: memoryview, require_wanted: Callable[[], None]
) -> list[ReplicatorError | None]:
    """In a thread. Of each object why it is not sealed, or None."""
    errors: list[ReplicatorError | None] = [None] * len(infos)
    items: dict[int, Item] = {}
    at = 0
    for index, info in enumerate(infos):
        payload = payloads[at : at + info.size]
        at += info.size
        held = core.store.get(info.object)
        if crc32c(payload) != info.crc32c:
            errors[index] = CorruptObjectError(f"{info.object}: its bytes do not match their checksum; send them again")
        elif held is None:
            items[index] = Item(info, payload)
        elif not held.same_content(info):
            errors[index] = _sealed_already(info, held)
    for index, error in zip(items, core.store.ingest(list(items.values()), require_wanted), strict=True):
        errors[index] = error
    return errors


def _sealed_already(info: ObjectInfo, held: ObjectInfo) -> ObjectExistsError:
    return ObjectExistsError(
        f"{info.object} is sealed with {held.size} bytes of crc32c {held.crc32c:08x}; found another seal with "
        f"{info.size} bytes of {info.crc32c:08x}. Begin a new attempt to save the step again"
    )


def _failure(index: int, error: ReplicatorError) -> local_pb2.SealFailure:
    kind, message = to_wire(error)
    return local_pb2.SealFailure(index=index, error_kind=kind, error_message=message)

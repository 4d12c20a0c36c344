"""`replicator-admin pull CONTAINER DIR`: a checkpoint out of the nodes' memory, as a plain DCP directory."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer, duration, names, size, version_of
from replicator.admin.progress import ByteProgress
from replicator.admin.views import View
from replicator.errors import (
    CorruptObjectError,
    DeadlineExceededError,
    NoRecoverableCheckpointError,
    NotFoundError,
    PeerUnavailableError,
    ReplicatorError,
    TransferError,
)
from replicator.ids import CheckpointContainerId
from replicator.partial_dir import PartialDirectory

if TYPE_CHECKING:
    from replicator.v1 import types_pb2

NAME = "pull"
HELP = "copy a checkpoint into a directory that torch.distributed.checkpoint can load"

# What another source may help against. Anything else (no room here, an interrupt) ends the command.
_TRY_NEXT = (CorruptObjectError, DeadlineExceededError, NotFoundError, PeerUnavailableError, TransferError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("container", metavar="CONTAINER", help="for instance my-job/step-100_ckpt or my-job/step-100")
    parser.add_argument("directory", metavar="DIR", help="to create; may exist if it is empty")


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views

    container = CheckpointContainerId.parse(args.container)
    directory = PartialDirectory(args.directory)
    with AdminClient.of(args) as client:
        plan = _plan(client, container)
        total = sum(source.size_bytes for source in plan.sources)
        read_from: dict[str, int] = {}
        with directory, ByteProgress(f"pulling {container}", total) as progress:
            directory.require_space(total)
            for source in plan.sources:
                node_id = _copy_object(client, plan.container, source, directory, progress)
                read_from[node_id] = read_from.get(node_id, 0) + 1
            directory.finish()
    view = {
        **views.container(plan.container),
        "directory": str(directory.target),
        "objects": len(plan.sources),
        "size_bytes": total,
        "seconds": round(progress.seconds, 3),
        "read_from": dict(sorted(read_from.items())),
    }
    printer.show(view, _draw)
    return 0


def _draw(page: Page, view: View) -> None:
    page.line(
        f"{version_of(view)} is in {view['directory']}: {view['objects']} objects, {size(view['size_bytes'])}, "
        f"checksums verified, in {duration(view['seconds'])} (from {names(list(view['read_from']))})"
    )


def _plan(client: AdminClient, container: CheckpointContainerId) -> types_pb2.Plan:
    """The plan for the step of this container.

    Raises:
        NoRecoverableCheckpointError: it is not recoverable, with the reason.
    """
    from replicator.v1 import admin_pb2, types_pb2

    request = admin_pb2.RecoverRequest(
        job=container.job, deadline_ms=client.agents_deadline_ms, has_step=True, step=container.step
    )
    plan = client.call("Recover", request, types_pb2.Plan, f"the sources of {container}")
    if not plan.found:
        raise NoRecoverableCheckpointError(
            f"{container} cannot be pulled. {plan.reason} replicator-admin ls {container.job} lists what there is"
        )
    found = CheckpointContainerId(plan.container.job, plan.container.step)
    if found != container:
        raise ReplicatorError(f"expected a plan for {container}, found one for {found}; is the agent of this version?")
    return plan


def _copy_object(
    client: AdminClient,
    ref: types_pb2.ContainerRef,
    source: types_pb2.ObjectSource,
    directory: PartialDirectory,
    progress: ByteProgress,
) -> str:
    """Write one object, from the first of its sources that gives the manifest's bytes; the node it came from.

    Raises:
        ReplicatorError: of the kind of the last failure; the message has the reason of every source.
    """
    failures: list[str] = []
    last: ReplicatorError = TransferError(f"the plan has no source for {source.name}")
    with directory.create(source.name) as file:
        for node_id in source.node_ids:
            file.seek(0)
            file.truncate()
            written = 0
            try:
                for piece in _verified_pieces(client, ref, source, node_id):
                    directory.write(file, piece)
                    written += len(piece)
                    progress.add(len(piece))
                directory.close(file)
                return node_id
            except _TRY_NEXT as error:
                progress.add(-written)
                failures.append(f"{node_id}: {error}")
                last = error
    raise type(last)(f"{source.name} could not be read from any of its sources: {'; '.join(failures) or last}")


def _verified_pieces(
    client: AdminClient, ref: types_pb2.ContainerRef, source: types_pb2.ObjectSource, node_id: str
) -> Iterator[bytes]:
    """The object's bytes as `node_id` has them; fails at the end unless size and checksum are the manifest's."""
    from replicator import native
    from replicator.v1 import admin_pb2, types_pb2

    only = types_pb2.ObjectSource()
    only.CopyFrom(source)
    only.node_ids[:] = [node_id]
    request = admin_pb2.ReadObjectRequest(container=ref, object=only, deadline_ms=client.agents_deadline_ms)
    size_bytes, crc = 0, 0
    for piece in client.stream("ReadObject", request, f"the bytes of {source.name}"):
        size_bytes += len(piece)
        if size_bytes > source.size_bytes:
            break
        crc = native.crc32c(piece, crc)
        yield piece
    if size_bytes != source.size_bytes:
        more = "more" if size_bytes > source.size_bytes else str(size_bytes)
        raise CorruptObjectError(f"expected {source.size_bytes} bytes, found {more}")
    if crc != source.crc32c:
        raise CorruptObjectError(f"expected CRC32C {source.crc32c:08x}, found {crc:08x}")

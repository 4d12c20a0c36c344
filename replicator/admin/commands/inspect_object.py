"""`replicator-admin inspect OBJECT`: every copy of one object, compared with the manifest."""

from __future__ import annotations

import argparse

from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer, names, size, unanswered_lines, version_of
from replicator.admin.views import View
from replicator.errors import CorruptObjectError, ObjectNotFoundError
from replicator.ids import CheckpointObjectId

NAME = "inspect"
HELP = "show who holds an object, with which checksum"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("object", metavar="OBJECT", help="for instance my-job/step-100_ckpt/__0_0.distcp")


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2

    wanted = CheckpointObjectId.parse(args.object)
    with AdminClient.of(args) as client:
        request = admin_pb2.InspectRequest(
            job=wanted.container.job,
            step=wanted.container.step,
            name=wanted.name,
            deadline_ms=client.agents_deadline_ms,
        )
        reply = client.call("Inspect", request, admin_pb2.InspectReply, f"the copies of {wanted}")
    view = {"object": str(wanted), **views.inspection(reply)}
    if not view["copies"] and not view["in_manifest"]:
        silent = [who["node_id"] or who["grpc_address"] for who in view["unanswered"]]
        hint = f" (no answer came from {names(silent)})" if silent else ""
        raise ObjectNotFoundError(
            f"no node that answered holds {wanted}, and no manifest lists it{hint}; "
            f"replicator-admin ls {wanted.container} lists the objects of that step"
        )
    printer.show(view, _draw)
    return CorruptObjectError.exit_code if any(copy["matches_manifest"] is False for copy in view["copies"]) else 0


def _draw(page: Page, view: View) -> None:
    entry = view["manifest_entry"]
    if entry is None:
        page.line(f"{view['object']} is in no manifest: its step is not committed.", style="yellow")
    else:
        of = f" of {version_of(view['manifest_of'])}" if view["manifest_of"] else ""
        page.line(
            f"{view['object']}: the manifest{of} says {entry['size_bytes']} bytes ({size(entry['size_bytes'])}), "
            f"CRC32C {entry['crc32c']}, written by {entry['owner_node_id']}"
        )
    page.table(
        ("NODE", "CHECKPOINT", "SIZE>", "CRC32C", "BLOCKS>", "OWNER", "AS IN THE MANIFEST"),
        [
            (
                copy["node_id"],
                version_of(copy),
                str(copy["size_bytes"]),
                copy["crc32c"],
                str(copy["blocks"]),
                copy["owner_node_id"],
                {True: "yes", False: "NO", None: "-"}[copy["matches_manifest"]],
            )
            for copy in view["copies"]
        ],
    )
    unanswered_lines(page, view)

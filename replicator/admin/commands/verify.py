"""`replicator-admin verify [JOB | JOB/step-N]`: read every copy now, and say which do not match their checksums."""

from __future__ import annotations

import argparse

from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer, size
from replicator.admin.views import View
from replicator.errors import CorruptObjectError, NotFoundError, PeerUnavailableError, ReplicatorError
from replicator.ids import CheckpointContainerId, validate_job

NAME = "verify"
HELP = "check every copy on all nodes against its checksums, now"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", default="", metavar="JOB | JOB/step-N", help="default: everything")
    parser.add_argument("--here", action="store_true", help="only the node of the agent that is asked")


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2

    request = admin_pb2.VerifyRequest(everywhere=not args.here)
    if "/" in args.what:
        container = CheckpointContainerId.parse(args.what)
        request.job, request.has_step, request.step = container.job, True, container.step
    elif args.what:
        request.job = validate_job(args.what)
    with AdminClient.of(args) as client:
        request.deadline_ms = client.agents_deadline_ms
        replies = client.stream("Verify", request, "how the copies are")
        found = views.verified(map(admin_pb2.VerifyEvent.FromString, replies))
    silent = [report for report in found if report["reason"]]
    if args.what and not silent and not any(report["objects"] for report in found):
        raise NotFoundError(f"no copy of anything of {args.what} is held; replicator-admin ls lists all checkpoints")
    bad = sum(len(report["bad"]) for report in found)
    printer.show({"what": args.what or None, "sound": not bad and not silent, "nodes": found}, _draw)
    status: type[ReplicatorError] | None = CorruptObjectError if bad else PeerUnavailableError if silent else None
    return status.exit_code if status is not None else 0


def _draw(page: Page, view: View) -> None:
    page.table(
        ("NODE", "ADDRESS", "OBJECTS>", "SIZE>", "BAD>"),
        [
            (
                report["node"]["node_id"] or "?",
                report["node"]["grpc_address"],
                str(report["objects"]),
                size(report["size_bytes"]),
                str(len(report["bad"])),
            )
            for report in view["nodes"]
        ],
    )
    for report in view["nodes"]:
        who = report["node"]["node_id"] or report["node"]["grpc_address"]
        for bad in report["bad"]:
            page.line(f"Bad on {who}: {bad['reason']}", style="red")
        if report["reason"]:
            page.line(f"Not all was verified on {who}: {report['reason']}", style="yellow")
    if any(report["bad"] for report in view["nodes"]):
        page.line("Bad copies are set aside, and brought again from another node where one holds them.")

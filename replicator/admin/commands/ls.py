"""`replicator-admin ls [JOB | JOB/step-N]`: the checkpoints over all nodes, or the objects of one."""

from __future__ import annotations

import argparse

from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer, names, size, unanswered_lines, version_of, yes_no
from replicator.admin.views import View
from replicator.errors import NoRecoverableCheckpointError, NotFoundError
from replicator.ids import CheckpointContainerId, validate_job

NAME = "ls"
HELP = "list checkpoints, or the objects of one"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", nargs="?", default="", metavar="JOB | JOB/step-N", help="default: the checkpoints of all jobs"
    )


def run(args: argparse.Namespace, printer: Printer) -> int:
    if "/" in args.what:
        return _list_objects(args, printer, CheckpointContainerId.parse(args.what))
    if args.what:
        validate_job(args.what)
    return _list_containers(args, printer)


def _list_containers(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2

    with AdminClient.of(args) as client:
        request = admin_pb2.ListContainersRequest(job=args.what, deadline_ms=client.agents_deadline_ms)
        reply = client.call("ListContainers", request, admin_pb2.ListContainersReply, "the list of checkpoints")
    view = {"job": args.what or None, **views.containers(reply)}
    if args.what and not view["containers"]:
        silent = [who["node_id"] or who["grpc_address"] for who in view["unanswered"]]
        hint = f"; no answer came from {names(silent)}" if silent else ""
        raise NotFoundError(f"no node holds anything of job {args.what}{hint}; replicator-admin ls lists all jobs")
    printer.show(view, _draw_containers)
    return 0


def _draw_containers(page: Page, view: View) -> None:
    if not view["containers"]:
        page.line("No checkpoints yet.")
    else:
        page.table(
            ("CHECKPOINT", "STATE", "RECOVERABLE", "OBJECTS>", "SIZE>", "COPIES>", "MANIFEST ON"),
            [
                (
                    version_of(item),
                    "protected" if item["protected"] else "committed" if item["committed"] else "not committed",
                    yes_no(item["recoverable"]),
                    str(item["objects"]),
                    size(item["size_bytes"]),
                    str(item["min_copies"]),
                    names(item["manifest_on"]),
                )
                for item in view["containers"]
            ],
        )
    for item in view["containers"]:
        if not item["recoverable"]:
            page.line(f"{version_of(item)}: {item['reason']}", style="yellow")
    unanswered_lines(page, view)


def _list_objects(args: argparse.Namespace, printer: Printer, container: CheckpointContainerId) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2, types_pb2

    with AdminClient.of(args) as client:
        request = admin_pb2.RecoverRequest(
            job=container.job, deadline_ms=client.agents_deadline_ms, has_step=True, step=container.step
        )
        reply = client.call("Recover", request, types_pb2.Plan, f"the objects of {container}")
    if not reply.found:
        raise NoRecoverableCheckpointError(reply.reason)
    plan = views.plan(reply)
    view = {key: plan[key] for key in ("chosen", "world_size", "unanswered")} | {"objects": plan["sources"]}
    printer.show(view, _draw_objects)
    return 0


def _draw_objects(page: Page, view: View) -> None:
    page.line(f"{version_of(view['chosen'])}, written by {view['world_size']} ranks")
    page.table(
        ("OBJECT", "SIZE>", "CRC32C", "OWNER", "HELD BY"),
        [
            (item["name"], size(item["size_bytes"]), item["crc32c"], item["owner_node_id"], names(item["node_ids"]))
            for item in view["objects"]
        ],
    )
    unanswered_lines(page, view)

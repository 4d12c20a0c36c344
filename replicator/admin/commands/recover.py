"""`replicator-admin recover JOB --dry-run`: what a restart of the job would choose now, and why."""

from __future__ import annotations

import argparse

from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer, names, size, unanswered_lines, version_of
from replicator.admin.views import View
from replicator.errors import NoRecoverableCheckpointError, UnsupportedError
from replicator.ids import MAX_STEP, validate_job

NAME = "recover"
HELP = "show what a restart of a job would choose, without doing it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB")
    parser.add_argument("--dry-run", action="store_true", help="required: the job's own restart does the real thing")
    parser.add_argument("--step", type=_step, metavar="N", help="this step only; 0 is a step")


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2, types_pb2

    validate_job(args.job)
    if not args.dry_run:
        raise UnsupportedError(
            "recover only shows a plan: add --dry-run. The job itself recovers when it restarts; "
            "to copy a checkpoint out, use replicator-admin pull"
        )
    with AdminClient.of(args) as client:
        request = admin_pb2.RecoverRequest(job=args.job, deadline_ms=client.agents_deadline_ms)
        if args.step is not None:
            request.has_step, request.step = True, args.step
        reply = client.call("Recover", request, types_pb2.Plan, "a recovery plan")
    printer.show({"job": args.job, "dry_run": True, **views.plan(reply)}, _draw)
    return 0 if reply.found else NoRecoverableCheckpointError.exit_code


def _draw(page: Page, view: View) -> None:
    page.line(view["reason"], style="green" if view["found"] else "red")
    if view["found"]:
        total = sum(item["size_bytes"] for item in view["sources"])
        page.line(
            f"Plan: {version_of(view['chosen'])}, {len(view['sources'])} objects, {size(total)}, "
            f"written by {view['world_size']} ranks"
        )
        page.table(
            ("OBJECT", "SIZE>", "CRC32C", "OWNER", "SOURCES, BEST FIRST"),
            [
                (item["name"], size(item["size_bytes"]), item["crc32c"], item["owner_node_id"], names(item["node_ids"]))
                for item in view["sources"]
            ],
        )
    for item in view["rejected"]:
        page.line(f"Rejected {version_of(item)}: {item['reason']}", style="yellow")
    unanswered_lines(page, view)


def _step(text: str) -> int:
    try:
        step = int(text)
    except ValueError:
        step = -1
    if not 0 <= step <= MAX_STEP:
        raise argparse.ArgumentTypeError(f"expected a step from 0 to {MAX_STEP}, found {text!r}")
    return step

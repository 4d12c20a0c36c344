"""`replicator-admin nodes`: every node the agent knows, and how it is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer, duration, health_line, names, size, yes_no
from replicator.admin.views import View

NAME = "nodes"
HELP = "show all nodes, each asked for its own status"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2

    with AdminClient.of(args) as client:
        request = admin_pb2.NodesRequest(deadline_ms=client.agents_deadline_ms)
        reply = client.call("Nodes", request, admin_pb2.NodesReply, "the status of all nodes")
    printer.show(views.nodes(reply), _draw)
    return 0


def _draw(page: Page, view: View) -> None:
    page.table(
        (
            "NODE",
            "ADDRESS",
            "REACHABLE",
            "HEALTH",
            "VERSION",
            "UP",
            "OBJECTS>",
            "SEALED>",
            "BUDGET>",
            "TRAINERS>",
            "LABELS",
            "BUDDIES",
        ),
        [_row(report) for report in view["nodes"]],
    )
    for report in view["nodes"]:
        if not report["reachable"]:
            who = report["node"]["node_id"] or report["node"]["grpc_address"]
            page.line(f"No answer from {who}: {report['reason']}", style="yellow")
    for report in view["nodes"]:
        if report["health"] and report["health"]["state"] != "alive":
            page.line(f"{report['node']['node_id']} is {health_line(report['health'])}", style="yellow")


def _row(report: View) -> tuple[str, ...]:
    node, status = report["node"], report["status"]
    health = report["health"]["state"] if report["health"] else "-"
    labels = ",".join(f"{level}={value}" for level, value in node["labels"].items()) or "-"
    start = (node["node_id"] or "?", node["grpc_address"], yes_no(report["reachable"]), health)
    if status is None:
        return (*start, "-", "-", "-", "-", "-", "-", labels, "-")
    return (
        *start,
        status["version"],
        duration(status["uptime_seconds"]),
        str(status["sealed_objects"]),
        size(status["sealed_bytes"]),
        size(status["budget_bytes"]),
        str(status["clients"]),
        labels,
        _buddies(status["jobs"]),
    )


def _buddies(jobs: Sequence[View]) -> str:
    """The nodes that keep this one's objects, of each job when there are more."""
    told = [(job["job"], names(job["buddy_node_ids"])) for job in jobs]
    return told[0][1] if len(told) == 1 else "; ".join(f"{job}: {chosen}" for job, chosen in told) or "-"

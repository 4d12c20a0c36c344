"""`replicator-admin drain NODE`: give what only this node provides to others, before it is stopped."""

from __future__ import annotations

import argparse

from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer, duration, size
from replicator.admin.progress import ByteProgress
from replicator.admin.views import View
from replicator.errors import AgentUnavailableError, ReplicationError

NAME = "drain"
HELP = "move what only a node provides to others, and give it no copies any more, before it is stopped"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_node(parser)


def add_node(parser: argparse.ArgumentParser) -> None:
    """The node that is meant."""
    parser.add_argument("node", metavar="NODE", nargs="?", default="", help="its node id; default: the agent's own")


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2

    last = admin_pb2.DrainEvent()
    with AdminClient.of(args) as client:
        request = admin_pb2.DrainRequest(node_id=args.node, deadline_ms=client.agents_deadline_ms)
        whom = args.node or "this node"
        with ByteProgress(f"draining {whom}", 0) as progress:
            for message in client.stream("Drain", request, f"how far the drain of {whom} is"):
                event = admin_pb2.DrainEvent.FromString(message)
                progress.add(event.bytes_moved - last.bytes_moved, total=event.bytes_moved + event.bytes_left)
                last = event
    if not last.done:
        raise AgentUnavailableError(f"{whom} ended before it was drained; see whether its agent still runs")
    printer.show({**views.drain(last), "seconds": round(progress.seconds, 3)}, _draw)
    return ReplicationError.exit_code if last.objects_exposed else 0


def _draw(page: Page, view: View) -> None:
    moved = f"{view['objects_moved']} objects, {size(view['bytes_moved'])}, were moved in {duration(view['seconds'])}"
    if view["objects_exposed"]:
        page.line(f"{view['node_id']} must not be stopped: {view['reason']} ({moved})", style="red")
        return
    page.line(f"{view['node_id']} is drained and can be stopped: {moved}", style="green")
    if view["objects_left"]:
        page.line(f"Warning: {view['reason']}.", style="yellow")
    page.line(f"It takes no copies until its agent is started again, or: replicator-admin undrain {view['node_id']}")

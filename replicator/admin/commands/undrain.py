"""`replicator-admin undrain NODE`: a node that was drained takes copies again."""

from __future__ import annotations

import argparse

from replicator.admin.commands.drain import add_node
from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer
from replicator.admin.views import View

NAME = "undrain"
HELP = "let a node that was drained take copies again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_node(parser)


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2

    with AdminClient.of(args) as client:
        request = admin_pb2.UndrainRequest(node_id=args.node, deadline_ms=client.agents_deadline_ms)
        reply = client.call("Undrain", request, admin_pb2.DrainEvent, "the end of the drain")
    printer.show(views.drain(reply), _draw)
    return 0


def _draw(page: Page, view: View) -> None:
    page.line(f"{view['node_id']} takes copies again.", style="green")

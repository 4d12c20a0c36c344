"""`replicator-admin status`: one agent, its memory, its jobs."""

from __future__ import annotations

import argparse
import time

from replicator.admin.connection import AdminClient
from replicator.admin.printers import Page, Printer, duration, health_line, names, size, version_of
from replicator.admin.views import View

NAME = "status"
HELP = "show one agent: its store, memory, trainers and jobs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counters", action="store_true", help="show all counters too (JSON always has them)")


def run(args: argparse.Namespace, printer: Printer) -> int:
    from replicator.admin import views
    from replicator.v1 import admin_pb2

    with AdminClient.of(args) as client:
        reply = client.call("Status", admin_pb2.StatusRequest(), admin_pb2.StatusReply, "its status")
    printer.show(views.status(reply), lambda page, view: _draw(page, view, with_counters=args.counters))
    return 0


def _draw(page: Page, view: View, *, with_counters: bool) -> None:
    node = view["node"]
    used = view["sealed_bytes"] + view["reserved_bytes"] + view["free_segment_bytes"]
    page.facts(
        [
            ("node", f"{node['node_id']} (incarnation {node['incarnation']})"),
            ("agent", f"version {view['version']}, up {duration(view['uptime_seconds'])}"),
            ("addresses", f"gRPC {node['grpc_address']}, bulk {view['bulk_address'] or 'not offered'}"),
            ("store", f"{view['root']} on {view['filesystem'] or 'an unknown file system'}{_huge(view)}"),
            ("budget", f"{size(used)} of {size(view['budget_bytes'])} taken"),
            ("sealed", f"{view['sealed_objects']} objects in {size(view['sealed_bytes'])}"),
            ("being written", size(view["reserved_bytes"])),
            ("kept to recycle", size(view["free_segment_bytes"])),
            ("verified", _verified(view["scrub"])),
            ("trainers", f"{view['clients']} attached"),
            ("members by", _membership(view["membership"])),
        ]
    )
    if view["draining"]:
        page.line("It is being drained, or is drained: it takes no copies.", style="yellow")
    _draw_healing(page, view["healing"])
    if view["filesystem"] not in ("", "tmpfs"):
        page.line("Warning: the store is not on a tmpfs; saving is only as fast as that file system.", style="yellow")
    if not view["native_core"]:
        page.line("Warning: the agent runs on the Python fallback, without its native core.", style="yellow")
    if view["quarantined_objects"]:
        page.line(f"Warning: {view['quarantined_objects']} corrupt objects are in quarantine.", style="red")
    for one in view["differing"]:
        others = names(one["node_ids"]) + (f" ({one['nodes']} nodes)" if one["nodes"] > 1 else "")
        page.line(
            f"Warning: {one['setting']} is {one['here']} here and {one['there']} on {others}; give all agents of a job "
            "the same.",
            style="yellow",
        )
    if view["jobs"]:
        page.table(
            ("JOB", "EPOCH>", "MEMBERS>", "REPLICAS>", "BUDDIES", "COMMITTED>", "PROTECTED>"),
            [
                (
                    job["job"],
                    str(job["epoch"]),
                    str(len(job["members"])),
                    str(job["replicas"]),
                    names(job["buddy_node_ids"]),
                    _step(job["newest_committed_step"]),
                    _step(job["newest_protected_step"]),
                )
                for job in view["jobs"]
            ],
        )
    if view["peers"]:
        page.table(
            ("PEER", "ADDRESS", "HEALTH"),
            [(peer["node"]["node_id"], peer["node"]["grpc_address"], health_line(peer)) for peer in view["peers"]],
        )
    for job in view["jobs"]:
        if job["skipped"]:
            last = ", ".join(map(str, job["skipped_steps"]))
            page.line(
                f"{job['job']}: {job['skipped']} saves were skipped, for they came faster than their copies were made; "
                f"the last are of step {last}",
                style="yellow",
            )
    if with_counters:
        page.table(("COUNTER", "VALUE>"), [(name, str(value)) for name, value in view["counters"].items()])


def _verified(scrub: View) -> str:
    if not scrub["bytes_per_second"]:
        return "not in the background: scrub_bytes_per_s is 0"
    finished = scrub["finished_unix_seconds"]
    if finished is None:
        return "not all yet" if scrub["began_unix_seconds"] else "nothing yet"
    return f"all, {duration(max(time.time() - finished, 0.0))} ago"


def _membership(view: View) -> str:
    known = f"{view['source']}: {view['addresses']} addresses"
    if not view["problem"]:
        return known
    seconds = max(0.0, time.time() - view["problem_since_unix_seconds"])
    return f"{known} as known last, for {duration(seconds)}: {view['problem']}"


def _draw_healing(page: Page, view: View) -> None:
    if view["objects_moving"]:
        page.line(f"Copies being made again: {view['objects_moving']} objects, {size(view['bytes_moving'])}.")
    if view["scarce_objects"]:
        page.line(
            f"Fewer copies than wanted, because too few nodes are there for more: {view['scarce_objects']} objects, "
            f"{size(view['scarce_bytes'])}."
        )
    if view["short"]:
        page.table(
            ("SHORT OF COPIES", "OBJECTS>", "SIZE>", "NO NODE FOR>", "LOST>"),
            [
                (
                    version_of(short),
                    str(short["objects"]),
                    size(short["size_bytes"]),
                    str(short["unplaced"]),
                    str(short["lost"]),
                )
                for short in view["short"]
            ],
        )


def _huge(view: View) -> str:
    return f", huge pages {view['huge_pages']}" if view["huge_pages"] else ", no huge pages"


def _step(step: int | None) -> str:
    return "-" if step is None else f"step {step}"

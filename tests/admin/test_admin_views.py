"""The JSON schema is what the manual says, and texts for people are what they should be."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicator.admin import views
from replicator.admin.printers import clean, duration, names, size
from replicator.v1 import admin_pb2, types_pb2

MANUAL = (Path(__file__).parents[2] / "docs" / "admin.md").read_text()
REF = types_pb2.ContainerRef(job="j", step=0, generation=(2 << 20) + 1)
NODE = types_pb2.NodeAddress(identity=types_pb2.NodeIdentity(node_id="n", incarnation=2**64 - 1), grpc_address="h:1")
SILENT = [types_pb2.UnansweredNode(grpc_address="h:2", reason="why")]


def status() -> admin_pb2.StatusReply:
    job = admin_pb2.JobStatus(job="j", members=[NODE], has_committed=True, newest_committed_step=0)
    other = admin_pb2.SettingDifference(setting="keep_last", here="2", there="3", node_ids=["n2"], nodes=1)
    return admin_pb2.StatusReply(node=NODE, uptime_ms=1500, jobs=[job], counters={"b": 1, "a": 2}, differing=[other])


def keys(view: Any) -> Iterator[str]:
    if isinstance(view, dict):
        for key, value in view.items():
            yield key
            if key not in ("counters", "read_from"):
                yield from keys(value)
    elif isinstance(view, list):
        for item in view:
            yield from keys(item)


def samples() -> dict[str, views.View]:
    nodes = admin_pb2.NodesReply(nodes=[admin_pb2.NodeReport(node=NODE, reachable=True, status=status())])
    listing = admin_pb2.ListContainersReply(containers=[admin_pb2.ContainerReport(container=REF)], unanswered=SILENT)
    copy = types_pb2.ObjectDescriptor(object=types_pb2.ObjectRef(container=REF, name="o"), size_bytes=5, crc32c=7)
    inspection = admin_pb2.InspectReply(
        copies=[admin_pb2.ObjectCopy(node=NODE.identity, descriptor=copy)],
        in_manifest=True,
        manifest_of=REF,
        entry=types_pb2.ManifestEntry(name="o", size_bytes=5, crc32c=7, owner_node_id="n"),
        unanswered=SILENT,
    )
    plan = types_pb2.Plan(
        found=True,
        container=REF,
        sources=[types_pb2.ObjectSource(name="o", size_bytes=5, crc32c=7, owner_node_id="n", node_ids=["n"])],
        rejected=[types_pb2.RejectedContainer(container=REF, reason="why")],
        nodes=[NODE],
        unanswered=SILENT,
    )
    return {
        "status": views.status(status()),
        "nodes": views.nodes(nodes),
        "ls": views.containers(listing),
        "inspect": views.inspection(inspection),
        "recover": views.plan(plan),
    }


@pytest.mark.parametrize("command", samples())
def test_every_key_is_in_the_manual(command: str) -> None:
    section = MANUAL[MANUAL.index("## JSON") :]
    documented = set(re.findall(r"`(\w+)`", section))
    assert set(keys(samples()[command])) - documented == set()


def test_numbers_that_json_parsers_would_round_are_text() -> None:
    view = samples()["status"]
    assert view["node"]["incarnation"] == "ffffffffffffffff"
    assert view["uptime_seconds"] == 1.5
    assert list(view["counters"]) == ["a", "b"]


def test_step_zero_is_not_null() -> None:
    """F14."""
    job = samples()["status"]["jobs"][0]
    assert job["newest_committed_step"] == 0
    assert job["newest_protected_step"] is None
    assert samples()["recover"]["chosen"]["step"] == 0


def test_copies_are_compared_with_the_manifest_of_their_own_generation() -> None:
    reply = admin_pb2.InspectReply(
        in_manifest=True,
        manifest_of=REF,
        entry=types_pb2.ManifestEntry(name="o", size_bytes=5, crc32c=7),
    )
    other = types_pb2.ContainerRef(job="j", step=0, generation=REF.generation + 1)
    for ref, crc in ((REF, 7), (REF, 8), (other, 8)):
        held = types_pb2.ObjectDescriptor(object=types_pb2.ObjectRef(container=ref, name="o"), size_bytes=5, crc32c=crc)
        reply.copies.add(descriptor=held)
    assert [copy["matches_manifest"] for copy in views.inspection(reply)["copies"]] == [True, False, None]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 40, "3.0 TiB"),
        (1 << 62, "4096.0 PiB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert size(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59, "59.0 s"), (61, "1 min 1 s"), (7260, "2 h 1 min"), (100_000, "1 d 3 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_names() -> None:
    assert names([]) == "-"
    assert names(["a", "b"]) == "a, b"
    assert names([str(i) for i in range(9)], limit=2) == "0, 1 and 7 more"


@given(st.text())
def test_clean_text_is_one_harmless_line(text: str) -> None:
    cleaned = clean(text)
    assert cleaned.isprintable()
    assert len(cleaned) <= len(text)

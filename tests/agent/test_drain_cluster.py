"""Nodes that are emptied before they are stopped: what is moved, what is refused, what stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, call, cluster, stream
from healing import holders, lose, protect

from replicator.decide.types import Manifest, ManifestEntry
from replicator.errors import NotFoundError
from replicator.v1 import admin_pb2, peer_pb2
from replicator.wire import Sender, info_to_pb, node_address_to_pb, sender_to_pb

HEAL_MIB_PER_S = 16


@pytest.fixture(scope="module")
def shared_four() -> Iterator[Cluster]:
    """Four nodes that several tests share."""
    path = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    try:
        with cluster(path, 4, "--deadline-s", "10", "--heal-limit-bytes-per-s", f"{HEAL_MIB_PER_S}Mi") as made:
            yield made
    finally:
        shutil.rmtree(path, ignore_errors=True)


def drain(made: Cluster, asked: int, node_id: str) -> list[admin_pb2.DrainEvent]:
    with grpc.insecure_channel(made.nodes[asked].address.grpc_address) as channel:
        request = admin_pb2.DrainRequest(node_id=node_id)
        return list(stream(channel, "AdminService/Drain", request, admin_pb2.DrainEvent))


def undrain(made: Cluster, index: int) -> admin_pb2.DrainEvent:
    with grpc.insecure_channel(made.nodes[index].address.grpc_address) as channel:
        return call(channel, "AdminService/Undrain", admin_pb2.UndrainRequest(), admin_pb2.DrainEvent)


def test_a_drained_node_can_be_lost_and_takes_no_copies_until_it_is_undrained(shared_four: Cluster) -> None:
    """Through any agent. Its copies are made elsewhere, at the limited rate; owners choose another buddy meanwhile."""
    four = shared_four.new_job()
    first = protect(four, 1, b"x" * (4 * MIB))
    before = holders(four, first, [0, 1, 2, 3])
    assert four.nodes[0].agent is not None
    # An owner that does not know yet looks for another buddy itself, and n1 has less to do.
    wait_until(lambda: all(first.version in node.protected() for node in four.nodes), "all know that it is protected")
    events = drain(four, 0, "n1")
    last = events[-1]
    assert (last.node_id, last.done, last.objects_moved, last.objects_left) == ("n1", True, 2, 0), last
    assert last.bytes_moved >= 8 * MIB
    assert [event.done for event in events[:-1]] == [False] * (len(events) - 1)
    for nodes in holders(four, first, [0, 2, 3]).values():
        assert len(nodes) >= 2
    assert four.nodes[1].counter("objects_healed") == 2, "it moved them itself"
    assert four.nodes[1].status().healing.draining
    # Offered all the same, it says why not; and a new save avoids it.
    name = next(name for name, nodes in before.items() if "n2" in nodes and "n1" not in nodes)
    info = four.nodes[2].held(first.version.object(name))
    assert info is not None
    request = peer_pb2.OfferRequest(
        sender=sender_to_pb(Sender(four.nodes[2].address.identity, four.ranks[0].job, 1)),
        objects=[info_to_pb(info)],
        source=node_address_to_pb(four.nodes[2].address),
        deadline_ms=1000,
    )
    (event,) = four.nodes[1].offer(request)
    assert event.failed.error_kind == "NodeDrainingError"
    later = protect(four, 2)
    assert [name for name, nodes in holders(four, later, [1]).items() if nodes] == ["shard-1"]
    # What it writes itself has its copies on nodes that stay.
    wait_until(lambda: len(holders(four, later, [0, 2, 3])["shard-1"]) == 2, "two others have it")
    assert not undrain(four, 1).draining
    four.nodes[0].agent.wait_log("a peer takes copies again")
    third = protect(four, 3)
    again = holders(four, third, [0, 1, 2, 3])
    assert all(nodes <= again[name] for name, nodes in before.items())


def test_lost_copies_are_made_no_faster_than_the_limit(shared_four: Cluster) -> None:
    """Of many objects at once, large ones over the bulk lane and small ones in packs over gRPC."""
    four = shared_four.new_job()
    writer, node = four.ranks[1], four.nodes[1]
    version = writer.begin(1)
    infos = [writer.write(version.object(f"large-{i:02}"), os.urandom(MIB)) for i in range(24)]
    infos += [writer.write(version.object(f"small-{i:03}"), os.urandom(64 << 10)) for i in range(128)]
    entries = tuple(ManifestEntry(one.object.name, one.size, one.crc32c, "n1") for one in infos)
    writer.replicate([one.object for one in infos], deadline_s=10.0)
    writer.commit(Manifest(version, 1, "n1", 1, 1, 1, entries))
    writer.protected(version)
    healed = node.counter("bytes_healed")
    began = time.monotonic()
    last = drain(four, 0, "n1")[-1]
    took_s = time.monotonic() - began
    assert (last.done, last.objects_left) == (True, 0), last
    moved = node.counter("bytes_healed") - healed
    assert moved >= 32 * MIB, "the node that is drained sent all of it"
    # What the burst of a bucket allows, and that began before the clock did.
    assert moved / took_s < 1.5 * HEAL_MIB_PER_S * MIB
    assert not undrain(four, 1).draining


def test_a_node_that_nobody_knows_is_not_drained(shared_four: Cluster) -> None:
    with pytest.raises(NotFoundError, match="no node n9"):
        drain(shared_four, 0, "n9")


def admin(made: Cluster, asked: int, *words: str) -> tuple[int, dict[str, Any]]:
    """Exit status and JSON of `replicator-admin`."""
    command = [sys.executable, "-m", "replicator.admin", *words, "--json"]
    address = made.nodes[asked].address.grpc_address
    done = subprocess.run([*command, "--agent", address], capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, json.loads(done.stdout)


def test_the_command_drains_and_undrains(shared_four: Cluster) -> None:
    four = shared_four.new_job()
    protect(four, 1)
    status, view = admin(four, 0, "drain", "n2")
    assert (status, view["node_id"], view["done"], view["objects_exposed"]) == (0, "n2", True, 0)
    assert view["objects_moved"] >= 2
    assert admin(four, 2, "status")[1]["draining"]
    status, view = admin(four, 1, "undrain", "n2")
    assert (status, view["draining"]) == (0, False)
    assert admin(four, 0, "drain", "n9")[0] == NotFoundError.exit_code
    assert admin(four, 0, "drain", "n9/../x")[0] == 2


def test_a_node_whose_objects_nobody_can_take_must_not_be_stopped(shm_root: Path) -> None:
    """Exit status 7. The last node that stays is drained, too."""
    with cluster(shm_root, 2, "--deadline-s", "6") as made:
        made.join()
        protect(made, 1)
        status, view = admin(made, 0, "drain", "n1")
        # It can be stopped, and what stays behind on n0 alone is said: the table shows the reason as a warning.
        assert (status, view["objects_left"], view["objects_exposed"]) == (0, 2, 0), view
        assert view["reason"] == (
            "2 objects have fewer copies than wanted on nodes that stay: too few nodes stay for 2 of them; "
            "each has one at least"
        )
        status, view = admin(made, 0, "drain")
        assert (status, view["node_id"], view["objects_exposed"]) == (7, "n0", 2), view
        assert "n1 is being drained" in view["reason"]


def test_a_restart_ends_a_drain(shared_four: Cluster) -> None:
    four = shared_four.new_job()
    protect(four, 1)
    drain(four, 3, "n3")
    assert four.nodes[3].status().healing.draining
    four.nodes[3].kill()
    four.nodes[3].start("--port", str(four.nodes[3].port))
    assert not four.nodes[3].status().healing.draining
    four.ranks[3].attach()
    for rank in four.ranks:
        rank.job = f"{rank.job}-2"
    four.join()
    manifest = protect(four, 1)
    assert len([name for name, nodes in holders(four, manifest, [3]).items() if nodes]) == 2


@pytest.fixture
def graceful(shm_root: Path) -> Iterator[Cluster]:
    with cluster(shm_root, 4, "--deadline-s", "10", "--drain-grace-s", "15") as made:
        made.join()
        yield made


def test_sigterm_with_a_grace_period_moves_everything_first(graceful: Cluster) -> None:
    """Two nodes one after the other, with their memory: nothing is lost, and lookup gives the newest step."""
    manifests = [protect(graceful, step, b"x" * 300_000) for step in (1, 2)]
    for index in (1, 0):
        node = graceful.nodes[index]
        assert node.agent is not None
        node.agent.signal(signal.SIGTERM)
        record = node.agent.wait_log("drained before the end")
        assert record["objects_left"] == 0, record
        assert node.agent.wait() == 0
        lose(node)
    for manifest in manifests:
        assert {len(nodes) for nodes in holders(graceful, manifest, [2, 3]).values()} == {2}, (
            manifest.version,
            holders(graceful, manifest, [2, 3]),
        )
    assert graceful.ranks[2].lookup().container.step == 2


def test_a_second_signal_ends_the_grace_period(shm_root: Path) -> None:
    """The other node is mute, so the drain would take its time."""
    with cluster(shm_root, 2, "--deadline-s", "20", "--drain-grace-s", "60") as made:
        made.join()
        protect(made, 1)
        first, other = (node.agent for node in made.nodes)
        assert first is not None
        assert other is not None
        other.signal(signal.SIGSTOP)
        first.signal(signal.SIGTERM)
        first.wait_log("this node is being drained")
        first.signal(signal.SIGTERM)
        assert first.wait() == 0
        other.signal(signal.SIGCONT)

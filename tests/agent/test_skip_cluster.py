"""Saves that come faster than their copies are made, in real agents that serve slowly."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agent_harness import wait_until
from cluster import MIB, Cluster, cluster

from replicator.decide.types import Manifest
from replicator.errors import CommitError, InvalidIdError, NotFoundError, ReplicatorError, SaveSkippedError
from replicator.v1 import peer_pb2
from replicator.wire import Sender, sender_to_pb, version_to_pb

SLOWLY = ("--serve-limit-bytes-per-s", "2Mi")


def _commit(made: Cluster, step: int, size: int = 2 * MIB) -> Manifest:
    """n0 saves it; it is committed, and its copies are on their way."""
    manifest = made.save(step, os.urandom(size), ranks=made.ranks[:1])
    made.ranks[0].commit(manifest)
    assert made.ranks[0].committed(manifest.version).ok
    return manifest


def test_what_is_between_is_skipped_everywhere(shm_root: Path) -> None:
    """F49: the one whose copies are made and the newest stay, and get theirs; the others leave nothing."""
    with cluster(shm_root, 2, *SLOWLY) as made:
        made.join()
        rank = made.ranks[0]
        saved = [_commit(made, step).version for step in range(1, 6)]
        for skipped in saved[1:4]:
            for event in (rank.committed(skipped), rank.outcome(skipped.object("shard-0"))):
                assert (event.ok, event.error_kind) == (False, "SaveSkippedError")
                assert f"Step {skipped.container.step} (epoch 1" in event.error_message
                assert f"superseded by step {skipped.container.step + 1} (epoch 1" in event.error_message
        plan = rank.lookup()
        assert plan.container == version_to_pb(saved[4])
        assert rank.protected(saved[0]).is_protected
        assert rank.protected(saved[4]).is_protected
        for node in made.nodes:
            wait_until(lambda node=node: node.versions() == {saved[0], saved[4]}, f"{node.node_id} has two")
            status = node.status()
            assert status.sealed_objects == 2
            assert status.counters["containers_skipped"] == 3
            (job,) = status.jobs
            assert (job.skipped, list(job.skipped_steps)) == (3, [2, 3, 4])
            assert job.newest_protected_step == 5


def test_one_that_gets_no_further_does_not_have_all_others_skipped(shm_root: Path) -> None:
    """The owner's only copy turned bad before it was copied, so step 1 will never be protected; later steps are."""
    with cluster(shm_root, 2, *SLOWLY, "--deadline-s", "0.5") as made:
        made.join()
        rank = made.ranks[0]
        stuck = made.save(1, os.urandom(4 * MIB), ranks=made.ranks[:1])
        with made.nodes[0].paths.object(stuck.version.object("shard-0")).open("r+b") as file:
            file.seek(4 * MIB - 5)
            file.write(b"not that")
        rank.commit(stuck)
        rank.wait(lambda event: event.commit.error_kind == "ReplicationError", "step 1 gets no further")
        saved = [_commit(made, step).version for step in range(2, 6)]
        assert rank.protected(saved[0]).is_protected
        assert rank.protected(saved[3]).is_protected
        assert [rank.committed(one).error_kind for one in saved[1:3]] == ["SaveSkippedError"] * 2


def test_a_skipped_one_does_not_come_back(shm_root: Path) -> None:
    """F48: its coordinator's trainer asks again, and its manifest arrives late."""
    with cluster(shm_root, 2, *SLOWLY) as made:
        made.join()
        manifests = [_commit(made, step) for step in (1, 2, 3)]
        skipped = manifests[1].version
        assert not made.ranks[0].committed(skipped).ok
        wait_until(lambda: made.nodes[1].counter("containers_skipped") == 1, "n1 was told")
        with pytest.raises(SaveSkippedError, match="superseded by step 3"):
            made.ranks[0].commit(manifests[1])
        for node in made.nodes:
            wait_until(lambda node=node: skipped not in node.versions(), f"{node.node_id} dropped it")


def test_what_a_restart_found_stays_until_something_newer_is_protected(shm_root: Path) -> None:
    """Never broken, 4: n0 may be loading it."""
    with cluster(shm_root, 2, *SLOWLY) as made:
        made.join()
        rank = made.ranks[0]
        _commit(made, 1)
        found = _commit(made, 2).version
        assert rank.lookup().container == version_to_pb(found)
        newest = _commit(made, 3).version
        assert rank.committed(found).error_kind == "SaveSkippedError"
        wait_until(lambda: found not in made.nodes[1].versions(), "n1 dropped its manifest")
        assert made.nodes[0].held(found.object("shard-0")) is not None
        rank.protected(newest)
        wait_until(lambda: found not in made.nodes[0].versions(), "n0 dropped it")


def test_only_the_coordinator_skips_and_only_what_it_superseded(three: Cluster) -> None:
    """Never broken, 4: whoever asks, nothing is given up for a container that is not committed here."""
    old, new = (three.save(step, replicate=False) for step in (1, 2))
    for manifest in (old, new):
        three.ranks[0].commit(manifest)
        assert three.ranks[0].committed(manifest.version).ok
    held = three.ranks[0].begin(3)
    wait_until(lambda: {old.version, new.version} <= three.nodes[2].committed(), "n2 has both manifests")

    def skip(sender: int, *versions: object, by: object, epoch: int = 1) -> None:
        node = three.nodes[sender].address.identity
        request = peer_pb2.SkipRequest(
            sender=sender_to_pb(Sender(node, three.ranks[0].job, epoch)),
            containers=[version_to_pb(one) for one in versions],  # type: ignore[arg-type]
            superseded_by=version_to_pb(by),  # type: ignore[arg-type]
        )
        three.nodes[2].ask("Skip", request, peer_pb2.SkipReply)

    refused: list[tuple[type[ReplicatorError], dict[str, object]]] = [
        (CommitError, {"sender": 1, "by": new.version}),
        (NotFoundError, {"sender": 0, "by": held}),
        (InvalidIdError, {"sender": 0, "by": old.version}),
    ]
    for error, arguments in refused:
        with pytest.raises(error):
            skip(arguments.pop("sender"), old.version, **arguments)  # type: ignore[arg-type]
        assert old.version in three.nodes[2].committed()
    wait_until(lambda: old.version in three.nodes[2].protected(), "its copies were made meanwhile")
    skip(0, old.version, by=new.version)
    assert old.version in three.nodes[2].committed()

"""A real agent that serves no faster than it was told, on either lane."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import MIB, cluster


@pytest.mark.parametrize("lane", ["bulk", "grpc"])
def test_an_owner_with_a_limit_takes_its_time(shm_root: Path, lane: str) -> None:
    """16 MiB at 8 MiB/s; what lies in buffers of sockets needs no time."""
    with cluster(shm_root, 2, "--lane", lane, "--serve-limit-bytes-per-s", "8Mi", "--deadline-s", "30") as two:
        two.join()
        owner, buddy = two.ranks
        one = owner.begin(1).object("shard")
        info = owner.write(one, bytes(range(256)) * (16 * MIB >> 8))
        began = time.monotonic()
        owner.replicate([one], deadline_s=30.0)
        outcome = owner.outcome(one)
        assert time.monotonic() - began > 0.5
        assert outcome.ok, outcome
        held = buddy.node.held(one)
        assert held is not None
        assert held.crc32c == info.crc32c

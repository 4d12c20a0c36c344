"""Peers and lanes for the tests of transfer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import uvloop
from transfer_support import Peer, PeerProcess, open_lanes

from replicator.transfer.lane import Lane


def pytest_configure(config: pytest.Config) -> None:
    # What replaces it is not there in every version that the project allows, and would be for all directories.
    config.addinivalue_line("filterwarnings", 'ignore:Overriding the "event_loop_policy" fixture')


@pytest.fixture(scope="session")
def event_loop_policy() -> uvloop.EventLoopPolicy:
    """The event loop that agents run."""
    return uvloop.EventLoopPolicy()


@pytest.fixture
async def lanes() -> AsyncIterator[dict[str, Lane]]:
    async with open_lanes() as opened:
        yield opened


@pytest.fixture
async def make_peer(shm_root: Path) -> AsyncIterator[Callable[[str], Awaitable[Peer]]]:
    """Starts nodes in this process, and stops them after the test."""
    peers: list[Peer] = []

    async def make(node_id: str) -> Peer:
        peer = Peer(node_id, shm_root / node_id)
        peers.append(peer)
        await peer.start()
        return peer

    yield make
    for peer in peers:
        await peer.stop()


@pytest.fixture
async def peer(make_peer: Callable[[str], Awaitable[Peer]]) -> Peer:
    return await make_peer("node-a")


@pytest.fixture
async def make_process(shm_root: Path) -> AsyncIterator[Callable[[str], PeerProcess]]:
    """Makes nodes in processes of their own, not yet started; kills them after the test."""
    processes: list[PeerProcess] = []

    def make(node_id: str) -> PeerProcess:
        process = PeerProcess(node_id, shm_root / node_id)
        processes.append(process)
        return process

    yield make
    for process in processes:
        await process.kill()

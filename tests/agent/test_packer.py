"""Packs of small objects when something breaks in between: nobody waits for ever, nothing is left running."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_harness import wait_until
from cluster import cluster

from replicator.agent import packed
from replicator.agent.counters import Counters
from replicator.agent.packed import Errand, Packer, Wanted
from replicator.agent.takings import Taken, Takings
from replicator.errors import TransferError, UnsupportedError
from replicator.ids import CheckpointContainerId, ContainerVersion, NodeAddress, NodeIdentity, make_generation
from replicator.store.trailer import ObjectInfo
from replicator.transfer.turns import Patience, PullPolicy
from replicator.wire import Sender

NODE = NodeAddress(NodeIdentity("n1", 1), "127.0.0.1:1")
VERSION = ContainerVersion(CheckpointContainerId("job", 1), make_generation(1, 1))


def test_a_buddy_that_could_not_begin_takes_the_object_when_it_can_again(shm_root: Path) -> None:
    """Its store did not let it be a client, as when no file could be made."""
    with cluster(shm_root, 2) as made:
        made.join()
        clients = made.nodes[1].root / "clients"
        away = made.nodes[1].root / "clients.away"
        one = made.ranks[0].begin(1).object("small")
        made.ranks[0].write(one, b"small")
        clients.rename(away)
        made.ranks[0].replicate([one])
        wait_until(lambda: made.nodes[0].counter("replica_attempts_failed") > 0, "n1 refused it")
        away.rename(clients)
        wait_until(lambda: made.nodes[1].held(one) is not None, "n1 has it")


def test_what_is_brought_alone_has_ended_when_the_packer_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes into memory, which the next agent may use."""

    async def unsupported(*_: Any) -> AsyncIterator[Any]:
        raise UnsupportedError("an older version")
        yield

    monkeypatch.setattr(packed, "read_packed", unsupported)
    steps: list[str] = []

    async def main() -> None:
        began = asyncio.Event()

        async def channel(node: NodeAddress) -> None:
            return None

        async def ordinary(one: Wanted) -> Taken:
            steps.append("began")
            began.set()
            try:
                await asyncio.sleep(60)
            finally:
                # A thread that fills memory is waited for, whatever is cancelled.
                await asyncio.sleep(0.2)
                steps.append("ended")
            return Taken(one.info)

        packer = Packer(
            SimpleNamespace(lane="auto"),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            SimpleNamespace(channel=channel, sender_of=lambda job: Sender(NODE.identity, job, 1)),  # type: ignore[arg-type]
            SimpleNamespace(),  # type: ignore[arg-type]
            SimpleNamespace(hold=lambda: None),  # type: ignore[arg-type]
            Counters(),
        )
        info = ObjectInfo(VERSION.object("small"), 5, 1, 1 << 22, (1,), "n1", "agent-0")
        wanted = Wanted(Takings("n0", Counters()).expect(info.object, info.size, info.crc32c), info, ("n1",))
        errand = Errand(
            version=VERSION,
            patience=Patience(PullPolicy(5.0)),
            resolve=lambda node_id: NODE,
            slots=asyncio.Semaphore(1),
            require_wanted=lambda: None,
            ordinary=ordinary,
            failure=lambda one, reasons: TransferError("nobody has it"),
        )
        packer.bring(errand, [wanted])
        await asyncio.wait_for(began.wait(), 10)
        await packer.close()
        assert steps == ["began", "ended"]
        assert wanted.taking.task.cancelled()

    asyncio.run(main())

"""Members by etcd: leases, watches, and all that may happen to etcd. The server is a real one."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aetcd
import pytest
from agent_harness import wait_until
from cluster import cluster
from etcd_server import EtcdServer, etcd

from replicator.agent.membership.etcd import EtcdSource, decode_record, encode_record
from replicator.agent.membership.etcd_session import EtcdSession
from replicator.config import AgentConfig
from replicator.errors import ConfigError, InvalidIdError
from replicator.ids import NodeAddress, NodeIdentity

DEADLINE_S = 1.5
KEY = b"/replicator/nodes/"


@pytest.fixture
def server(shm_root: Path) -> Iterator[EtcdServer]:
    with etcd(shm_root / "etcd") as made:
        yield made


def address(number: int, incarnation: int = 1) -> NodeAddress:
    return NodeAddress(NodeIdentity(f"n{number}", incarnation), f"10.0.0.{number}:7070")


class Members:
    """Sources of several agents in this process."""

    def __init__(self, server: EtcdServer) -> None:
        self.server = server
        self.client = aetcd.Client("127.0.0.1", server.port, timeout=10)
        self._running: dict[EtcdSource, asyncio.Task[None]] = {}

    def start(self, me: NodeAddress, *endpoints: str) -> EtcdSource:
        endpoints = endpoints or (self.server.endpoint,)
        config = AgentConfig(node_id=me.node_id, membership="etcd", etcd_endpoints=endpoints, deadline_s=DEADLINE_S)
        source = EtcdSource(config, me)
        self._running[source] = asyncio.create_task(source.run())
        return source

    async def stop(self, source: EtcdSource) -> None:
        running = self._running.pop(source)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(source) for source in list(self._running)))
        await self.client.close()


@pytest.fixture
async def members(server: EtcdServer) -> AsyncIterator[Members]:
    made = Members(server)
    yield made
    await made.close()


async def until(condition: Callable[[], Any], what: str, limit_s: float = 15.0) -> float:
    """Wait until it is so; returns the seconds it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < limit_s, what
        await asyncio.sleep(0.02)
    return time.monotonic() - began


def sees(source: EtcdSource, *numbers: int) -> Callable[[], bool]:
    return lambda: source.addresses == tuple(address(number).grpc_address for number in numbers)


async def test_agents_find_each_other_and_one_that_ends_is_gone_at_once(members: Members) -> None:
    changes = 0

    def changed() -> None:
        nonlocal changes
        changes += 1

    first = members.start(address(1))
    first.on_change.append(changed)
    second, third = members.start(address(2)), members.start(address(3))
    await until(sees(first, 2, 3), "n1 sees the others")
    await until(sees(second, 1, 3), "n2 sees the others")
    assert 1 <= changes <= 2
    assert (first.status.kind, first.status.addresses, first.status.problem) == ("etcd", 2, "")
    await members.stop(third)
    assert await until(sees(first, 2), "n3 has left") < 1.5, "its lease was given back"


async def test_an_agent_that_falls_silent_is_gone_when_its_lease_ends(members: Members) -> None:
    """F19: nobody has to say goodbye."""
    first = members.start(address(1))
    lease = await members.client.lease(2)
    await members.client.put(KEY + b"n9", encode_record(address(9)), lease)
    await until(sees(first, 9), "n1 sees n9")
    await until(sees(first), "the record of n9 ends with its lease")


async def test_an_agent_on_another_address_is_found_by_its_id(members: Members) -> None:
    """F34, F19: the key is the node, the record says which incarnation is where."""
    first = members.start(address(1))
    await members.client.put(KEY + b"n2", encode_record(address(2)))
    await until(sees(first, 2), "n1 sees n2")
    moved = NodeAddress(NodeIdentity("n2", 2), "10.9.9.9:1")
    await members.client.put(KEY + b"n2", encode_record(moved))
    await until(lambda: first.addresses == ("10.9.9.9:1",), "n1 sees n2 where it is now")


async def test_while_etcd_is_away_members_stay_and_the_status_says_why(members: Members) -> None:
    first, second = members.start(address(1)), members.start(address(2))
    await until(sees(first, 2), "n1 sees n2")
    await until(sees(second, 1), "n2 sees n1")
    members.server.kill()
    began = time.time()
    await until(lambda: first.status.problem, "n1 notices that etcd is away")
    assert members.server.endpoint in first.status.problem
    assert began - 5 < first.status.problem_since_unix_s <= time.time()
    since = first.status.problem_since_unix_s
    await until(lambda: second.status.problem, "n2 notices that etcd is away")
    assert sees(first, 2)()
    await asyncio.to_thread(members.server.start)
    await until(lambda: not first.status.problem, "n1 has etcd again")
    assert first.status.problem_since_unix_s == 0.0 < since
    third = members.start(address(3))
    await until(sees(first, 2, 3), "n1 sees who came later")
    await until(sees(third, 1, 2), "those from before entered themselves again")


async def test_an_etcd_that_lost_everything_is_filled_again(members: Members) -> None:
    """Its revisions begin anew, below those that were seen."""
    first, second = members.start(address(1)), members.start(address(2))
    await until(sees(first, 2), "n1 sees n2")
    members.server.kill(forget=True)
    await asyncio.to_thread(members.server.start)
    third = members.start(address(3))
    await until(sees(third, 1, 2), "all have entered themselves again")
    await until(sees(second, 1, 3), "and all see who came later")


async def test_a_mute_etcd_is_noticed_within_the_deadlines(members: Members) -> None:
    """F15: it accepts, and never answers; the watch alone would wait for ever."""
    first = members.start(address(1))
    second = members.start(address(2))
    await until(sees(first, 2), "n1 sees n2")
    assert members.server.process is not None
    members.server.process.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: first.status.problem, "n1 notices", 2 / 3 + DEADLINE_S / 6 + 2)
        assert "waited" in first.status.problem
        assert sees(first, 2)()
    finally:
        members.server.process.send_signal(signal.SIGCONT)
    await until(lambda: not first.status.problem, "n1 has etcd again")
    await until(sees(second, 1), "n1 is seen again")


async def test_a_watch_that_begins_before_a_compaction_is_begun_anew(
    members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = EtcdSession.read
    missed = NodeAddress(NodeIdentity("n5", 1), "10.0.0.5:7070")
    reads = 0

    async def read(session: EtcdSession, prefix: str, limit: int) -> Any:
        nonlocal reads
        found = await real(session, prefix, limit)
        reads += 1
        if reads == 1:
            await members.client.put(KEY + b"n5", encode_record(missed))
            await members.client.put(b"/else", b"1")
            last = await members.client.get(b"/else")
            await members.client.compact(last.mod_revision, physical=True)
        return found

    monkeypatch.setattr(EtcdSession, "read", read)
    first = members.start(address(1))
    await until(sees(first, 5), "the change before the compaction is not missed")
    await until(lambda: reads == 2 and not first.status.problem, "read once more, and watched since")
    await members.client.delete(KEY + b"n5")
    await until(sees(first), "the watch goes on")


async def test_a_removed_record_is_made_again_and_a_rival_is_told_of(members: Members) -> None:
    """Two agents with one name do not fight for the record; both can be told apart in the status."""
    first = members.start(address(1))
    second = members.start(address(2))
    await until(sees(second, 1), "n2 sees n1")
    await members.client.delete(KEY + b"n1")
    await until(sees(second), "n1 is gone")
    await until(sees(second, 1), "n1 entered itself again")
    rival = NodeAddress(NodeIdentity("n1", 99), "10.9.9.9:1")
    await members.client.put(KEY + b"n1", encode_record(rival))
    await until(lambda: "another agent calls itself n1" in first.status.problem, "n1 hears of its rival")
    assert "10.9.9.9:1" in first.status.problem
    await members.client.delete(KEY + b"n1")
    await until(lambda: not first.status.problem, "the rival is gone")
    await until(sees(second, 1), "n1 is there again")


async def test_the_next_endpoint_is_tried_when_one_is_away(members: Members) -> None:
    first = members.start(address(1))
    second = members.start(address(2), "127.0.0.1:1", members.server.endpoint)
    await until(sees(second, 1), "n2 finds the endpoint that answers")
    await until(sees(first, 2), "n1 sees n2")


@pytest.mark.parametrize(
    "record",
    [b"", b"\xff", b"[]", b"5", b'{"node_id": "n2"}', b"[" * 100_000]
    + [
        json.dumps({"node_id": "n2", "incarnation": "01", "grpc_address": "10.0.0.2:1", **change}).encode()
        for change in ({"node_id": "../x"}, {"incarnation": 7}, {"incarnation": "zz"}, {"grpc_address": "nowhere"})
    ],
    ids=lambda value: value[:40].decode(errors="replace"),
)
def test_a_record_that_is_none_is_refused(record: bytes) -> None:
    """What comes from elsewhere is validated before anything acts on it."""
    with pytest.raises(InvalidIdError):
        decode_record(record)


async def test_records_that_are_none_or_of_somebody_else_are_passed_over(members: Members) -> None:
    await members.client.put(KEY + b"n7", b"garbage")
    await members.client.put(KEY + b"n8", encode_record(address(3)))
    await members.client.put(KEY + b"n2", encode_record(address(2)))
    first = members.start(address(1))
    await until(sees(first, 2), "n1 sees the only sound record")


def test_records_come_back_as_they_were() -> None:
    """A newer agent may write more than this one knows."""
    node = NodeAddress(NodeIdentity("rack-1.n7", 2**64 - 1), "[fd00::1]:7070")
    assert decode_record(encode_record(node)) == node
    assert decode_record(json.dumps({**json.loads(encode_record(node)), "labels": {"rack": "r1"}}).encode()) == node


def test_a_file_for_tls_that_cannot_be_read_is_an_error_at_the_start(tmp_path: Path) -> None:
    config = AgentConfig(
        node_id="n1", membership="etcd", etcd_endpoints=("127.0.0.1:1",), etcd_ca=str(tmp_path / "none.pem")
    )
    with pytest.raises(ConfigError, match="etcd_ca: cannot read"):
        EtcdSource(config, address(1))


def test_agents_whose_only_word_of_each_other_is_etcd(shm_root: Path, server: EtcdServer) -> None:
    """F34, F19, F45: one is killed and comes back elsewhere, and the other finds it by its id."""
    flags = ("--membership", "etcd", "--etcd-endpoints", server.endpoint, "--deadline-s", "2")
    with cluster(shm_root, 2, *flags) as made:
        n0, n1 = made.nodes

        def believed() -> tuple[str, int, str]:
            peers = [(one.state, one.node.identity.incarnation, one.node.grpc_address) for one in n0.status().peers]
            return peers[0] if peers else ("", 0, "")

        def now() -> tuple[str, int, str]:
            return "alive", n1.address.identity.incarnation, n1.address.grpc_address

        wait_until(lambda: believed() == now(), "n0 has met n1")
        made.join(ranks=made.ranks)
        n1.kill()
        wait_until(lambda: believed()[0] != "alive", "n0 misses n1")
        n1.start_elsewhere()
        wait_until(lambda: believed() == now(), "n0 has met n1 where it is now")
        (job,) = n0.status().jobs
        assert n1.address.grpc_address in {member.grpc_address for member in job.members}
        assert n0.status().membership.kind == "etcd"
        assert n0.status().membership.problem == ""
        server.kill()
        wait_until(lambda: n0.status().membership.problem != "", "n0 says that etcd is away")
        assert believed() == now()

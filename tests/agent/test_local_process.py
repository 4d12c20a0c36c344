"""Trainers and their agent over the real socket: what is reserved, sealed and given up when somebody is killed."""

from __future__ import annotations

import contextlib
import itertools
import random
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from agent_harness import AgentProcess, TrainerProcess, running_agent, trainer, wait_until

from replicator.ids import CheckpointContainerId, ContainerVersion, ObjectVersion, make_generation
from replicator.native import block_crcs, combine_blocks
from replicator.store.paths import open_root
from replicator.store.reader import open_object
from replicator.store.trailer import BLOCK_SIZE, ObjectInfo, capacity_for, write_trailer
from replicator.v1 import admin_pb2, admin_pb2_grpc, local_pb2

MIB = 1 << 20


@pytest.fixture
def agent(shm_root: Path) -> Iterator[AgentProcess]:
    with running_agent(shm_root, "--node-id", "n1", "--budget-bytes", "256Mi") as process:
        yield process


@pytest.fixture(scope="module")
def shared() -> Iterator[AgentProcess]:
    """An agent for the tests that leave it alone; each uses objects of its own (`one_object`)."""
    root = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    try:
        with running_agent(root, "--node-id", "n1", "--budget-bytes", "256Mi") as process:
            yield process
    finally:
        shutil.rmtree(root, ignore_errors=True)


def usage(agent: AgentProcess) -> admin_pb2.StatusReply:
    with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
        return admin_pb2_grpc.AdminServiceStub(channel).Status(admin_pb2.StatusRequest(), timeout=10)


_steps = itertools.count()


def one_object() -> ObjectVersion:
    """Another one at each call."""
    return ContainerVersion(CheckpointContainerId("job", next(_steps)), make_generation(1, 1)).object("shard")


def write(
    root: Path, segment: str, client_id: str, one: ObjectVersion, data: bytes, owner: str = "n1"
) -> dict[str, Any]:
    """Fill a reserved segment as a trainer does; the Seal request for it."""
    crcs = tuple(block_crcs(data))
    info = ObjectInfo(one, len(data), combine_blocks(crcs, len(data)), BLOCK_SIZE, crcs, owner, client_id)
    path = root / "segments" / segment
    content = bytearray(path.stat().st_size)
    content[: len(data)] = data
    write_trailer(memoryview(content), info)
    path.write_bytes(content)
    ref = {
        "container": {
            "job": one.version.container.job,
            "step": one.version.container.step,
            "generation": one.version.generation,
        },
        "name": one.name,
    }
    descriptor = {
        "object": ref,
        "size_bytes": len(data),
        "crc32c": info.crc32c,
        "block_size_bytes": BLOCK_SIZE,
        "block_crc32c": list(crcs),
        "owner_node_id": owner,
    }
    return {"client_id": client_id, "segment": segment, "descriptor": descriptor}


def test_killed_trainer_leaves_nothing_reserved_and_keeps_what_it_sealed(agent: AgentProcess) -> None:
    """F24"""
    with trainer(agent.root) as one:
        one.attach(agent)
        sealed, open_ = one.reserve(2 * MIB), one.reserve(3 * MIB)
        data = bytes(range(256)) * 1000
        target = one_object()
        request = write(agent.root, sealed["segment"], one.client_id, target, data)
        one.do("call", method="Seal", request=request)
        assert usage(agent).reserved_bytes == int(open_["capacity_bytes"])
        one.kill()
        wait_until(lambda: usage(agent).reserved_bytes == 0, "the reservation is given up")
        found = usage(agent)
        assert (found.sealed_objects, found.clients) == (1, 0)
        assert found.free_segment_bytes == int(open_["capacity_bytes"])
    with open_object(open_root(agent.root, create=False), target) as reader:
        reader.verify()
        assert bytes(reader.view) == data


def test_forked_child_that_keeps_the_socket_open_does_not_keep_the_reservation(agent: AgentProcess) -> None:
    """F32: a data loader worker outlives its trainer, with all descriptors of it."""
    with trainer(agent.root) as one:
        one.attach(agent)
        one.reserve()
        one.do("fork")
        one.kill()
        wait_until(lambda: usage(agent).reserved_bytes == 0, "the reservation is given up")
        assert usage(agent).clients == 0


def test_disconnected_trainer_keeps_its_reservation(agent: AgentProcess) -> None:
    """F17: a lost connection is not a lost process."""
    with trainer(agent.root) as one:
        one.attach(agent)
        reserved = one.reserve()
        one.do("detach")
        agent.wait_log("trainer detached")
        one.do("attach", socket=agent.socket)
        assert usage(agent).reserved_bytes == int(reserved["capacity_bytes"])
        request = write(agent.root, reserved["segment"], one.client_id, one_object(), b"x" * 5)
        one.do("call", method="Seal", request=request)


def test_trainer_outlives_its_agent_and_then_dies(shm_root: Path) -> None:
    """What was reserved from a killed agent is sealed with the next one, and given up by it when the trainer dies."""
    with trainer(shm_root) as one:
        with running_agent(shm_root, "--node-id", "n1") as agent:
            one.attach(agent)
            first, second = one.reserve(), one.reserve(2 * MIB)
            agent.kill()
        with running_agent(shm_root, "--node-id", "n1") as agent:
            assert usage(agent).reserved_bytes == int(first["capacity_bytes"]) + int(second["capacity_bytes"])
            one.do("attach", socket=agent.socket)
            request = write(agent.root, first["segment"], one.client_id, one_object(), b"x" * 100)
            one.do("call", method="Seal", request=request)
            agent.kill()
        with running_agent(shm_root, "--node-id", "n1") as agent:
            one.kill()
            wait_until(lambda: usage(agent).reserved_bytes == 0, "the reservation is given up")
            assert usage(agent).sealed_objects == 1


def test_trainer_that_died_while_no_agent_was_there(shm_root: Path) -> None:
    with trainer(shm_root) as one:
        with running_agent(shm_root) as agent:
            one.attach(agent)
            one.reserve()
            agent.kill()
        one.kill()
        with running_agent(shm_root) as agent:
            assert usage(agent).reserved_bytes == 0


def test_without_its_lock_a_process_gets_nothing(shared: AgentProcess) -> None:
    with trainer(shared.root) as one, trainer(shared.root) as other:
        other.attach(shared)
        request = {"client_id": one.client_id, "capacity_bytes": MIB, "job": "job", "epoch": 1}
        answer = other.ask("call", method="Reserve", request=request)
        assert answer["error"] == "StoreError"
        assert "lock file" in answer["message"]


Pair = tuple[TrainerProcess, TrainerProcess]


@contextlib.contextmanager
def two_trainers(agent: AgentProcess) -> Iterator[Pair]:
    with trainer(agent.root) as one, trainer(agent.root) as other:
        for each in (one, other):
            each.attach(agent)
        yield one, other


@pytest.fixture(scope="module")
def pair(shared: AgentProcess) -> Iterator[Pair]:
    with two_trainers(shared) as made:
        yield made


def test_nobody_seals_or_releases_the_segment_of_another(shared: AgentProcess, pair: Pair) -> None:
    mine, thief = pair
    reserved = mine.reserve()
    request = write(shared.root, reserved["segment"], mine.client_id, one_object(), b"data")
    for method, stolen in (
        ("Seal", {**request, "client_id": thief.client_id}),
        ("Release", {"client_id": thief.client_id, "segment": reserved["segment"]}),
    ):
        answer = thief.ask("call", method=method, request=stolen)
        assert answer["error"] == "SegmentError", answer
    mine.do("call", method="Seal", request=request)


def test_seal_and_release_may_be_repeated(shared: AgentProcess, pair: Pair) -> None:
    """A reply may be lost; asking again must find what the first call did."""
    one, _ = pair
    before = usage(shared)
    first, second = one.reserve(), one.reserve()
    target = one_object()
    request = write(shared.root, first["segment"], one.client_id, target, b"data")
    for _ in range(2):
        one.do("call", method="Seal", request=request)
        one.do("call", method="Release", request={"client_id": one.client_id, "segment": second["segment"]})
    assert usage(shared).sealed_objects == before.sealed_objects + 1
    assert usage(shared).reserved_bytes == before.reserved_bytes
    third = one.reserve()
    other = write(shared.root, third["segment"], one.client_id, target, b"DATA")
    answer = one.ask("call", method="Seal", request=other)
    assert answer["error"] == "ObjectExistsError"


def test_seal_refuses_what_is_not_in_the_segment(shared: AgentProcess, pair: Pair) -> None:
    one, _ = pair
    before = usage(shared)
    reserved = one.reserve()
    request = write(shared.root, reserved["segment"], one.client_id, one_object(), b"data")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"crc32c": 1}, "CorruptObjectError"),
        ({"owner_node_id": "n2"}, "InvalidIdError"),
        ({"size_bytes": BLOCK_SIZE * 3}, "InvalidIdError"),
        ({"object": {**request["descriptor"]["object"], "name": "../../etc/passwd"}}, "InvalidIdError"),
        ({"object": {**request["descriptor"]["object"], "name": "another"}}, "CorruptObjectError"),
    ]
    for change, kind in wrong:
        answer = one.ask("call", method="Seal", request={**request, "descriptor": {**request["descriptor"], **change}})
        assert answer.get("error") == kind, (change, answer)
    assert usage(shared).sealed_objects == before.sealed_objects
    one.do("call", method="Seal", request=request)


def test_older_incarnation_can_neither_reserve_nor_seal(agent: AgentProcess) -> None:
    """F11: its segment was reserved before; what it publishes now could only confuse its successor."""
    with two_trainers(agent) as (older, newer):
        status = usage(agent)
        member = {
            "identity": {"node_id": "n1", "incarnation": status.node.identity.incarnation},
            "grpc_address": status.node.grpc_address,
        }
        reserved = older.reserve(epoch=1)
        request = write(agent.root, reserved["segment"], older.client_id, one_object(), b"data")
        opened = newer.do("call", method="OpenJob", request={"job": "job", "members": [member]})
        assert opened["epoch"] == "2"
        joined = newer.do(
            "call", method="JoinJob", request={"job": "job", "epoch": 2, "members": [member], "replicas": 1}
        )
        assert "single node" in joined["note"]
        refused = [
            older.ask("call", method="Seal", request=request),
            older.ask("call", method="Begin", request={"job": "job", "step": 1, "epoch": 1}),
            older.ask(
                "call",
                method="Reserve",
                request={"client_id": older.client_id, "capacity_bytes": MIB, "job": "job", "epoch": 1},
            ),
        ]
        for answer in refused:
            assert answer["error"] == "StaleEpochError", answer
            assert "epoch 1 was superseded by epoch 2" in answer["message"]
        begun = newer.do("call", method="Begin", request={"job": "job", "step": 0, "epoch": 2})
        assert int(begun["container"]["generation"]) == make_generation(2, 1)
        agent.kill()
        with running_agent(agent.root, "--node-id", "n1") as again:
            older.do("attach", socket=again.socket)
            answer = older.ask("call", method="Begin", request={"job": "job", "step": 1, "epoch": 1})
            assert answer["error"] == "StaleEpochError"


def test_full_budget_is_an_error_with_numbers(shared: AgentProcess, pair: Pair) -> None:
    """F22"""
    one, _ = pair
    before = usage(shared)
    request = {"client_id": one.client_id, "capacity_bytes": 300 * MIB, "job": "job", "epoch": 1}
    answer = one.ask("call", method="Reserve", request=request)
    assert answer["error"] == "StoreFullError"
    assert str(256 * MIB) in answer["message"]
    assert usage(shared).reserved_bytes == before.reserved_bytes


def test_reservation_that_nobody_waits_for_is_given_back(agent: AgentProcess) -> None:
    """The call was given up while the segment was being allocated: its client will never hear of it."""
    with trainer(agent.root) as one:
        one.attach(agent)
        with grpc.insecure_channel(f"unix:{agent.socket}") as channel:
            reserve = channel.unary_unary(
                "/replicator.v1.LocalService/Reserve",
                request_serializer=local_pb2.ReserveRequest.SerializeToString,
                response_deserializer=local_pb2.ReserveReply.FromString,
            )
            request = local_pb2.ReserveRequest(
                client_id=one.client_id, capacity_bytes=capacity_for(200 * MIB), job="job", epoch=1
            )
            with pytest.raises(grpc.RpcError) as caught:
                reserve(request, timeout=0.005)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
            # A second reservation of the same size fits the budget only when the first was given back.
            wait_until(lambda: _succeeds(lambda: reserve(request, timeout=10)), "the budget has room again")


def _succeeds(call: Any) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def test_attach_says_who_the_agent_is(shared: AgentProcess) -> None:
    with trainer(shared.root) as one:
        attached = one.attach(shared)["attached"]
    record = shared.record
    assert attached["node"] == {"node_id": "n1", "incarnation": str(record["incarnation"])}
    assert attached["root"] == str(shared.root)
    assert attached["grpc_address"] == record["grpc_address"]


def test_adopt_takes_what_is_there_and_names_what_is_not(shared: AgentProcess, pair: Pair) -> None:
    one, _ = pair
    request = write(shared.root, one.reserve()["segment"], one.client_id, one_object(), b"data")
    one.do("call", method="Seal", request=request)
    there = request["descriptor"]["object"]
    one.do("call", method="Adopt", request={"client_id": one.client_id, "objects": [there]})
    missing = {**there, "name": "missing"}
    answer = one.ask("call", method="Adopt", request={"client_id": one.client_id, "objects": [missing, there]})
    assert answer["error"] == "ObjectNotFoundError"
    assert "1 of 2" in answer["message"]


def test_corrupt_object_is_set_aside_after_the_agents_own_check(shared: AgentProcess, pair: Pair) -> None:
    """F01: a copy that was found bad is never offered again; a good one is not given up on hearsay."""
    one, _ = pair
    before = usage(shared)
    target = one_object()
    request = write(shared.root, one.reserve()["segment"], one.client_id, target, b"data" * 1000)
    one.do("call", method="Seal", request=request)
    report = {"client_id": one.client_id, "object": request["descriptor"]["object"], "reason": "block 0"}
    assert one.do("call", method="ReportCorrupt", request=report) == {}
    path = open_root(shared.root, create=False).object(target)
    with path.open("r+b") as file:
        file.write(b"X")
    assert one.do("call", method="ReportCorrupt", request=report) == {"quarantined": True}
    assert usage(shared).quarantined_objects == before.quarantined_objects + 1
    assert usage(shared).sealed_objects == before.sealed_objects
    assert one.do("call", method="ReportCorrupt", request=report) == {}


def test_kills_at_any_moment_leave_what_was_sealed_and_nothing_reserved(shm_root: Path) -> None:
    """F05, F24, F27: trainers and the agent get SIGKILL in the middle of reserving, writing and sealing."""
    random_ = random.Random(11)
    acknowledged: dict[ObjectVersion, bytes] = {}

    def save_until_killed(one: TrainerProcess) -> None:
        with contextlib.suppress(AssertionError, OSError, ValueError):
            while True:
                target, data = one_object(), random_.randbytes(random_.randrange(1, 200_000))
                request = write(shm_root, one.reserve()["segment"], one.client_id, target, data)
                one.do("call", method="Seal", request=request)
                acknowledged[target] = data

    for _ in range(3):
        with running_agent(shm_root, "--node-id", "n1") as agent, contextlib.ExitStack() as stack:
            trainers = [stack.enter_context(trainer(shm_root)) for _ in range(3)]
            threads = []
            for one in trainers:
                one.attach(agent)
                threads.append(threading.Thread(target=save_until_killed, args=(one,)))
                threads[-1].start()
            for victim in (*trainers[:2], agent):
                wanted = len(acknowledged) + random_.randrange(1, 4)
                wait_until(lambda wanted=wanted: len(acknowledged) >= wanted, "objects are sealed")
                victim.kill()
            trainers[2].kill()
            for thread in threads:
                thread.join(20)
            assert not any(thread.is_alive() for thread in threads)
    with running_agent(shm_root, "--node-id", "n1") as agent:
        found = usage(agent)
        assert found.reserved_bytes == 0
        assert found.quarantined_objects == 0
        assert found.sealed_objects >= len(acknowledged) > 0
        paths = open_root(shm_root, create=False)
        assert [name for name in (path.name for path in paths.segments.iterdir()) if name.startswith("w.")] == []
        for target, data in acknowledged.items():
            with open_object(paths, target) as reader:
                reader.verify()
                assert bytes(reader.view) == data

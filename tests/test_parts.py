"""Messages larger than one gRPC message: in parts, bounded, and refused with the bound's name (F28)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from replicator import parts
from replicator.errors import TooLargeError
from replicator.rpc_options import channel_options
from replicator.v1 import local_pb2, types_pb2

MANY = 100_000


@pytest.fixture(scope="module")
def plan() -> types_pb2.Plan:
    made = types_pb2.Plan(found=True, reason="it is the newest", world_size=8)
    made.container.step = 7
    for number in range(MANY):
        made.sources.add(
            name=f"layers.{number:06}/weight", size_bytes=number, crc32c=number, owner_node_id="n1", node_ids=["n1"]
        )
    made.nodes.add().identity.node_id = "n1"
    made.unanswered.add(node_id="n2", reason="silent")
    return made


def _commit(count: int) -> local_pb2.CommitRequest:
    made = local_pb2.CommitRequest(client_id="c", deadline_ms=5)
    made.manifest.container.job = "job"
    for number in range(count):
        made.manifest.entries.add(name=f"{number:06}", size_bytes=1, crc32c=2, owner_node_id="n1")
    return made


@pytest.fixture(scope="module", name="request_")
def commit_request() -> local_pb2.CommitRequest:
    return _commit(MANY)


def test_a_plan_of_many_objects_comes_in_parts_of_bounded_size(plan: types_pb2.Plan) -> None:
    sent = list(parts.split(plan, parts.PLAN))
    assert len(sent) > 4
    assert all(part.ByteSize() <= parts.PART_BYTES for part in sent)
    assert all(not part.reason for part in sent[1:])
    assert parts.join(sent, types_pb2.Plan(), parts.PLAN) == plan
    assert len(plan.sources) == MANY


def test_a_commit_of_many_objects_goes_in_parts_of_bounded_size(request_: local_pb2.CommitRequest) -> None:
    sent = list(parts.split(request_, parts.COMMIT))
    assert len(sent) > 2
    assert all(part.ByteSize() <= parts.PART_BYTES for part in sent)
    assert parts.join(sent, local_pb2.CommitRequest(), parts.COMMIT) == request_


def test_what_fits_is_one_message_as_it_always_was() -> None:
    request = _commit(3)
    assert list(parts.split(request, parts.COMMIT)) == [request]
    assert list(parts.split(types_pb2.Plan(), parts.PLAN)) == [types_pb2.Plan()]


def test_more_than_the_bound_is_refused_by_both_sides_with_its_name(plan: types_pb2.Plan) -> None:
    small = dataclasses.replace(parts.PLAN, max_bytes=1 << 20)
    sent = list(parts.split(plan, parts.PLAN))
    for refused in (lambda: list(parts.split(plan, small)), lambda: parts.join(sent, types_pb2.Plan(), small)):
        with pytest.raises(TooLargeError, match=f"a recovery plan may have at most {1 << 20} bytes"):
            refused()


class _Server(grpc.GenericRpcHandler):
    """Gives the plan; a request is taken whole."""

    def __init__(self, plan: types_pb2.Plan, *, streams: bool) -> None:
        self.plan, self.streams = plan, streams
        self.taken: list[local_pb2.CommitRequest] = []

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if details.method.endswith("Commit"):
            return grpc.stream_unary_rpc_method_handler(self._commit, local_pb2.CommitRequest.FromString)
        if self.streams:
            return grpc.unary_stream_rpc_method_handler(self._lookup, None, types_pb2.Plan.SerializeToString)
        return grpc.unary_unary_rpc_method_handler(lambda _, __: self.plan, None, types_pb2.Plan.SerializeToString)

    def _commit(self, requests: Iterator[local_pb2.CommitRequest], _: object) -> bytes:
        self.taken.append(parts.join(requests, local_pb2.CommitRequest(), parts.COMMIT))
        return b""

    def _lookup(self, _: bytes, __: object) -> Iterator[types_pb2.Plan]:
        yield from parts.split(self.plan, parts.PLAN)


@pytest.mark.parametrize("streams", [True, False], ids=["parts", "an older agent"])
def test_calls_over_grpc_with_its_default_limits(
    plan: types_pb2.Plan, request_: local_pb2.CommitRequest, streams: bool
) -> None:
    """F28. Whoever knows no parts is understood as long as one message is enough."""
    given = plan if streams else types_pb2.Plan(reason="short")
    served = _Server(given, streams=streams)
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((served,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", options=channel_options()) as channel:
            look = parts.stub(channel, "LocalService/Lookup", local_pb2.LookupRequest, types_pb2.Plan)
            assert look(local_pb2.LookupRequest(), 20.0) == given
            commit = parts.stub(channel, "LocalService/Commit", local_pb2.CommitRequest, local_pb2.CommitReply)
            for request in (request_ if streams else _commit(2), _commit(3)):
                commit(request, 20.0)
                assert served.taken[-1] == request
    finally:
        server.stop(None).wait()

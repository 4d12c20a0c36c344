"""A trainer process for tests, driven by JSON lines: one command on stdin, one answer on stdout.

It uses the store's client lock and plain gRPC, and no code of replicator.client, so that the agent is tested alone.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

# The connection must stay open in a forked child, as it does when the fork happens in native code.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"

import grpc
from google.protobuf import json_format

from replicator.rpc_options import channel_options
from replicator.store.client_lock import ClientLock
from replicator.store.paths import open_root
from replicator.v1 import local_pb2, types_pb2


class Trainer:
    def __init__(self, root: str, client_id: str) -> None:
        self.root, self.client_id = root, client_id
        self.lock: ClientLock | None = None
        self.channel: grpc.Channel | None = None
        self.events: Any = None

    def hold(self) -> None:
        """Take the client lock."""
        self.lock = ClientLock(open_root(self.root, create=False), self.client_id)
        self.lock.acquire()

    def attach(self, socket: str) -> Any:
        """Open the stream; the first event."""
        self.channel = grpc.insecure_channel(f"unix:{socket}", options=channel_options())
        self.events = self.channel.unary_stream(
            "/replicator.v1.LocalService/Attach",
            request_serializer=local_pb2.AttachRequest.SerializeToString,
            response_deserializer=local_pb2.AttachEvent.FromString,
        )(local_pb2.AttachRequest(client_id=self.client_id, pid=os.getpid(), version="test"))
        return json_format.MessageToDict(next(self.events), preserving_proto_field_name=True)

    def wait_end(self) -> str:
        """How the stream ends."""
        try:
            for _ in self.events:
                pass
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"  # type: ignore[attr-defined]
        return "OK"

    def detach(self) -> None:
        """Close the connection and keep the lock."""
        if self.channel is not None:
            self.channel.close()

    def call(self, method: str, request: dict[str, Any], reply: str = "") -> Any:
        """One unary call, over the connection of `attach`."""
        assert self.channel is not None
        request_type = getattr(local_pb2, f"{method}Request")
        reply_type = getattr(local_pb2, reply or f"{method}Reply", None) or getattr(types_pb2, reply)
        function = self.channel.unary_unary(
            f"/replicator.v1.LocalService/{method}",
            request_serializer=request_type.SerializeToString,
            response_deserializer=reply_type.FromString,
        )
        answer = function(json_format.ParseDict(request, request_type()), timeout=10)
        return json_format.MessageToDict(answer, preserving_proto_field_name=True)

    def fork(self) -> int:
        """A child that keeps every descriptor open and does nothing; its pid."""
        pid = os.fork()
        if pid == 0:
            while True:
                signal.pause()
        return pid


def main() -> None:
    trainer = Trainer(sys.argv[1], sys.argv[2])
    for line in sys.stdin:
        command = json.loads(line)
        try:
            answer = {"ok": getattr(trainer, command.pop("do"))(**command)}
        except grpc.RpcError as error:
            kinds = [value for key, value in error.trailing_metadata() or () if key == "replicator-error-kind"]  # type: ignore[attr-defined]
            answer = {"error": kinds[0] if kinds else error.code().name, "message": error.details()}  # type: ignore[attr-defined]
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

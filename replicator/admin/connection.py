"""Which agent to talk to, and calls to its AdminService with deadlines and typed errors."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from replicator.admin.progress import Waiting
from replicator.config import AgentConfig, default_root, split_address
from replicator.errors import (
    AgentUnavailableError,
    ConfigError,
    DeadlineExceededError,
    ReplicatorError,
)
from replicator.small_json import parse_json

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

_SERVICE = "/replicator.v1.AdminService/"
# The agent is given less time than its answer, so that its own "these nodes did not answer" arrives.
_AGENTS_SHARE = 0.8
_UNIX_PATH_MAX = 107

ReplyT = TypeVar("ReplyT", bound="Message")


@dataclass(frozen=True)
class Target:
    """An agent to talk to: the gRPC target, how to call it in a message, what to do when nobody is there."""

    address: str
    whom: str
    advice: str

    @property
    def is_unix(self) -> bool:
        return self.address.startswith("unix:")


def resolve_target(agent: str | None, root: str | None) -> Target:
    """The agent of `--agent`, else the one that published itself in `<root>/agent.json`.

    Without either, REPLICATOR_SOCKET, REPLICATOR_ROOT or the default root say where, as they do for the trainer.

    Raises:
        ConfigError: `agent` is neither host:port nor unix:PATH.
        AgentUnavailableError: no agent published itself in the root.
    """
    if agent is None and root is None and os.environ.get("REPLICATOR_SOCKET"):
        agent = "unix:" + os.environ["REPLICATOR_SOCKET"]
    if agent is None:
        return _published(Path(root or os.environ.get("REPLICATOR_ROOT") or default_root()))
    advice = "check the address and that the agent runs; replicator-admin nodes on another node lists all addresses"
    if agent.startswith("unix:"):
        path = str(Path(agent.removeprefix("unix:").removeprefix("//")).absolute())
        return Target(_unix(path), f"the agent at {path}", advice)
    try:
        host, port = split_address(agent)
    except ConfigError:
        raise ConfigError(f"--agent: expected host:port or unix:PATH, found {agent!r}") from None
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    tls_advice = f"{advice}; if it serves TLS, give --tls-ca, --tls-cert and --tls-key of its authority"
    return Target(f"dns:///{address}", f"the agent at {address}", tls_advice)


def _published(root: Path) -> Target:
    file = root / "agent.json"
    advice = f"start one with: replicator-agent --root {root}, or name another with --agent host:port or --root DIR"
    try:
        record = parse_json(file.read_bytes())
        path, pid, node_id = str(record["socket"]), int(record["pid"]), str(record["node_id"])
    except (FileNotFoundError, NotADirectoryError):
        raise AgentUnavailableError(f"no agent runs with the root {root} ({file} is not there); {advice}") from None
    except OSError as error:
        raise AgentUnavailableError(
            f"cannot read {file}: {error.strerror}; run as the agent's user, or name an agent with --agent host:port"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise AgentUnavailableError(f"{file} is not what an agent publishes; {advice}") from None
    return Target(_unix(os.path.join(root, path)), f"the agent of {root} ({node_id}, pid {pid})", advice)


def _unix(path: str) -> str:
    if "\0" in path or len(os.fsencode(path)) > _UNIX_PATH_MAX:
        raise ConfigError(f"a unix socket's path has at most {_UNIX_PATH_MAX} bytes and no NUL, found {path[:200]!r}")
    return f"unix:{path}"


class AdminClient:
    """A connection to one agent for the length of one command. Calls raise ReplicatorError only.

    Args:
        deadline_s: the longest wait for the answer of a call, or for the next piece of a stream.
    """

    def __init__(self, target: Target, deadline_s: float, credentials: grpc.ChannelCredentials | None = None) -> None:
        import grpc

        from replicator.rpc_options import channel_options

        self.target = target
        self.deadline_s = deadline_s
        options = channel_options()
        if credentials is None or target.is_unix:
            self._channel = grpc.insecure_channel(target.address, options=options)
        else:
            self._channel = grpc.secure_channel(target.address, credentials, options=options)

    @classmethod
    def of(cls, args: argparse.Namespace) -> AdminClient:
        """As the command's options say."""
        target = resolve_target(args.agent, args.root)
        return cls(target, args.deadline, _credentials(args, target))

    @property
    def agents_deadline_ms(self) -> int:
        """For `deadline_ms` of a request: what the agent may take to ask the other nodes."""
        return max(1, int(self.deadline_s * 1000 * _AGENTS_SHARE))

    def call(self, method: str, request: Message, reply_type: type[ReplyT], awaited: str) -> ReplyT:
        """One call with one reply, which may come in parts; `awaited` says in an error what did not come."""
        import grpc

        from replicator import parts

        function = parts.stub(self._channel, f"AdminService/{method}", type(request), reply_type)
        try:
            with Waiting(awaited, self.target.whom, self.deadline_s):
                reply = function(request, self.deadline_s)
        except grpc.RpcError as error:
            raise self._error(error, awaited) from None
        return reply

    def stream(self, method: str, request: Message, awaited: str) -> Iterator[bytes]:
        """The raw messages of a streaming call. Each must come within the deadline of the one before (F47)."""
        import grpc

        replies: Any = self._channel.unary_stream(
            _SERVICE + method, request_serializer=type(request).SerializeToString, response_deserializer=None
        )(request)
        watch = _IdleWatch(self.deadline_s, replies.cancel)
        try:
            for reply in replies:
                watch.touch()
                yield reply
        except grpc.RpcError as error:
            if watch.fired:
                raise DeadlineExceededError.of(awaited, self.target.whom, self.deadline_s) from None
            raise self._error(error, awaited) from None
        finally:
            watch.stop()
            replies.cancel()

    def _error(self, error: grpc.RpcError, awaited: str) -> ReplicatorError:
        import grpc

        from replicator.rpc_errors import error_from_rpc

        known = error_from_rpc(error, awaited, self.target.whom, self.deadline_s)
        call: Any = error
        if call.code() is grpc.StatusCode.UNAVAILABLE and not _is_typed(call):
            details = " ".join((call.details() or "").split())
            return AgentUnavailableError(f"{self.target.whom} does not answer ({details}); {self.target.advice}")
        return known

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # See __main__._end_now.
        if kind is None or issubclass(kind, Exception):
            self._channel.close()


def _is_typed(error: grpc.Call) -> bool:
    """Whether the agent said which of replicator/errors.py it is, rather than gRPC on its behalf."""
    metadata = error.trailing_metadata() or ()
    return any(key == "replicator-error-kind" for key, _ in metadata)


def _credentials(args: argparse.Namespace, target: Target) -> grpc.ChannelCredentials | None:
    """From the options, else from the environment variables that the agent reads."""
    files: dict[str, Any] = {
        name: getattr(args, name) or os.environ.get(f"REPLICATOR_{name.upper()}", "")
        for name in ("tls_ca", "tls_cert", "tls_key")
    }
    if target.is_unix or not any(files.values()):
        return None
    config = AgentConfig(node_id="replicator-admin", **files)
    from replicator.rpc_options import channel_credentials

    return channel_credentials(config)


class _IdleWatch:
    """Calls `on_idle` once when `touch` was not called for `idle_s`."""

    def __init__(self, idle_s: float, on_idle: Any) -> None:
        self._idle_s = idle_s
        self._on_idle = on_idle
        self._last = time.monotonic()
        self._stopped = threading.Event()
        self.fired = False
        threading.Thread(target=self._run, name="replicator-idle-watch", daemon=True).start()

    def touch(self) -> None:
        self._last = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            rest = self._last + self._idle_s - time.monotonic()
            if rest <= 0:
                self.fired = True
                with contextlib.suppress(Exception):
                    self._on_idle()
                return
            self._stopped.wait(rest)

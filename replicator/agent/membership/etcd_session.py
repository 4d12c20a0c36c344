"""One connection to one etcd: a lease that is kept alive, a record under it, all records, and what changes.

Through the API of the package aetcd (`pip install 'replicator[etcd]'`). A session that fails in any way is over; the
next one reads all records anew, so nothing is missed, be it for a compaction, a restart or another etcd.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from replicator.config import AgentConfig
from replicator.errors import ConfigError
from replicator.rpc_options import channel_options

try:
    from aetcd import rpc as api
except ImportError:
    raise ConfigError(
        "membership = etcd needs the package aetcd, which is not installed: pip install 'replicator[etcd]'"
    ) from None

_REVOKE_S = 1.0

log = logging.getLogger(__name__)


class EtcdLostError(Exception):
    """The session is over; says why, and to which endpoint it was. `was_held`: it had been complete before."""

    was_held = False


@dataclass(frozen=True, slots=True)
class Change:
    """A key and its value now; None: it is gone."""

    key: bytes
    value: bytes | None


class EtcdSession:
    """Used once: begin, put, read, hold, and then `leave` when this agent ends; `close` in any case.

    Raises:
        EtcdLostError: (begin, put, read, hold) etcd does not answer in time, or not as it should.
        ConfigError: (when made) a TLS file cannot be read.
    """

    def __init__(self, config: AgentConfig, endpoint: str) -> None:
        self._endpoint = endpoint
        self._limit_s = config.rpc_deadline_s
        self._lease = 0
        self._lease_s = 0.0
        if config.etcd_ca:
            self._channel = grpc.aio.secure_channel(endpoint, credentials(config), options=channel_options())
        else:
            self._channel = grpc.aio.insecure_channel(endpoint, options=channel_options())
        self._kv: Any = api.KVStub(self._channel)
        self._leases: Any = api.LeaseStub(self._channel)
        self._watches: Any = api.WatchStub(self._channel)

    async def begin(self, lease_s: int) -> None:
        """Take a lease."""
        reply = await self._call(self._leases.LeaseGrant, api.LeaseGrantRequest(TTL=lease_s), "a lease")
        self._lease, self._lease_s = reply.ID, float(reply.TTL)

    async def put(self, key: bytes, value: bytes) -> None:
        """Write a record that lives as long as the lease."""
        await self._call(self._kv.Put, api.PutRequest(key=key, value=value, lease=self._lease), "writing the record")

    async def read(self, prefix: str, limit: int) -> tuple[int, list[Change]]:
        """The revision of etcd, and all records at it."""
        key = prefix.encode()
        request = api.RangeRequest(key=key, range_end=_end_of(key), limit=limit)
        reply = await self._call(self._kv.Range, request, "reading the records")
        return int(reply.header.revision), [Change(one.key, one.value) for one in reply.kvs]

    async def hold(self, prefix: str, revision: int, on_changes: Callable[[Sequence[Change]], None]) -> None:
        """Keep the lease alive, and tell every change from `revision` on; only ever ends with an error."""
        tasks = [
            asyncio.ensure_future(self._keep_alive()),
            asyncio.ensure_future(self._watch(prefix.encode(), revision, on_changes)),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        except grpc.RpcError as error:
            raise self._lost("the watch", error) from None
        except (grpc.aio.UsageError, asyncio.InvalidStateError) as error:
            raise EtcdLostError(f"the connection to etcd at {self._endpoint} was lost: {error}") from None
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Give the lease back, so that others need not wait for its end. Takes a second at most, and never raises."""
        if self._lease:
            with contextlib.suppress(grpc.RpcError, grpc.aio.UsageError):
                await self._leases.LeaseRevoke(api.LeaseRevokeRequest(ID=self._lease), timeout=_REVOKE_S)

    async def close(self) -> None:
        """Disconnect. The lease ends by itself, unless it was given back."""
        await self._channel.close(None)

    async def _keep_alive(self) -> None:
        """Ask three times in the lease's life. A silent etcd is noticed by it, for the watch is silent by nature."""
        stream: Any = self._leases.LeaseKeepAlive()
        try:
            while True:
                await stream.write(api.LeaseKeepAliveRequest(ID=self._lease))
                try:
                    async with asyncio.timeout(self._limit_s):
                        reply = await stream.read()
                except TimeoutError:
                    raise self._silent("keeping its lease") from None
                if reply is grpc.aio.EOF or reply.TTL <= 0:
                    self._lease = 0
                    raise EtcdLostError(f"etcd at {self._endpoint} has ended this agent's lease")
                await asyncio.sleep(self._lease_s / 3)
        finally:
            stream.cancel()

    async def _watch(self, prefix: bytes, revision: int, on_changes: Callable[[Sequence[Change]], None]) -> None:
        create = api.WatchCreateRequest(key=prefix, range_end=_end_of(prefix), start_revision=revision)
        stream: Any = self._watches.Watch()
        try:
            await stream.write(api.WatchRequest(create_request=create))
            while True:
                reply = await stream.read()
                if reply is grpc.aio.EOF:
                    raise EtcdLostError(f"etcd at {self._endpoint} has ended the watch")
                if reply.canceled:
                    why = f"revision {revision} is compacted" if reply.compact_revision else reply.cancel_reason
                    raise EtcdLostError(f"etcd at {self._endpoint} has ended the watch: {why}")
                on_changes(_changes(reply.events))
        finally:
            stream.cancel()

    async def _call(self, method: Any, request: Any, awaited: str) -> Any:
        try:
            async with asyncio.timeout(self._limit_s + 1):
                return await method(request, timeout=self._limit_s)
        except TimeoutError:
            raise self._silent(awaited) from None
        except grpc.RpcError as error:
            raise self._lost(awaited, error) from None

    def _silent(self, awaited: str) -> EtcdLostError:
        return EtcdLostError(f"waited {self._limit_s:.1f} s for {awaited} from etcd at {self._endpoint}, in vain")

    def _lost(self, awaited: str, error: grpc.RpcError) -> EtcdLostError:
        code = error.code()
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return self._silent(awaited)
        return EtcdLostError(f"etcd at {self._endpoint} failed in {awaited}: {code.name}: {str(error.details())[:200]}")


def _changes(events: Iterable[Any]) -> list[Change]:
    return [Change(one.kv.key, None if one.type == api.Event.DELETE else one.kv.value) for one in events]


def _end_of(prefix: bytes) -> bytes:
    """The first key after all that begin with `prefix`, which does not end in 0xff."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


def credentials(config: AgentConfig) -> grpc.ChannelCredentials:
    """TLS towards etcd.

    Raises:
        ConfigError: a file cannot be read.
    """
    contents: list[bytes | None] = []
    for name in ("etcd_ca", "etcd_key", "etcd_cert"):
        path = getattr(config, name)
        try:
            contents.append(Path(path).read_bytes() if path else None)
        except OSError as error:
            raise ConfigError(f"{name}: cannot read {path}: {error.strerror}; give a readable PEM file") from None
    return grpc.ssl_channel_credentials(*contents)

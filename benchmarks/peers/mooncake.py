"""Mooncake's transfer engine over TCP: one-sided reads of registered memory, without a metadata server."""

from __future__ import annotations

import importlib
import time
from typing import Any

from benchmarks.peers.environment import Recipe
from benchmarks.peers.memory import Buffer
from benchmarks.worker import Role

NAME = "Mooncake TCP"
RECIPE = Recipe(
    name="mooncake",
    requirements=("mooncake-transfer-engine-non-cuda",),
    probe="from mooncake.engine import TransferEngine",
    libraries=("libibverbs1", "libnl-3-200", "libnl-route-3-200"),
)
HOST = "127.0.0.1"


class _End(Role):
    def __init__(self, size: int, directory: str, random: bool) -> None:
        self.buffer = Buffer(directory, size, random=random)
        self.engine = importlib.import_module("mooncake.engine").TransferEngine()
        _check(self.engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""), "initialize")
        _check(self.engine.register_memory(self.buffer.address, size), "register_memory")

    def fingerprint(self) -> int:
        return self.buffer.fingerprint()


class Target(_End):
    """Holds the bytes."""

    def __init__(self, size: int, directory: str) -> None:
        super().__init__(size, directory, random=True)

    def describe(self) -> dict[str, Any]:
        return {"address": self.buffer.address, "name": f"{HOST}:{self.engine.get_rpc_port()}"}


class Initiator(_End):
    """Reads them."""

    def __init__(self, size: int, directory: str, target: dict[str, Any]) -> None:
        super().__init__(size, directory, random=False)
        self._target = target

    def run(self, slices: int) -> float:
        """Seconds of one read, in so many slices."""
        pieces = self.buffer.pieces(slices)
        start = time.perf_counter()
        status = self.engine.batch_transfer_sync_read(
            self._target["name"],
            [self.buffer.address + offset for offset, _ in pieces],
            [self._target["address"] + offset for offset, _ in pieces],
            [length for _, length in pieces],
        )
        elapsed = time.perf_counter() - start
        _check(status, "batch_transfer_sync_read")
        return elapsed


def _check(status: int, what: str) -> None:
    if status != 0:
        raise RuntimeError(f"{what} returned {status}")

"""ML Flashpoint's transfer service: puts of an object from memory into a file on the other side's tmpfs."""

from __future__ import annotations

import importlib
import shutil
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

from benchmarks.peers.environment import Recipe
from benchmarks.peers.memory import Buffer
from benchmarks.worker import Role

NAME = "ML Flashpoint TCP"
RECIPE = Recipe(
    name="ml-flashpoint",
    requirements=("ml-flashpoint",),
    probe="from ml_flashpoint.replication.transfer_service import transfer_service_ext",
    # The source distribution's ignore list would keep the compiled modules out of the wheel.
    options=("-C", "cmake.define.BUILD_TESTING=OFF", "-C", "sdist.include=**/*_ext*.so"),
    builds=True,
)
DEADLINE_S = 120.0
NEEDS_INTERFACE = True


class _End(Role):
    def __init__(self) -> None:
        package = "ml_flashpoint.replication.transfer_service"
        self.service = importlib.import_module(f"{package}.transfer_service_ext").TransferService()
        self.port = self.service.initialize(0)
        if self.port <= 0:
            raise RuntimeError(f"expected a port to listen on, found {self.port}")

    def close(self) -> None:
        self.service.shutdown()


class Target(_End):
    """Receives: the sender names the file."""

    def __init__(self, size: int, directory: str) -> None:
        super().__init__()
        self._directory = Path(tempfile.mkdtemp(prefix="replicator-peer-", dir=directory))

    def describe(self) -> dict[str, Any]:
        return {"address": f"127.0.0.1:{self.port}", "file": str(self._directory / "object")}

    def fingerprint(self) -> int:
        return zlib.crc32((self._directory / "object").read_bytes())

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


class Initiator(_End):
    """Sends."""

    def __init__(self, size: int, directory: str, target: dict[str, Any]) -> None:
        super().__init__()
        self._buffer = Buffer(directory, size, random=True)
        self._target = target

    def run(self, slices: int) -> float:
        """Seconds of one put. It cannot be divided into slices of one object, so their number is ignored."""
        start = time.perf_counter()
        self.service.async_put(
            self._buffer.address, self._buffer.size, self._target["address"], self._target["file"]
        ).result(DEADLINE_S)
        return time.perf_counter() - start

    def fingerprint(self) -> int:
        return self._buffer.fingerprint()

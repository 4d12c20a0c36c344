"""NIXL with its UCX backend, held to TCP: one-sided reads of registered memory."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

from benchmarks.peers.environment import Recipe
from benchmarks.peers.memory import Buffer
from benchmarks.worker import Role

NAME = "NIXL TCP"
RECIPE = Recipe(
    name="nixl",
    # Without their dependencies: torch with CUDA is among them, and transfers of host memory do not need it.
    requirements=("nixl==1.5.1", "nixl-cu12==1.5.1", "numpy"),
    probe="from nixl._api import nixl_agent, nixl_agent_config as c; nixl_agent('probe', c(backends=['UCX']))",
)
ENVIRONMENT = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR"}
MEMORY = "DRAM"
DEADLINE_S = 120.0
POLL_S = 50e-6


class _End(Role):
    def __init__(self, name: str, size: int, directory: str, random: bool) -> None:
        os.environ.update(ENVIRONMENT)
        api = importlib.import_module("nixl._api")
        self.buffer = Buffer(directory, size, random=random)
        self.agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=True, backends=["UCX"]))
        self.agent.register_memory([(self.buffer.address, size, 0, "")], MEMORY)

    def fingerprint(self) -> int:
        return self.buffer.fingerprint()


class Target(_End):
    """Holds the bytes."""

    def __init__(self, size: int, directory: str) -> None:
        super().__init__("target", size, directory, random=True)

    def describe(self) -> dict[str, Any]:
        return {"address": self.buffer.address, "metadata": self.agent.get_agent_metadata().hex()}


class Initiator(_End):
    """Reads them."""

    def __init__(self, size: int, directory: str, target: dict[str, Any]) -> None:
        super().__init__("initiator", size, directory, random=False)
        self._target = target
        name = self.agent.add_remote_agent(bytes.fromhex(target["metadata"]))
        self._remote = name.decode() if isinstance(name, bytes) else name

    def run(self, slices: int) -> float:
        """Seconds of one read, in so many slices."""
        pieces = self.buffer.pieces(slices)
        local = self.agent.get_xfer_descs([(self.buffer.address + o, n, 0) for o, n in pieces], MEMORY)
        remote = self.agent.get_xfer_descs([(self._target["address"] + o, n, 0) for o, n in pieces], MEMORY)
        start = time.perf_counter()
        handle = self.agent.initialize_xfer("READ", local, remote, self._remote)
        state = self.agent.transfer(handle)
        while state != "DONE":
            if state == "ERR" or time.perf_counter() - start > DEADLINE_S:
                raise RuntimeError(f"a transfer of {self.buffer.size} bytes is in state {state}")
            time.sleep(POLL_S)
            state = self.agent.check_xfer_state(handle)
        elapsed = time.perf_counter() - start
        self.agent.release_xfer_handle(handle)
        return elapsed

"""The peers whose transfers are measured beside ours, started; or why not."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Settings
from benchmarks.peers.environment import NotAvailableError, ensure
from benchmarks.peers.pair import Pair
from benchmarks.worker import WorkerError

TRANSFER_PEERS = ("mooncake", "nixl", "flashpoint")


@dataclass
class Peers:
    """`pairs` by peer's module name; `missing` has the reason of every other one."""

    pairs: dict[str, Pair] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def reason(self, key: str) -> str:
        return self.missing.get(key, "")

    def details(self, key: str) -> Mapping[str, Any]:
        return self.pairs[key].details if key in self.pairs else {}


def title(key: str) -> str:
    """A peer's name in words."""
    return str(importlib.import_module(f"benchmarks.peers.{key}").NAME)


def start_transfer_peers(settings: Settings, keys: Sequence[str] = TRANSFER_PEERS) -> Peers:
    """Install (when needed) and start peers that move bytes over TCP."""
    peers = Peers()
    for key in keys:
        module = importlib.import_module(f"benchmarks.peers.{key}")
        if not settings.peers:
            peers.missing[key] = "peers were not asked for"
            continue
        try:
            environment = ensure(module.RECIPE, settings)
            needs_interface = bool(getattr(module, "NEEDS_INTERFACE", False))
            peers.pairs[key] = Pair(module.NAME, module.__name__, environment, settings, needs_interface)
        except (NotAvailableError, WorkerError) as error:
            peers.missing[key] = f"{module.NAME} is not available: {error}"
            settings.log(f"  {peers.missing[key]}")
    return peers

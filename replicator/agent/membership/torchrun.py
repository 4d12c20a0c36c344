"""`membership = torchrun`: the ranks of a job call the roll through torch.distributed's store, and tell their agents.

That happens under every source; with this one there is no other. Members are in `Jobs` then, and not here.
"""

from __future__ import annotations

from replicator.agent.membership.source import Source


class TorchrunSource(Source):
    """Gives no address of its own."""

    kind = "torchrun"

    @property
    def addresses(self) -> tuple[str, ...]:
        return ()

"""How the processes that write one checkpoint find each other, in the trainer or in a process beside it.

They meet in the key-value store that torch.distributed was initialised with in the trainers: a process that a trainer
starts to write its checkpoints is no rank of torch.distributed, and connects to that store by its address.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from replicator.client.agreement import Ranks, SingleRank, StoreRanks, is_distributed
from replicator.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Writers:
    """The processes that write together, one for each rank. May be pickled: it is only told where they meet."""

    rank: int
    world_size: int
    host: str = ""
    port: int = 0

    @classmethod
    def of_this_job(cls) -> Writers:
        """One for every rank of torch.distributed; this process alone where it is not initialised.

        Raises:
            UnsupportedError: several ranks on a store that other processes cannot reach.
        """
        if not is_distributed():
            return cls(0, 1)
        dist: Any = sys.modules["torch.distributed"]
        rank, world_size = dist.get_rank(), dist.get_world_size()
        if world_size == 1:
            return cls(0, 1)
        store: Any = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        if not isinstance(store, dist.TCPStore):
            raise UnsupportedError(
                f"expected torch.distributed on a TCPStore, which other processes reach, found {type(store).__name__}; "
                "use torchrun, or init_process_group(init_method='tcp://...' or 'env://')"
            )
        return cls(rank, world_size, store.host, store.port)

    def meet(self, place: str, deadline_s: float) -> Ranks:
        """Wait for all of them. Every one must call it, with the same place, and again after any was started anew.

        Raises:
            DeadlineExceededError: ranks (named) that did not come.
        """
        if self.world_size == 1:
            return SingleRank()
        from torch._C._distributed_c10d import TCPStore

        store = TCPStore(
            self.host,
            self.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=deadline_s),
        )
        return StoreRanks.meet(store, self.rank, self.world_size, place, deadline_s)

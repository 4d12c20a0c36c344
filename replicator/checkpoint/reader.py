"""`torch.distributed.checkpoint` loads from the memory of the nodes."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from replicator.checkpoint.fetch import Pulled
from replicator.checkpoint.loader import DefaultCheckpointLoader
from replicator.checkpoint.names import METADATA_NAME, CheckpointId, container_of, folder_of, is_container
from replicator.checkpoint.objects import CheckpointObjectManager
from replicator.client.plan import Plan
from replicator.client.session import Session
from replicator.errors import ConfigError, ReplicatorError
from replicator.ids import validate_step


class ReplicatedStorageReader(StorageReader):
    """A storage reader for `dcp.load`. One reader serves many loads, one after another.

    Every byte is checked against the checksums of the committed manifest before it is used. When no good copy is
    found the load raises, and the tensors it was reading at that time are zeros.

    Args:
        session: from `replicator.init`; default: the session of this process, made when there is none.
        step: load this step; default: the newest recoverable one, or what `dcp.load(checkpoint_id=...)` says.
        plan: from `session.lookup()`: load exactly this. Otherwise the load looks it up, and under torch.distributed
            all ranks of the session must load together; with a plan, ranks may also load one by one
            (`no_dist=True`) or in a process group of their own.
        prefix: the folder of the objects, when the container was saved in parts, for instance "model/".
        threads: that copy and check; default: as many as there are processors, at most 4.
    """

    def __init__(
        self,
        session: Session | None = None,
        step: int | None = None,
        plan: Plan | None = None,
        *,
        prefix: str = "",
        threads: int | None = None,
    ) -> None:
        super().__init__()
        if step is not None:
            validate_step(step)
            if plan is not None and plan.step != step:
                raise ConfigError(f"step {step} was asked for, with a plan for step {plan.step}; give one of the two")
        self._objects = CheckpointObjectManager(session)
        self._step = step
        self._given = plan
        self._threads = threads
        self.prefix = folder_of(prefix)
        self._metadata: Metadata | None = None
        self._start()

    # -- StorageReader

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Raises ConfigError when the id names another step than the plan that was given."""
        self._start()
        if checkpoint_id is None:
            return
        step = container_of(checkpoint_id, self.session.job).step
        if self._given is not None and self._given.step != step:
            raise ConfigError(f"checkpoint id {checkpoint_id} was asked for, with a plan for step {self._given.step}")
        self._step = step

    def read_metadata(self) -> Metadata:
        """Raises NoRecoverableCheckpointError when there is nothing to load, with the reason."""
        if self._given is None:
            self._loader.use(self.session.lookup(self._step))
        metadata = self._loader.read_metadata(self.plan.require().container, self.prefix + METADATA_NAME)
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self._load_id
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=str(self.plan.version))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises ReplicatorError, for all ranks, when they are about to load different checkpoints."""
        versions = [plan.storage_data for plan in plans]
        for rank, version in enumerate(versions):
            if version != versions[0]:
                raise ReplicatorError(
                    f"rank 0 is about to load {versions[0]} and rank {rank} {version}; give all of them the plan of "
                    "one session.lookup()"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        if self._metadata is None:
            raise ConfigError("read_data() was called before set_up_storage_reader()")
        self._loader.read_items(plan.items, planner, self._metadata.storage_data, self.prefix)
        future: torch.futures.Future[None] = torch.futures.Future()
        future.set_result(None)
        return future

    @property
    def checkpoint_id(self) -> str | None:
        """The container being loaded, as text; before a load the step that was asked for."""
        plan = self._loader.plan
        if plan is not None and plan.container is not None:
            return str(plan.container)
        return None if self._step is None else f"step-{self._step}"

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        return is_container(checkpoint_id)

    # -- its own

    @property
    def session(self) -> Session:
        """The session it loads in. Raises the errors of `replicator.init` when it has to be made."""
        return self._objects.session

    @property
    def plan(self) -> Plan:
        """What the last load read, or the one that was given."""
        if self._loader.plan is None:
            raise ConfigError("nothing has been loaded yet; use session.lookup() to see what would be")
        return self._loader.plan

    @property
    def pulled(self) -> list[Pulled]:
        """What the last load had other nodes send, on this rank; the rest was on this node."""
        return self._loader.pulled

    def _start(self) -> None:
        self._loader = DefaultCheckpointLoader(self._objects, threads=self._threads, plan=self._given)
        self._load_id = str(uuid.uuid4())
        self._metadata = None

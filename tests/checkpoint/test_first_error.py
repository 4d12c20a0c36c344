"""`torch.save` into memory that is full says that it is full. A real agent, with little memory."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from job_support import nodes

import replicator
from replicator.checkpoint.plain_save import PlainSave
from replicator.errors import ReplicatorError, StoreFullError
from replicator.first_error import FirstError
from replicator.ids import CheckpointContainerId

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

FULL = "no room for .* bytes: of the budget of 8388608 bytes"


def test_a_full_memory_is_named_through_torch_save(shm_root: Path) -> None:
    """F22: a plain object, a file of a URL, one of torch_checkpointing, a whole save by URL. The next save works."""
    pytest.importorskip("torch_checkpointing")
    from replicator.integrations.torch_checkpointing import ReplicatorStorageConfig

    large = torch.ones(10_000_000)
    with nodes(shm_root, 1, start=False) as (node,):
        node.start("--budget-bytes", "8Mi")
        with replicator.init("full", root=node.root, auto_start=False, deadline_s=5) as session:
            plain = PlainSave(session, session.begin(CheckpointContainerId("full", 1)))
            with pytest.raises(StoreFullError, match=FULL):
                plain.write("a", 1 << 20, lambda sink: torch.save(large, sink))  # type: ignore[arg-type]
            plain.give_up()
            fs = fsspec.filesystem("replicator")
            with pytest.raises(StoreFullError, match=FULL), fs.open("full/step-2/a", "wb") as file:
                torch.save(large, file)
            strict = ReplicatorStorageConfig(session=session, strict=True).create_storage()
            with pytest.raises(StoreFullError, match=FULL), strict.stream_write(Path("step-2/b")) as stream:
                torch.save(large, stream)  # type: ignore[arg-type]
            with pytest.raises(dcp.CheckpointException, match=f"StoreFullError: {FULL}"):
                dcp.save({"a": large}, checkpoint_id="replicator://full/step-3", no_dist=True)
            dcp.save({"a": large[:1000]}, checkpoint_id="replicator://full/step-4", no_dist=True)
            assert session.lookup().step == 4
            assert node.status().reserved_bytes == 0


def test_which_error_hides_the_first_one() -> None:
    first = FirstError()
    first.raise_for(RuntimeError("nothing was kept"))
    full = StoreFullError("full")
    first.keep(full)
    first.keep(StoreFullError("still full"))
    for told in (None, full, ReplicatorError("says itself what is wrong"), KeyboardInterrupt()):
        first.raise_for(told)
    with pytest.raises(StoreFullError, match=r"^full$"):
        first.raise_for(RuntimeError("unexpected pos 704 vs 598"))

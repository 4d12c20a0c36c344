"""`replicator://job/step-5` as a checkpoint id of torch.distributed.checkpoint, without any code. Real ranks."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from job_support import Job, Node, nodes, run_alone, run_job
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import replicator
from replicator.checkpoint import ReplicatedStorageReader, ReplicatedStorageWriter
from replicator.client.session import open_session
from replicator.errors import ConfigError, InvalidIdError, NotFoundError, ObjectExistsError, UnsupportedError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

URL = "replicator://job"
SHAPE = (4096, 1024)


@pytest.fixture(scope="module")
def two() -> Iterator[list[Node]]:
    """Two nodes, for all tests of this module in their order."""
    root = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    with nodes(root, 2) as made:
        yield made
    shutil.rmtree(root, ignore_errors=True)


def tensor(step: int) -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(step))


def state_of(step: int) -> dict[str, Any]:
    """Sharded over all ranks: 8 MiB for each of two, little things, and a value."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "large": distribute_tensor(tensor(step), mesh, [Shard(0)]),
        "odd": distribute_tensor(tensor(step)[:37, :5].to(torch.bfloat16), mesh, [Shard(0)]),
        "step": step,
    }


def loads(wanted: int, checkpoint_id: str | None, **arguments: Any) -> bool:
    """Whether what is loaded is the state of a step, on this rank."""
    state = {key: torch.zeros_like(item) if torch.is_tensor(item) else -1 for key, item in state_of(0).items()}
    dcp.load(state, checkpoint_id=checkpoint_id, **arguments)
    good = state_of(wanted)
    return state["step"] == wanted and all(
        torch.equal(state[key].to_local(), good[key].to_local()) for key in ("large", "odd")
    )


def error_of(call: Any) -> str:
    with contextlib.suppress(SystemExit):
        try:
            call()
        except BaseException as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


class Failing(DefaultSavePlanner):
    """Raises on rank 1 in the middle of writing."""

    def resolve_data(self, write_item: Any) -> Any:
        if dist.get_rank() == 1 and write_item.index.fqn == "odd":
            raise OSError("no such luck")
        return super().resolve_data(write_item)


def a_job() -> dict[str, Any]:
    """Its whole life, on every rank. No session is made by hand."""
    found: dict[str, Any] = {}
    fs = fsspec.filesystem("replicator")
    found["nothing yet"] = error_of(lambda: fs.ls(URL))
    dist.barrier()

    dcp.save(state_of(5), checkpoint_id=f"{URL}/step-5")
    found["loaded"] = loads(5, f"{URL}/step-5")
    found["files"] = fs.ls(f"{URL}/step-5_ckpt", detail=False)

    found["failed"] = error_of(lambda: dcp.save(state_of(6), checkpoint_id=f"{URL}/step-6", planner=Failing()))
    found["of the failed one"] = fs.exists(f"{URL}/step-6"), fs.ls(URL, detail=False)
    dist.barrier()
    dcp.save(state_of(6), checkpoint_id=f"{URL}/step-6")
    # The same step again with other content, a file for each item; and what the storage writer saves.
    dcp.save(state_of(66), storage_writer=FsspecWriter(f"{URL}/step-6", single_file_per_rank=False, wait_for="commit"))
    found["saved again"] = loads(66, f"{URL}/step-6"), len(fs.ls(f"{URL}/step-6"))
    session = open_session()
    assert session is not None
    dcp.save(state_of(7), checkpoint_id="step-7", storage_writer=ReplicatedStorageWriter(session))
    found["of the writer"] = loads(7, f"{URL}/step-7")
    found["by the reader"] = loads(66, "step-6", storage_reader=ReplicatedStorageReader(session))
    found["not over it"] = error_of(
        lambda: dcp.save(state_of(8), storage_writer=FsspecWriter(f"{URL}/step-7", overwrite=False))
    )
    found["each alone"] = error_of(lambda: dcp.save(state_of(8), checkpoint_id=f"{URL}/step-7", use_collectives=False))
    found["another job's"] = error_of(lambda: dcp.save(state_of(8), checkpoint_id="replicator://other/step-7"))
    found["still there"] = loads(7, f"{URL}/step-7")

    dcp.async_save(state_of(8), checkpoint_id=f"{URL}/step-8").result(60)  # type: ignore[union-attr]
    dist.barrier()
    found["in a thread"] = loads(8, f"{URL}/step-8")
    in_a_process = AsyncCheckpointerType.PROCESS
    future = dcp.async_save(state_of(9), checkpoint_id=f"{URL}/step-9", async_checkpointer_type=in_a_process)
    future.result(120)  # type: ignore[union-attr]
    dist.barrier()
    found["in a process"] = loads(9, f"{URL}/step-9"), session.epoch
    writer = FsspecWriter(f"{URL}/step-10", thread_count=3, wait_for="protected")
    dcp.save(state_of(10), storage_writer=writer)
    found["by threads"] = loads(10, None, storage_reader=FsspecReader(f"{URL}/step-10"))
    return found


@pytest.mark.timeout(240)
def test_the_life_of_a_job(two: list[Node]) -> None:
    """F05, F06, F40: all ways to save and load; what failed is not there, and the next save works."""
    for found in Job(two, a_job).results(200):
        assert found["nothing yet"].startswith("MissingError: no checkpoint of job 'job'")
        assert found["loaded"] is True
        assert found["files"] == [f"job/step-5/{name}" for name in (".metadata", "__0_0.distcp", "__1_0.distcp")]
        assert "no such luck" in found["failed"]
        assert found["of the failed one"] == (False, ["job/step-5"])
        assert found["saved again"] == (True, 1 + 2 + 2 + 1), "metadata, two tensors on two ranks, and a value"
        assert found["of the writer"] is True
        assert found["by the reader"] is True
        assert "already exists" in found["not over it"]
        assert found["each alone"].startswith("UnsupportedError: use_collectives=False")
        assert "names job 'other'" in found["another job's"]
        assert found["still there"] is True
        assert found["in a thread"] is True
        assert found["in a process"] == (True, 1), "the process that saves takes part in the same incarnation"
        assert found["by threads"] is True
    assert [int(node.status().reserved_bytes) for node in two] == [0, 0]


def from_the_peer() -> tuple[bool, bool, list[str]]:
    good = loads(10, f"{URL}/step-10"), loads(10, f"{URL}/step-10")
    return *good, fsspec.filesystem("replicator").ls("job", detail=False)


def test_a_lost_node_gets_its_files_from_the_peer(two: list[Node]) -> None:
    """F10, F13: a new incarnation, one of its nodes empty."""
    two[1].kill()
    shutil.rmtree(two[1].root)
    assert [result[:2] for result in run_job(two, from_the_peer)] == [(True, True)] * 2


def export(directory: str) -> tuple[bool, bool]:
    """By the reader and by the URL: the model, as Hugging Face has it."""
    state: dict[str, Any] = {"large": torch.zeros_like(state_of(0)["large"])}
    session = replicator.init()
    dcp.load(state, storage_reader=ReplicatedStorageReader(session, step=10))
    writer = HuggingFaceStorageWriter(f"{directory}/hf", save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)
    if dist.get_rank() == 0:
        fsspec.filesystem("replicator").get(f"{URL}/step-10/", f"{directory}/dcp/", recursive=True)
    dist.barrier()
    from safetensors.torch import load_file

    exported = load_file(f"{directory}/hf/model-00001-of-00001.safetensors")
    return list(exported) == ["large"], torch.equal(exported["large"], tensor(10))


def test_exports_go_to_a_directory_and_never_into_the_store(two: list[Node], tmp_path: Path) -> None:
    def held() -> list[tuple[int, int]]:
        return [(int(node.status().sealed_objects), int(node.status().reserved_bytes)) for node in two]

    before = held()
    assert run_job(two, export, str(tmp_path)) == [(True, True)] * 2
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "model.pt")
    saved = torch.load(tmp_path / "model.pt")
    assert torch.equal(saved["large"], tensor(10))
    assert saved["step"] == 10
    assert held() == before


def observe() -> dict[str, Any]:
    """Another job looks into the first: one file at a time, in pieces, and by its own means."""
    found: dict[str, Any] = {}
    fs = fsspec.filesystem("replicator")
    found["jobs"] = fs.ls("replicator://", detail=False)
    found["walked"] = len(fs.find("job/step-10"))
    session = replicator.init()
    data = fs.cat_file("job/step-10/__0_0.distcp")
    info = fs.info("job/step-10/__0_0.distcp")
    found["size"] = len(data) == info["size"] == fs.size("job/step-10_ckpt/__0_0.distcp")
    from replicator.native import crc32c

    found["crc"] = f"{crc32c(data):08x}" == info["crc32c"]
    with fs.open("job/step-10/__0_0.distcp") as file:
        pieces = [file.read(1000)]
        file.seek(3_999_000)
        pieces.append(file.read(500_000))  # over the end of a block
        file.seek(-7, os.SEEK_END)
        pieces.append(file.read())
        pieces.append(file.read(1))
    found["pieces"] = pieces == [data[:1000], data[3_999_000:4_499_000], data[-7:], b""]
    for name, call in {
        "write": lambda: fs.open("job/step-11/x", "wb"),
        "missing": lambda: fs.open("job/step-10/x"),
        "no step": lambda: fs.open("job/step-99/.metadata"),
        "no name": lambda: fs.open("job/latest/.metadata"),
    }.items():
        found[name] = error_of(call)
    found["job"] = session.job
    return found


def test_another_job_may_read(two: list[Node]) -> None:
    """It opens no epoch of the job that it reads: the next test's job is in the third one."""
    found = run_alone(two[0], observe, job="observer")
    assert found["jobs"] == ["job"]
    assert found["walked"] >= 3
    assert found["size"]
    assert found["crc"]
    assert found["pieces"]
    assert "names job 'job'" in found["write"]
    assert found["missing"].startswith("MissingError: ")
    assert found["no step"].startswith("MissingError: Step 99 cannot be restored")
    assert found["no name"].startswith("MissingError: ")


def save_a_draft_that_is_too_large(fs: Any) -> None:
    """The system takes a part of it, and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with fs.open("job/step-21/big.tmp", "wb") as file:
            torch.save(torch.ones(1_000_000), file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def by_hand() -> dict[str, Any]:
    """One process without torch.distributed writes files of its own."""
    found: dict[str, Any] = {}
    fs = fsspec.filesystem("replicator")
    # What is written before dcp.save makes the directory is of the same checkpoint (F07).
    with fs.open("job/step-20/loader/0.txt", "w") as text:
        text.write("position 17\n")
    dcp.save({"w": torch.arange(10)}, checkpoint_id=f"{URL}/step-20", no_dist=True)
    found["text"] = fs.open("job/step-20/loader/0.txt", "r").read()
    found["levels"] = fs.ls("job/step-20", detail=False)
    session = open_session()
    assert session is not None
    found["epoch"] = session.epoch

    with contextlib.suppress(RuntimeError), fs.open("job/step-21/half", "wb") as file:
        file.write(b"half of it")
        raise RuntimeError
    forgotten = fs.open("job/step-21/forgotten", "wb")
    forgotten.write(b"never closed")
    del forgotten
    fs.pipe_file("job/step-21/out", b"x")
    fs.rm("job/step-21/out")
    fs.pipe_file("job/step-21/whole", b"all of it")
    kinds = {}
    for name, call in {
        "twice": lambda: fs.pipe_file("job/step-21/whole", b"other"),
        "append": lambda: fs.open("job/step-21/whole", "ab"),
        "metadata": lambda: fs.open("job/step-21/.metadata", "wb"),
        "no draft": lambda: fs.mv("job/step-21/whole", "job/step-21/part"),
        "gone": lambda: fs.mv("job/step-21/x.tmp", "job/step-21/x"),
        "committed": lambda: fs.rm("job/step-20/loader/0.txt"),
        "directory": lambda: fs.makedirs("job/step-21/model", exist_ok=True),
        "draft in it": lambda: fs.pipe_file("job/step-21/model/.metadata.tmp", b"x"),
        "name": lambda: fs.open("job/step-21/../x", "wb"),
    }.items():
        try:
            call()
        except Exception as error:
            kinds[name] = [kind.__name__ for kind in type(error).__mro__[:-2]]
    found["kinds"] = kinds
    state = {"w": torch.arange(10)}
    found["into a step"] = error_of(lambda: dcp.save(state, checkpoint_id=f"{URL}/step-22/model", no_dist=True))
    found["no step"] = error_of(lambda: dcp.save(state, checkpoint_id=URL, no_dist=True))
    found["no step to load"] = error_of(lambda: dcp.load(state, checkpoint_id=URL, no_dist=True))
    fs.pipe_file("job/step-21/data.tmp", b"x")
    found["renamed"] = error_of(lambda: fs.mv("job/step-21/data.tmp", "job/step-21/model/.metadata"))
    fs.rm("job/step-21/data.tmp")
    found["draft"] = error_of(lambda: save_a_draft_that_is_too_large(fs))
    found["nothing of it"] = error_of(lambda: fs.mv("job/step-21/big.tmp", "job/step-21/big"))
    fs.pipe_file("job/step-21/.metadata.tmp", b"not DCP's")
    found["before"] = fs.exists("job/step-21/whole"), "job/step-21" in fs.ls("job", detail=False)
    fs.mv("job/step-21/.metadata.tmp", "job/step-21/.metadata")
    found["after"] = fs.find("job/step-21")
    found["put"] = put_directories(fs)
    return found


def put_directories(fs: Any) -> list[str]:
    """As a new step, and into one that is being written; what a step cannot be in is refused."""
    with tempfile.TemporaryDirectory() as made:
        (Path(made) / "deep" / "er").mkdir(parents=True)
        for name in ("a", "deep/b", "deep/er/c"):
            (Path(made) / name).write_text(name)
        fs.put(f"{made}/", "job/step-23", recursive=True)
        fs.put(f"{made}/deep/", "job/step-23/more", recursive=True)
        with pytest.raises(ConfigError, match="has no step"):
            fs.put(f"{made}/", "job", recursive=True)
    fs.pipe_file("job/step-23/.metadata.tmp", b"not DCP's")
    fs.mv("job/step-23/.metadata.tmp", "job/step-23/.metadata")
    assert fs.cat_file("job/step-23/deep/er/c") == fs.cat_file("job/step-23/more/er/c") == b"deep/er/c"
    return list(fs.find("job/step-23"))


def test_files_of_ones_own(two: list[Node]) -> None:
    """One commit for all files of a step; what is forgotten, failed or taken out is not in it."""
    found = run_alone(two[0], by_hand)
    assert found["epoch"] == 4, "three jobs before this one, none of them the observer"
    assert found["text"] == "position 17\n"
    assert found["levels"] == ["job/step-20/.metadata", "job/step-20/__0_0.distcp", "job/step-20/loader"]
    assert found["before"] == (True, False)
    assert found["after"] == ["job/step-21/.metadata", "job/step-21/whole"]
    files = (".metadata", "a", "deep/b", "deep/er/c", "more/b", "more/er/c")
    assert found["put"] == [f"job/step-23/{name}" for name in files]
    expected = {
        "twice": ObjectExistsError,
        "append": UnsupportedError,
        "metadata": UnsupportedError,
        "no draft": UnsupportedError,
        "gone": NotFoundError,
        "committed": UnsupportedError,
        "directory": UnsupportedError,
        "draft in it": UnsupportedError,
        "name": InvalidIdError,
    }
    assert {name: kinds[0] for name, kinds in found["kinds"].items() if name != "gone"} == {
        name: kind.__name__ for name, kind in expected.items() if name != "gone"
    }
    assert "UnsupportedError: job/step-22/model is inside of a step" in found["into a step"]
    assert "SaveInParts" in found["into a step"]
    assert "'replicator://job/step-22'" in found["into a step"]
    assert found["renamed"].startswith("UnsupportedError: job/step-21/model/.metadata is inside of a step")
    for told in found["no step"], found["no step to load"]:
        assert "the checkpoint id has no step; give one like 'replicator://my-job/step-100'" in told
    assert found["draft"].startswith("OSError: [Errno 27]"), "and not what torch.save makes of it"
    assert found["nothing of it"].startswith("MissingError")
    assert {"FileNotFoundError", "NotFoundError"} <= set(found["kinds"]["gone"])

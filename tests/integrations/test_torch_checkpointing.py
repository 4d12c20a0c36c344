"""torch_checkpointing, both releases, on two nodes that share nothing: its own managers, writers and processes."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from job_support import Job, Node, nodes, run_alone, wait_until

import replicator
from replicator.client.launch import read_record
from replicator.errors import ConfigError, StaleEpochError, UnsupportedError
from replicator.integrations._logical.layout import Layout, Place

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DEADLINE_S = 4.0
PATIENCE_S = 120.0  # for a process that imports torch on a busy machine
OTHER_RELEASE = "0.1.1"


@pytest.fixture(scope="module")
def other_release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory with the release that is not installed."""
    target = tmp_path_factory.mktemp("torch_checkpointing")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target)]
    command.append(f"torch_checkpointing=={OTHER_RELEASE}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"pip gave no torch_checkpointing {OTHER_RELEASE}: {done.stderr[-200:]}"
    yield target
    shutil.rmtree(target)


def use_release(target: Path | None) -> str:
    """To be called before anything of torch_checkpointing is imported in a rank."""
    if target is not None:
        sys.path.insert(0, str(target))
    import torch_checkpointing

    return str(torch_checkpointing.__version__)


def tensor(seed: int) -> torch.Tensor:
    return torch.rand(300, 700, generator=torch.Generator().manual_seed(seed))


def payload(step: int, again: int = 0) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "model": {"w": distribute_tensor(tensor(step + again), mesh, [Shard(0)])},
        "mine": {"rank": dist.get_rank(), "t": tensor(step + 100 * (1 + dist.get_rank())).to(torch.bfloat16)},
        "step": {"step": step, "again": again},
    }


def blank() -> dict[str, Any]:
    model = {name: torch.zeros_like(one) for name, one in payload(0)["model"].items()}
    return {"model": model, "mine": None, "step": None}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return (
        torch.equal(one["model"]["w"].to_local(), other["model"]["w"].to_local())
        and torch.equal(one["mine"]["t"], other["mine"]["t"])
        and one["mine"]["rank"] == other["mine"]["rank"]
        and dict(one["step"]) == dict(other["step"])
    )


def make_manager(*, synchronous: bool = False, plain: bool = False) -> Any:
    """As a user would: the framework's own config, with a resharder for the model."""
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.checkpoint_process import CheckpointProcessConfig
    from torch_checkpointing.config import AsyncCheckpointSaverConfig, SyncCheckpointSaverConfig

    from replicator.integrations.torch_checkpointing import replicated, without_cuda

    try:
        from torch_checkpointing.dtensor_resharder import DTensorResharder as ModelResharder
    except ImportError:
        from torch_checkpointing.default_resharder import DefaultResharder as ModelResharder
    items = {"model": ItemSpec(resharder=ModelResharder())}
    process = CheckpointProcessConfig(subprocess_init_timeout_secs=int(PATIENCE_S))
    save = SyncCheckpointSaverConfig() if synchronous else AsyncCheckpointSaverConfig(process_config=process)
    config = CheckpointManager.Config(items=items, save=save)
    return without_cuda(CheckpointManager(config if plain else replicated(config)))


def storage_of(manager: Any) -> Any:
    return manager._storage_config.create_storage()


def agent_pid(node: Node) -> int:
    record = read_record(node.root)
    assert record is not None
    return record.pid


# -- what two ranks on two nodes do


def save_and_fail_and_save(target: Path | None, stalled: Node, synchronous: bool) -> dict[str, Any]:
    release = use_release(target)
    seen: dict[str, Any] = {"release": release}
    with replicator.init() as session:
        manager = make_manager(synchronous=synchronous)
        storage = storage_of(manager)

        def save(step: int, again: int = 0) -> BaseException | None:
            future = manager.save(f"/ckpt/step-{step}", payload(step, again))
            return None if future is None else future.exception(PATIENCE_S)

        assert save(5) is None
        dist.barrier()
        seen["after 5"] = (storage.exists(Path("/ckpt/step-5")), storage.exists(Path("/ckpt/tmp_step-5")))
        seen["names"] = storage.ls(Path("/ckpt/step-5"))
        first = session.lookup(5).require()

        assert save(5, again=1) is None
        dist.barrier()
        second = session.lookup(5).require()
        seen["generations"] = (first.generation < second.generation, session.lookup().version == second)
        seen["again"] = same(manager.load("/ckpt/step-5", into=blank()), payload(5, again=1))

        # Rank 1's node has an agent that does not answer: its files cannot be written, and copies of others not made.
        if dist.get_rank() == 1:
            os.kill(agent_pid(stalled), signal.SIGSTOP)
        dist.barrier()
        seen["failed save"] = save(6)
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(agent_pid(stalled), signal.SIGCONT)
        dist.barrier()
        seen["after failure"] = session.lookup().step

        assert save(8) is None
        dist.barrier()
        seen["after"] = session.lookup().step
        seen["listed"] = storage.ls(Path("/ckpt"))
        manager.close()

        storage.write(Path("tmp_step-9/same"), b"rank %d" % dist.get_rank())
        storage.ready("step-9")
        dist.barrier()
        if dist.get_rank() == 0:
            storage.rename(Path("tmp_step-9"), Path("step-9"), is_directory=True)
        seen["clash"] = (storage.finish("step-9"), storage.exists(Path("step-9")), session.lookup().step)
    return seen


def load_newest(target: Path | None, step: int, again: int) -> tuple[int, bool]:
    use_release(target)
    with replicator.init():
        from replicator.integrations.torch_checkpointing import load_latest

        manager = make_manager(synchronous=True)
        found = load_latest(manager, into=blank())
        assert found is not None
        manager.close()
        return found[0], same(dict(found[1]), payload(step, again))


def load_as_one_rank(folder: Path, step: int) -> tuple[bool, bool]:
    """What two ranks saved: from memory; and from a plain disk, to which the files were copied, without replication."""
    with replicator.init():
        from replicator.integrations.torch_checkpointing import load_latest

        manager = make_manager(synchronous=True)
        found = load_latest(manager, into=blank())
        assert found is not None
        storage = storage_of(manager)
        copy = folder / f"step-{step}"
        copy.mkdir()
        for name in storage.ls(Path(copy.name)):
            (copy / name).write_bytes(storage.read(Path(copy.name) / name))
        manager.close()
    plain = make_manager(synchronous=True, plain=True)
    loaded = plain.load(copy, into=blank())
    plain.close()
    return same(dict(found[1]), payload(step)), same(dict(loaded), payload(step))


@pytest.mark.timeout(4 * PATIENCE_S)
@pytest.mark.parametrize(("release", "synchronous"), [("0.1.0", False), (OTHER_RELEASE, True)])
def test_two_nodes_save_lose_one_and_load(
    release: str, synchronous: bool, shm_root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """F40, F41, F42: one rename on rank 0 gives every node the step; trouble in a save leaves the saver usable."""
    target = request.getfixturevalue("other_release") if release == OTHER_RELEASE else None
    with nodes(shm_root, 2, deadline_s=DEADLINE_S) as two:
        for seen in Job(two, save_and_fail_and_save, target, two[1], synchronous).results(2 * PATIENCE_S):
            assert seen["release"] == release
            assert seen["after 5"] == (True, False)
            assert {"mine_0.pt", "mine_1.pt", "model_0.pt", "model_1.pt", "step_0.pt", "step_1.pt"} < set(seen["names"])
            assert seen["generations"] == (True, True)
            assert seen["again"]
            assert seen["failed save"] is None
            assert seen["after failure"] in (5, 6)
            assert seen["after"] == 8
            assert "step-8" in seen["listed"]
            assert not any(name.startswith("tmp_") for name in seen["listed"])
            assert seen["clash"] == (False, False, 8)
        wait_until(lambda: all(8 in protected_steps(node) for node in two[:1]), 20)
        two[1].kill()
        shutil.rmtree(two[1].root)
        two[1].start()
        assert Job(two, load_newest, target, 8, 0).results(PATIENCE_S) == [(8, True), (8, True)]
        if target is None:
            # F10: a job of another size, and files that are the framework's own.
            assert Job(two[:1], load_as_one_rank, tmp_path, 8).results(PATIENCE_S) == [(True, True)]


def protected_steps(node: Node) -> set[int]:
    return {job.newest_protected_step for job in node.status().jobs if job.has_protected}


# -- one process


def every_method(path: Path) -> None:
    from replicator.integrations.torch_checkpointing import ReplicatorStorageConfig, prune

    with replicator.init() as session:
        config = ReplicatorStorageConfig(session=session)
        storage = config.create_storage()
        assert pickle.loads(pickle.dumps(config)).create_storage() is storage
        root = path
        assert storage.ls(root) == []
        assert storage.glob(f"{root}/step-*") == []

        def save(step: int, text: bytes) -> None:
            temporary = root / f"tmp_step-{step}"
            storage.mkdir(temporary / "deep")
            storage.write(temporary / "deep" / "a.bin", text)
            with storage.stream_write(temporary / "b.bin") as file:
                file.write(b"12")
                file.write(memoryview(b"345"))
            storage.write(temporary / "none", b"")
            storage.write(temporary / "not-wanted", b"x")
            storage.delete(temporary / "not-wanted")
            with pytest.raises(TypeError), storage.stream_write(temporary / "broken") as file:
                file.write([b"half"])
            assert storage.exists(temporary)
            assert storage.isdir(temporary / "deep")
            assert storage.getsize(temporary / "b.bin") == 5
            assert sorted(storage.ls(temporary)) == ["b.bin", "deep", "none"]
            storage.rename(temporary, root / f"step-{step}", is_directory=True)
            assert not storage.exists(temporary)
            assert storage.exists(root / f"step-{step}")

        big = os.urandom(9 << 20)
        save(1, big)
        assert storage.finish(root / "step-1")
        assert storage.read(root / "step-1" / "deep" / "a.bin") == big
        assert storage.read(root / "step-1" / "none") == b""
        with storage.stream_read(root / "step-1" / "deep" / "a.bin", no_prefetch()) as stream:
            assert stream.seek(5_000_001) == 5_000_001
            assert stream.read(100) == big[5_000_001:5_000_101]
            target = bytearray(6 << 20)
            stream.seek(-len(target), os.SEEK_END)
            assert stream.readinto(target) == len(target)
            assert target == big[-len(target) :]
            assert stream.readinto(target) == 0
        assert storage.ls(root) == ["step-1"]
        assert storage.glob(f"{root}/step-*") == [f"{root}/step-1"]
        assert storage.remap_path(root / "step-1" / "b.bin") == f"replicator://{session.job}/step-1_ckpt/b.bin"
        with pytest.raises(FileNotFoundError):
            storage.stream_read(root / "step-1" / "c.bin")
        with pytest.raises(FileNotFoundError):
            storage.getsize(root / "step-2" / "b.bin")
        with pytest.raises(UnsupportedError, match="never changed"):
            storage.delete(root / "step-1" / "b.bin")
        with pytest.raises(UnsupportedError, match="directory of a step"):
            storage.write(root / "latest.txt", b"1")
        with pytest.raises(UnsupportedError, match="newest"):
            storage.rmdir(root / "step-1")

        save(1, b"again")
        assert storage.read(root / "step-1" / "deep" / "a.bin") == b"again"
        save(2, b"two")
        storage.mkdir(root / "tmp_step-3")
        storage.write(root / "tmp_step-3" / "x", b"x")
        assert storage.ls(root) == ["step-1", "step-2", "tmp_step-3"]
        assert prune(storage, root, 1) == [root / "step-1"]
        storage.rmdir(root / "step-1")
        storage.rmdir(root / "tmp_step-3")
        assert storage.ls(root) == ["step-2"]
        assert not storage.exists(root / "step-1")
        assert session.lookup().step == 2

        # Without a barrier the framework writes to the final name, and the end of it is the finalize callback.
        storage.write(root / "step-4" / "x", b"four")
        assert session.lookup().step == 2
        assert storage.finish(root / "step-4")
        assert session.lookup().step == 4

        replicator.init(session.job).close()
        with pytest.raises(StaleEpochError):
            storage.write(root / "tmp_step-5" / "x", b"x")
    storages_are_bounded()


def storages_are_bounded() -> None:
    """Those of a session that is over go, and of one that goes on only so many are kept."""
    from replicator.integrations import torch_checkpointing as integration

    with replicator.init() as session:
        for number in range(integration.MAX_STORAGES + 2):
            config = integration.ReplicatorStorageConfig(session=session, name=f"n{number}")
            assert config.create_storage() is config.create_storage()
        kept = [config for config, _ in integration._storages.values()]
        assert [config.name for config in kept] == [f"n{number + 2}" for number in range(integration.MAX_STORAGES)]
        assert all(config.session is session for config in kept)


def no_prefetch() -> Any:
    from torch_checkpointing.storage.base_storage import ReadArgs

    return ReadArgs(pre_read_full_file=False)


def test_every_method_of_the_storage(shm_root: Path) -> None:
    with nodes(shm_root, 1) as (node,):
        run_alone(node, every_method, Path("/anywhere/at/all"))


@pytest.mark.parametrize("wrong", [{"wait_for": "copies"}, {"wait_s": 0}, {"wait_s": -1.0}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    from replicator.integrations.torch_checkpointing import ReplicatorStorageConfig

    with pytest.raises(ConfigError, match=f"{next(iter(wrong))}: expected"):
        ReplicatorStorageConfig(**wrong)


def test_layout_of_names() -> None:
    layout = Layout()
    assert layout.place("/a/step-5/deep/x.pt") == Place(5, "deep/x.pt", "step-5", False)
    assert layout.place("tmp_step-0") == Place(0, "", "tmp_step-0", True)
    assert layout.place("/a/step-7.partial/x") == Place(7, "x", "step-7.partial", True)
    assert layout.place("/a/step-07").is_root
    # What is above a step may be called like one: a job that goes on from another one's step 1000.
    assert layout.place("/a/step-1000/tuned/step-5/x") == Place(5, "x", "step-5", False)
    assert layout.place("/a/step-1000/tuned/tmp_step-5") == Place(5, "", "tmp_step-5", True)
    assert layout.place("/a/step-x").is_root
    assert layout.place("/a").is_root
    padded = Layout("iter_{step:09d}", "new-")
    assert padded.name_of(5) == "iter_000000005"
    assert padded.place("/a/new-iter_000000005/y") == Place(5, "y", "new-iter_000000005", True)
    for wrong in ("step", "{step}", "{step}-{step}", "a/{step}x", "{other}x", "step-{step"):
        with pytest.raises(ConfigError, match="directory"):
            Layout(wrong)

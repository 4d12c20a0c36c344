"""Each promise of the stages of a save, by a process that is alone with a real agent."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import pickle
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from job_support import nodes, wait_until
from saver_support import bits, load, loader_of, planned, protected, same, save, saver_of, with_results
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.planner import WriteItemType

import replicator
from replicator.checkpoint import CheckpointObjectManager, CheckpointSaver, DefaultCheckpointSaver
from replicator.client.session import Session
from replicator.errors import ConfigError, InvalidIdError, ObjectExistsError, SaveError, StoreFullError
from replicator.ids import CheckpointContainerId, CheckpointObjectId

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    base = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
    with nodes(base, 1) as (node,), replicator.init("job", root=node.root, deadline_s=node.deadline_s) as made:
        yield made
    shutil.rmtree(base, ignore_errors=True)


@pytest.fixture
def steps(session: Session) -> int:
    """A step above all that were saved."""
    newest = session.lookup().step
    return 1 if newest is None else newest + 1


def state() -> dict[str, Any]:
    whole = torch.arange(40.0)
    return {
        "w": torch.arange(6.0).view(2, 3),
        "part": whole[10:20],
        "turned": torch.arange(12.0).view(3, 4).t(),
        "half": torch.randn(5).to(torch.bfloat16),
        "note": {"words": ["a", 1]},
    }


def marks(session: Session) -> list[str]:
    return sorted(path.name for path in (session.agent.paths.unfinished / "job").glob("*"))


def begun(session: Session, step: int, **options: Any) -> DefaultCheckpointSaver:
    saver = saver_of(session, **options)
    saver.initialize_checkpoint(step)
    return saver


def prepared(saver: CheckpointSaver, step: int, values: dict[str, Any], count: int = 1) -> Any:
    planner, plan, metadata = planned(values)
    return saver.prepare_write_data(step, plan.items, planner, "__0", count), metadata


# -- initialize_checkpoint


def test_the_mark_is_there_before_the_container(session: Session, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """First of all the container is marked as unfinished for this local rank."""
    seen: list[list[str]] = []
    begin = Session.begin

    def watched(self: Session, *args: Any) -> Any:
        seen.append(marks(session))
        return begin(self, *args)

    monkeypatch.setattr(Session, "begin", watched)
    saver = begun(session, steps, local_rank_getter=lambda: 3)
    assert seen == [[f"step-{steps}_ckpt__3__unfinished"]]
    assert marks(session) == seen[0]
    assert json.loads((session.agent.paths.unfinished / "job" / seen[0][0]).read_bytes())["pid"] == os.getpid()
    assert session.lookup(steps).found is False
    with pytest.raises(SaveError, match="has no metadata"):
        saver.finalize_checkpoint(steps)
    assert marks(session) == []


def test_a_save_that_was_left_is_told_by_the_next(
    session: Session, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """F05: what it wrote is dropped, and the mark it left goes with a word about who left it."""
    saver = begun(session, steps)
    buckets, _ = prepared(saver, steps, state())
    saver.write_data(steps, buckets, True)
    directory = session.agent.paths.objects_of(saver._save.version)  # type: ignore[union-attr]
    assert list(directory.iterdir())
    with caplog.at_level(logging.WARNING):
        saver.initialize_checkpoint(steps + 1)
    assert f"step-{steps}_ckpt was left unfinished by rank 0 (pid {os.getpid()}" in caplog.text
    assert marks(session) == [f"step-{steps + 1}_ckpt__0__unfinished"]
    wait_until(lambda: not directory.exists(), 10)
    with pytest.raises(ConfigError, match="call initialize_checkpoint first"):
        saver.write_data(steps, buckets, True)


# -- stage_data


def test_staged_tensors_are_owned_and_the_rest_passes_through(session: Session, steps: int) -> None:
    """F02: later training steps do not change them."""
    saver = begun(session, steps)
    values = state()
    expected = {key: value.clone() for key, value in values.items() if isinstance(value, torch.Tensor)}
    staged = saver.stage_data(steps, values)
    assert staged["note"] is values["note"]
    for key, wanted in expected.items():
        values[key].zero_()
        assert same(staged[key], wanted), key
        assert staged[key].device.type == "cpu"


def test_the_copy_can_be_left_out_by_those_who_may(session: Session, steps: int) -> None:
    saver = begun(session, steps, copy_cpu_tensors=False)
    values = state()
    staged = saver.stage_data(steps, values)
    assert all(staged[key].data_ptr() == value.data_ptr() for key, value in values.items() if key != "note")


def test_memory_of_a_staged_save_serves_the_next_one_only_when_free(session: Session, steps: int) -> None:
    """F03."""
    saver = begun(session, steps)
    values = {"w": torch.ones(1000)}
    first = saver.stage_data(steps, values)["w"]
    place = first.data_ptr()
    assert saver.stage_data(steps, values)["w"].data_ptr() != place
    del first


class Device:
    """Stands for the module of an accelerator, which this machine has not: says when it was waited for."""

    def __init__(self) -> None:
        self.waited: list[str] = []

    def synchronize(self, device: torch.device) -> None:
        self.waited.append(device.type)


def test_copies_from_a_device_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when they are started without waiting, and when a later one cannot be started."""
    from replicator.checkpoint.staging import Stager

    device = Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    copies: list[bool] = []

    class OnDevice(torch.Tensor):
        pass

    def copy(self: torch.Tensor, other: Any, non_blocking: bool = False) -> torch.Tensor:
        copies.append(non_blocking)
        if len(copies) == 3:
            raise RuntimeError("the device is lost")
        return self

    stager = Stager()
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    target, source = torch.zeros(2), torch.empty(2, device="meta")
    stager._copying = set()
    stager._copy_other(target, source)
    assert (copies, stager._copying) == ([True], {torch.device("meta")})
    monkeypatch.setattr(Stager, "_copy", lambda self, value, *_: self._copy_other(target, value) or target)
    stager.stage({"a": source}, non_blocking=True)
    assert device.waited == ["meta"]
    with pytest.raises(RuntimeError, match="lost"):
        stager.stage({"a": source, "b": source}, non_blocking=True)
    assert device.waited == ["meta", "meta"] or copies[2:] == [True]


# -- prepare_write_data


class Resolver:
    """Is no planner, and gives values all the same."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def resolve_data(self, write_item: Any) -> Any:
        return self.values[write_item.index.fqn]


def test_any_object_that_resolves_items_will_do(session: Session, steps: int) -> None:
    saver = begun(session, steps)
    values = {"a": torch.ones(3), "b": torch.zeros(2)}
    _, plan, _ = planned(values)
    (bucket,) = saver.prepare_write_data(steps, plan.items, Resolver(values), "x", 1)
    assert sorted(item.index.fqn for item, _ in bucket.tensor_data) == ["a", "b"]


@pytest.mark.parametrize(("count", "made"), [(-1, 1), (0, 1), (1, 1), (3, 3), (50, 8)])
def test_items_are_split_by_size_into_at_least_one_bucket(session: Session, steps: int, count: int, made: int) -> None:
    saver = begun(session, steps, global_rank_getter=lambda: 0)
    values = {f"t{i}": torch.ones(100 * (i + 1)) for i in range(8)}
    buckets, _ = prepared(saver, steps, values, count)
    assert [bucket.object_name for bucket in buckets] == [f"__0_{n}_src0.distcp" for n in range(made)]
    assert [str(bucket.object_id) for bucket in buckets] == [
        f"job/step-{steps}_ckpt/{bucket.object_name}" for bucket in buckets
    ]
    sizes = [sum(tensor.nbytes for _, tensor in bucket.tensor_data) for bucket in buckets]
    assert sum(sizes) == 4 * 100 * 36
    assert made < 3 or max(sizes) <= 2 * min(sizes) or made == 8


def test_views_and_strided_tensors_become_contiguous_copies(session: Session, steps: int) -> None:
    saver = begun(session, steps)
    values = state()
    buckets, _ = prepared(saver, steps, values)
    found = {item.index.fqn: tensor for item, tensor in buckets[0].tensor_data}
    for key in ("part", "turned"):
        assert same(found[key], values[key])
        assert found[key].is_contiguous()
        assert found[key].untyped_storage().nbytes() == found[key].nbytes
        assert found[key].data_ptr() != values[key].data_ptr()
    assert found["w"].data_ptr() == values["w"].data_ptr(), "what is whole and contiguous is not copied twice"


# -- both orders, to the end


@pytest.mark.parametrize("order", ["megatron", "dcp"])
@pytest.mark.parametrize("optimized", [True, False])
def test_both_orders(session: Session, steps: int, order: str, optimized: bool) -> None:
    """F02: training changes the tensors after `stage_data`; what is loaded is what they were, bit for bit."""
    saver = saver_of(session, use_optimized_save=optimized)
    values = state()
    expected = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in values.items()}
    info = protected(save(saver, steps, values, order=order, buckets=2))
    assert info.version.container.step == steps
    found = {
        key: torch.zeros_like(value) if isinstance(value, torch.Tensor) else None for key, value in state().items()
    }
    assert load(loader_of(session), found) == steps
    assert all(same(found[key], expected[key]) for key in expected if key != "note")
    stock = {key: torch.zeros_like(value) for key, value in state().items() if isinstance(value, torch.Tensor)}
    directory = session.agent.paths.objects_of(info.version)
    torch.distributed.checkpoint.load(stock, storage_reader=FileSystemReader(directory), no_dist=True)
    assert all(same(stock[key], expected[key]) for key in stock)


# -- write_data


def test_results_are_where_the_items_are(session: Session, steps: int) -> None:
    """Tensors stand before byte items; `(relative_path, offset, length)` is what DCP's own reader takes."""
    saver = begun(session, steps)
    values = state()
    buckets, _ = prepared(saver, steps, values)
    results = saver.write_data(steps, buckets, False)
    blobs = [one for one in results if one.index.fqn.startswith("note")]
    tensors = [one for one in results if one not in blobs]
    assert blobs
    assert max(one.storage_data.offset for one in tensors) < min(one.storage_data.offset for one in blobs)
    one = CheckpointObjectId(CheckpointContainerId("job", steps), buckets[0].object_name)
    with CheckpointObjectManager.get_buffer(saver._objects, one) as held:
        for result in tensors:
            info = result.storage_data
            assert info.relative_path == buckets[0].object_name
            assert result.size_in_bytes == info.length
            found = torch.load(io.BytesIO(held.view[info.offset : info.offset + info.length]), weights_only=True)
            assert same(found, values[result.index.fqn])


def test_every_error_is_logged_and_all_are_raised_together(
    session: Session, steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    saver = begun(session, steps)
    values = {f"t{i}": torch.ones(10) for i in range(3)}
    buckets, _ = prepared(saver, steps, values, 3)
    for bucket in buckets[:2]:
        bucket.tensor_data = [(item, tensor.to("meta")) for item, tensor in bucket.tensor_data]
    with pytest.raises(replicator.ReplicatorError) as caught:
        saver.write_data(steps, buckets, False, 3)
    bad = [bucket.tensor_data[0][0].index.fqn for bucket in buckets[:2]]
    for key in bad:
        assert repr(key) in str(caught.value)
        assert repr(key) in caplog.text
    failed = f"{buckets[0].object_name} of job/step-{steps}_ckpt on rank 0 could not be written: UnsupportedError: key"
    assert failed in caplog.messages[0] + caplog.messages[1]
    assert isinstance(caught.value.__cause__, ExceptionGroup)
    assert len(caught.value.__cause__.exceptions) == 2
    # What is sound is written, and the same again is no error: an earlier attempt is written over.
    assert len(saver.write_data(steps, buckets[2:], False)) == 1


def test_an_earlier_attempt_is_written_over(session: Session, steps: int) -> None:
    """Of the same step, and within one save: what was written last counts, whatever was there before it."""
    saver = saver_of(session)
    save(saver, steps, {"w": torch.full((5,), 1.0)})
    protected(save(saver, steps, {"w": torch.full((5,), 2.0)}))
    found = {"w": torch.zeros(5)}
    assert load(loader_of(session), found) == steps
    assert found["w"].eq(2).all()
    saver.initialize_checkpoint(steps + 1)
    names = []
    for value in (3.0, 3.0, 4.0, 3.0):
        buckets, metadata = prepared(saver, steps + 1, {"w": torch.full((5,), value)})
        results = saver.write_data(steps + 1, buckets, True)
        names.append(buckets[0].object_name)
        assert [one.storage_data.relative_path for one in results] == names[-1:]
    first, second, third = (f"__0_0_src0{again}.distcp" for again in ("", ".1", ".2"))
    assert names == [first, first, second, third]
    saver.write_metadata(steps + 1, with_results(metadata, results))
    # What the metadata list stays.
    late, _ = prepared(saver, steps + 1, {"w": torch.full((5,), 5.0)})
    with pytest.raises(ObjectExistsError, match=r"__0_0_src0\.2\.distcp is sealed with .* Begin a new attempt"):
        saver.write_data(steps + 1, late, True)
    # Metadata have one name. Whoever reads them must not find those of another writing.
    with pytest.raises(ObjectExistsError, match=r"\.metadata.* save the step again|Begin a new attempt"):
        saver.write_metadata(steps + 1, metadata)
    info = protected(saver.finalize_checkpoint(steps + 1))
    plan = session.lookup(steps + 1)
    assert (plan.version, [source.name for source in plan.sources]) == (info.version, [".metadata", third])
    assert load(loader_of(session), found) == steps + 1
    assert found["w"].eq(3).all()


def test_what_was_written_over_cannot_be_committed(session: Session, steps: int) -> None:
    """F01: metadata that speak of the first writing are of no checkpoint."""
    saver = begun(session, steps)
    buckets, metadata = prepared(saver, steps, {"w": torch.ones(5)})
    results = saver.write_data(steps, buckets, True)
    other, _ = prepared(saver, steps, {"w": torch.zeros(5)})
    saver.write_data(steps, other, True)
    saver.write_metadata(steps, with_results(metadata, results))
    with pytest.raises(SaveError, match=r"objects that no rank sealed, or that were written again since: __0_0_src0\."):
        saver.finalize_checkpoint(steps)
    assert not session.lookup(steps).found


def test_threads_of_pytorch_are_bounded_and_restored(
    session: Session, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = begun(session, steps)
    buckets, _ = prepared(saver, steps, {f"t{i}": torch.ones(10) for i in range(4)}, 4)
    during: list[int] = []
    writers: set[int] = set()
    write = DefaultCheckpointSaver._write

    def watched(self: Any, *args: Any) -> Any:
        during.append(torch.get_num_threads())
        writers.add(threading.get_ident())
        return write(self, *args)

    monkeypatch.setattr(DefaultCheckpointSaver, "_write", watched)

    def in_a_new_thread() -> int:
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        saver.write_data(steps, buckets, False, 2)
        assert during == [2] * 4
        assert in_a_new_thread() == 7
        assert len(writers) <= 2
        assert threading.get_ident() not in writers
        during.clear()
        saver.write_data(steps, buckets, False)
        assert during == [4] * 4
        assert torch.get_num_threads() == 7
    finally:
        torch.set_num_threads(before)


def test_buffers_grow_when_the_size_was_too_small(session: Session, steps: int) -> None:
    saver = saver_of(session, initial_buffer_size_bytes=4096)
    values = {"w": torch.randn(3 << 20)}
    expected = values["w"].clone()
    protected(save(saver, steps, values))
    found = {"w": torch.zeros(3 << 20)}
    load(loader_of(session), found)
    assert same(found["w"], expected)


def test_an_initial_size_beyond_the_budget_says_so(session: Session, steps: int) -> None:
    """F22: with numbers."""
    saver = begun(session, steps, initial_buffer_size_bytes=1 << 50)
    buckets, _ = prepared(saver, steps, state())
    with pytest.raises(StoreFullError, match=r"__0_0_src0\.distcp"):
        saver.write_data(steps, buckets, False)


# -- write_metadata and finalize_checkpoint


def test_metadata_are_written_by_local_rank_0_and_whole(session: Session, steps: int) -> None:
    """And by the rank that commits, which need not be one."""
    for writes, global_rank, local_rank in ((False, 1, 1), (True, 1, 0), (True, 0, 1)):
        numbers = [0, local_rank]
        saver = begun(
            session, steps, global_rank_getter=lambda of=numbers: of[0], local_rank_getter=lambda of=numbers: of[1]
        )
        buckets, metadata = prepared(saver, steps, {"w": torch.ones(3)})
        metadata = with_results(metadata, saver.write_data(steps, buckets, False))
        numbers[0] = global_rank
        saver.write_metadata(steps, metadata, "model/.metadata")
        directory = session.agent.paths.objects_of(saver._save.version)  # type: ignore[union-attr]
        written = [path for path in directory.iterdir() if "metadata" in path.name]
        assert len(written) == writes
    one = CheckpointObjectId(CheckpointContainerId("job", steps), "model/.metadata")
    with saver._objects.get_buffer(one) as held:
        assert pickle.loads(held.view) == metadata


def test_equal_metadata_give_equal_bytes() -> None:
    """Also when they came by pickle, so that all nodes write the same object."""
    from replicator.checkpoint.metadata_bytes import metadata_bytes

    _, _, metadata = planned({f"layer.{i}.weight": torch.ones(3, 4) for i in range(50)} | {"note": [1, 2]})
    far = pickle.loads(pickle.dumps(metadata))
    further = dataclasses.replace(far, state_dict_metadata=dict(pickle.loads(pickle.dumps(far)).state_dict_metadata))
    assert metadata_bytes(metadata) == metadata_bytes(far) == metadata_bytes(further)
    assert pickle.loads(metadata_bytes(further)) == metadata


def test_objects_that_the_metadata_list_must_be_there(session: Session, steps: int) -> None:
    """F06: a commit needs every object."""
    saver = begun(session, steps)
    buckets, metadata = prepared(saver, steps, {"w": torch.ones(3)})
    results = saver.write_data(steps, buckets, False)
    lost = dataclasses.replace(results[0].storage_data, relative_path="__1_0_src1.distcp")
    saver.write_metadata(steps, dataclasses.replace(metadata, storage_data={results[0].index: lost}))
    with pytest.raises(SaveError, match=r"no rank sealed, or that were written again since: __1_0_src1\.distcp"):
        saver.finalize_checkpoint(steps)
    assert not session.lookup(steps).found


def test_superseded_checkpoints_go_in_the_background(session: Session, steps: int) -> None:
    """F04: under the retention rules, which keep two."""
    saver = saver_of(session)
    infos = [protected(save(saver, steps + i, {"w": torch.ones(4)})) for i in range(4)]
    directories = [session.agent.paths.objects_of(info.version) for info in infos]
    wait_until(lambda: [path.exists() for path in directories] == [False, False, True, True], 20)
    found = loader_of(session).get_candidate_checkpoints("job")
    # What was looked up last is kept for a load.
    assert [one.step for one in found if one.step >= steps] == [steps + 3, steps + 2]


# -- the loader


def test_the_loader_says_what_is_wrong(session: Session, steps: int) -> None:
    protected(save(saver_of(session), steps, {"w": torch.ones(4)}))
    loader = loader_of(session)
    container = CheckpointContainerId("job", steps)
    with pytest.raises(ConfigError, match="before read_metadata"):
        loader.read_data(CheckpointObjectId(container, "x"), [], planned({})[0], {})
    with pytest.raises(replicator.ReplicatorError, match=r"no object 'model/.metadata'"):
        loader.read_metadata(steps, "model/.metadata")
    with pytest.raises(ConfigError, match="belongs to job 'job'"):
        loader.get_latest_complete_checkpoint("other")
    with pytest.raises(replicator.ReplicatorError, match=r"\S"):
        loader.read_metadata(steps + 1000)


def test_the_saver_is_an_abstract_class() -> None:
    assert CheckpointSaver.__abstractmethods__ == {
        "initialize_checkpoint",
        "stage_data",
        "prepare_write_data",
        "write_data",
        "async_replicate_object",
        "write_metadata",
        "finalize_checkpoint",
    }
    assert not DefaultCheckpointSaver.__abstractmethods__


def test_byte_items_are_byte_items(session: Session, steps: int) -> None:
    """A value that is no tensor goes as bytes, wherever its stream stands."""
    saver = begun(session, steps)
    buckets, _ = prepared(saver, steps, {"note": {"a": 1}})
    ((item, blob),) = buckets[0].bytesio_data
    assert item.type == WriteItemType.BYTE_IO
    blob.read()
    (result,) = saver.write_data(steps, buckets, False)
    assert result.size_in_bytes == len(blob.getvalue()) > 0
    assert bits(torch.ones(1)).numel() == 4


# -- bad input, each with its key or rank; what was saved before is still there, and the next save works


def test_bad_input(session: Session, steps: int) -> None:
    protected(save(saver_of(session), steps, {"w": torch.full((3,), 7.0)}))
    saver = saver_of(session)
    for root in ("/", "", "latest"):
        with pytest.raises(InvalidIdError, match="a checkpoint id that ends in a step"):
            saver.initialize_checkpoint(root)
    with pytest.raises(ConfigError, match="expected a rank of the 1 that this session has, found 5"):
        saver_of(session, global_rank_getter=lambda: 5).initialize_checkpoint(steps + 1)
    with pytest.raises(ConfigError, match="local rank from 0 on, found -1"):
        saver_of(session, local_rank_getter=lambda: -1).initialize_checkpoint(steps + 1)
    assert not [name for name in marks(session) if name.startswith(f"step-{steps + 1}_")]

    saver.initialize_checkpoint(steps + 1)
    nested = {"model": {"layer": [torch.ones(1)]}}
    with pytest.raises(ConfigError, match=r"key 'model': expected a flattened .* at model\['layer'\]\[0\]"):
        saver.stage_data(steps + 1, nested)
    with pytest.raises(ConfigError, match=r"expected a state dict, .* found list"):
        saver.stage_data(steps + 1, [("w", torch.ones(1))])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="found 3"):
        saver.stage_data(steps + 1, {3: torch.ones(1)})  # type: ignore[dict-item]
    values = {"w": torch.ones(3)}
    planner, plan, _ = planned(values)
    with pytest.raises(SaveError, match="key 'w' occurs twice in the items of rank 0"):
        saver.prepare_write_data(steps + 1, [*plan.items, *plan.items], planner, "__0", 2)
    with pytest.raises(SaveError, match=r"key 'w': its value cannot be had: KeyError"):
        saver.prepare_write_data(steps + 1, plan.items, Resolver({}), "__0", 1)
    with pytest.raises(SaveError, match="key 'w': expected the planner to give a Tensor, found BytesIO"):
        saver.prepare_write_data(steps + 1, plan.items, Resolver({"w": io.BytesIO()}), "__0", 1)
    with pytest.raises(InvalidIdError, match="object name"):
        saver.prepare_write_data(steps + 1, plan.items, planner, "../__0", 1)
    buckets = saver.prepare_write_data(steps + 1, plan.items, planner, "__0", 1)
    with pytest.raises(ConfigError, match=r"rank 0 has two buckets called '__0_0_src0\.distcp'"):
        saver.write_data(steps + 1, [*buckets, *buckets], False)
    other = dataclasses.replace(buckets[0], object_name="other.distcp")
    with pytest.raises(ConfigError, match=r"expected buckets of .*'other\.distcp'"):
        saver.write_data(steps + 1, [other], False)
    with pytest.raises(SaveError, match="metadata"):
        saver.finalize_checkpoint(steps + 1)
    found = {"w": torch.zeros(3)}
    assert load(loader_of(session), found) == steps
    assert found["w"].eq(7).all()

    protected(save(saver, steps + 1, values))
    assert load(loader_of(session), found) == steps + 1


def test_a_pickled_saver_is_for_writing_alone(session: Session, steps: int) -> None:
    saver = begun(session, steps)
    other = pickle.loads(pickle.dumps(saver))
    with pytest.raises(SaveError, match=r"in the process that made the saver"):
        other.finalize_checkpoint(steps)

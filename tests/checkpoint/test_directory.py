"""commit_dir and restore_dir: what goes in comes out, from one rank and from several, or nothing does."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from job_support import Job, Node, nodes, run_job

import replicator
from replicator.checkpoint.listing import Found, list_files, share_out
from replicator.client.retrieval import lookup
from replicator.client.session import Session, open_session
from replicator.errors import (
    ConfigError,
    DirectoryError,
    InvalidIdError,
    NoRecoverableCheckpointError,
    ReplicatorError,
    StoreError,
)
from replicator.partial_dir import PartialDirectory

FILES = {"model.safetensors": b"w" * 3_000_001, "nested/deep/state.bin": b"s" * 17, "empty": b"", ".hidden": b"h"}


def make(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_what_is_committed_comes_back(session: Session, tmp_path: Path) -> None:
    """Also from step 0 (F14); a step that is committed again is the newer one; a link is its file."""
    assert not session.lookup().found
    with pytest.raises(NoRecoverableCheckpointError):
        replicator.restore_dir(tmp_path / "none", session.job)
    source = make(tmp_path / "a", FILES)
    (source / "no files here").mkdir()
    (tmp_path / "blob").write_bytes(b"blob")
    (source / "link").symlink_to(tmp_path / "blob")
    done = replicator.commit_dir(source, session.job, 0, session=session)
    assert (done.objects, done.size_bytes) == (5, sum(map(len, FILES.values())) + 4)
    done.wait_protected(10)
    for name in FILES:
        (source / name).unlink()  # the bytes are in memory
    back = replicator.restore_dir(tmp_path / "b", session.job)
    assert content(tmp_path / "b") == {**FILES, "link": b"blob"}
    assert (back.version, back.written, back.pulled) == (done.version, True, ())
    assert not replicator.restore_dir(tmp_path / "b", session.job, 0).written, "it lies there"

    make(source, {"empty": b"no more"})
    again = replicator.commit_dir(source, None, 0)
    assert again.version > done.version
    assert again.protected is not None
    assert again.protected.result(10).is_protected
    with pytest.raises(ConfigError, match="not empty"):
        replicator.restore_dir(tmp_path / "b")
    assert len(content(tmp_path / "b")) == 5
    assert replicator.restore_dir(tmp_path / "b", replace=True).written
    assert content(tmp_path / "b") == {"empty": b"no more", "link": b"blob"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "blob"], "nothing is left beside it"
    with pytest.raises(ConfigError, match="not a directory"):
        replicator.restore_dir(tmp_path / "nowhere" / "x")
    with pytest.raises(ConfigError, match="a session of job other"):
        replicator.commit_dir(source, "other", 1, session=session)


def test_a_job_that_is_named_makes_no_session_beside_the_open_one(node: Node, tmp_path: Path) -> None:
    """F11: a misspelt name makes no second job; another job is read, and its epoch stays."""
    source = make(tmp_path / "a", FILES)
    with replicator.init("well-spelt", root=node.root, deadline_s=node.deadline_s) as session:
        done = replicator.commit_dir(source, "well-spelt", 1)
        done.wait_protected(10)
        with pytest.raises(ConfigError, match=r"expected job well-spelt, .* found job well_spelt"):
            replicator.commit_dir(source, "well_spelt", 2)
        with pytest.raises(NoRecoverableCheckpointError):
            replicator.restore_dir(tmp_path / "b", "well_spelt")
        assert open_session() is session
        assert session.lookup().step == 1
    with replicator.init("another", root=node.root, deadline_s=node.deadline_s) as another:
        assert replicator.restore_dir(tmp_path / "b", "well-spelt").version == done.version
        assert content(tmp_path / "b") == FILES
        assert open_session() is another
    with replicator.init("well-spelt", root=node.root, deadline_s=node.deadline_s) as again:
        assert again.epoch == session.epoch + 1, "nobody entered the job meanwhile"


def no_directory(root: Path) -> None:
    root.rmdir()


def a_file(root: Path) -> None:
    root.rmdir()
    root.write_bytes(b"")


def only_directories(root: Path) -> None:
    (root / "a" / "b").mkdir(parents=True)


def a_pipe(root: Path) -> None:
    os.mkfifo(root / "pipe")


def a_link_to_nothing(root: Path) -> None:
    (root / "link").symlink_to("nothing")


def a_link_to_a_directory(root: Path) -> None:
    (root / "link").symlink_to(root)


def unreadable(root: Path) -> None:
    (root / "memory").symlink_to("/proc/self/mem")


def a_space(root: Path) -> None:
    make(root, {"model (1).bin": b"x"})


def not_unicode(root: Path) -> None:
    (root / os.fsdecode(b"\xff")).write_bytes(b"x")


def too_deep(root: Path) -> None:
    make(root, {"/".join("abcdefghi"): b"x"})


def test_what_cannot_be_committed_is_named(session: Session, tmp_path: Path) -> None:
    """Nothing of it is kept, what was there before stays recoverable, and the next one works (F05)."""
    good = make(tmp_path / "good", FILES)
    replicator.commit_dir(good, session.job, 1).wait_protected(10)
    broken: list[tuple[Callable[[Path], None], type[ReplicatorError], str]] = [
        (no_directory, DirectoryError, "is not there"),
        (a_file, DirectoryError, "expected a directory"),
        (only_directories, DirectoryError, "directory with files"),
        (a_pipe, DirectoryError, "pipe is neither"),
        (a_link_to_nothing, DirectoryError, "link to nothing"),
        (a_link_to_a_directory, DirectoryError, "link to a directory"),
        (unreadable, DirectoryError, "memory cannot be read"),
        (a_space, InvalidIdError, "model"),
        (not_unicode, InvalidIdError, "rename"),
        (too_deep, InvalidIdError, "too deep"),
    ]
    for breaks, kind, message in broken:
        root = tmp_path / breaks.__name__
        root.mkdir()
        breaks(root)
        with pytest.raises(kind, match=message):
            replicator.commit_dir(root, session.job, 2)
    for step in (-1, True, "2"):
        with pytest.raises(InvalidIdError, match="step"):
            replicator.commit_dir(good, session.job, step)  # type: ignore[arg-type]
    assert session.lookup().step == 1
    replicator.commit_dir(good, session.job, 2).wait_protected(10)
    assert session.lookup().step == 2


def test_a_directory_that_changes_meanwhile_is_refused(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F05: grown, shrunk, replaced, gone, or with one file more: while its objects are being written."""
    root = make(tmp_path / "a", FILES)
    create = session.create

    def shrink() -> None:
        os.truncate(root / "model.safetensors", 10)

    def replace() -> None:
        (root / "new").write_bytes(FILES["model.safetensors"])
        (root / "new").rename(root / "model.safetensors")

    changes: list[tuple[Callable[[], Any], str]] = [
        (lambda: make(root, {"model.safetensors": b"w" * 3_000_002}), "model.safetensors changed"),
        (shrink, "model.safetensors changed"),
        (replace, "model.safetensors changed"),
        ((root / "model.safetensors").unlink, "model.safetensors vanished"),
        (lambda: make(root, {"one.more": b""}), "a changed"),
    ]
    for change, message in changes:
        make(root, FILES)

        def changing(one: Any, size: int, change: Callable[[], Any] = change) -> Any:
            if one.name == "model.safetensors":
                change()
            return create(one, size)

        monkeypatch.setattr(session, "create", changing)
        with pytest.raises(DirectoryError, match=message):
            replicator.commit_dir(root, session.job, 7)
    monkeypatch.undo()
    assert not session.lookup().found
    (root / "one.more").unlink()
    make(root, FILES)
    replicator.commit_dir(root, session.job, 7).wait_protected(10)
    replicator.restore_dir(tmp_path / "b")
    assert content(tmp_path / "b") == FILES


def test_a_restore_that_fails_leaves_nothing(session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """F08: a copy that is not the manifest's, and a file system that takes no more."""
    replicator.commit_dir(make(tmp_path / "a", FILES), session.job, 3).wait_protected(10)
    plan = session.lookup()
    target = tmp_path / "b"
    monkeypatch.setattr("replicator.partial_dir.PartialDirectory.require_space", lambda *_: None)
    monkeypatch.setattr("replicator.partial_dir.PartialDirectory.create", lambda *_: FileIO("/dev/full", "wb"))
    with pytest.raises(StoreError, match="no room"):
        replicator.restore_dir(target, plan=plan)
    monkeypatch.undo()
    job = session.agent.paths.root.rglob(f"*{session.job}*/**/*model.safetensors*")
    (stored,) = [path for path in job if path.is_file()]
    with open(stored, "r+b") as damaged:
        damaged.seek(2_000_000)
        damaged.write(b"x")
    with pytest.raises(ReplicatorError, match=r"model\.safetensors"):
        replicator.restore_dir(target, plan=plan)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def of_two_ranks(base: str) -> dict[str, Any]:
    """On each of two ranks: directories of their own, then a common one, then what differs."""
    import torch.distributed as dist

    rank, root = dist.get_rank(), Path(base)
    told: dict[str, Any] = {}
    common = {"config.json": b"{}"}
    own = make(root / f"own-{rank}", {**common, f"rank-{rank}/shard.bin": bytes([rank]) * 2_000_000})
    if rank == 0:
        make(root / "shared", {f"{index}.bin": bytes([index]) * 1_000_000 for index in range(6)})
    session = replicator.init()
    done = replicator.commit_dir(own, None, 1)
    told["own"] = (done.objects, done.size_bytes, len(done.replica_futures), done.committed is not None)
    done.wait_protected(20)
    done = replicator.commit_dir(root / "shared", None, 2)
    told["shared"] = (done.objects, done.size_bytes, len(done.replica_futures))
    done.wait_protected(20)

    errors: list[tuple[str, str]] = []
    make(own, {"config.json": b"%d" % rank})
    for path, step in ((own, 3), (own if rank else own / "missing", 3), (root / "shared", 3 + rank)):
        try:
            replicator.commit_dir(path, None, step)
        except ReplicatorError as error:
            errors.append((type(error).__name__, str(error)))
    told["errors"] = errors
    told["newest"] = session.lookup().step

    back = replicator.restore_dir(root / f"back-{rank}", step=1)
    told["back"] = (back.written, set(content(root / f"back-{rank}")), len(back.pulled))
    back = replicator.restore_dir(root / "back")
    told["together"] = (back.written, content(root / "back") == content(root / "shared"))
    back = replicator.restore_dir(root / "one" if rank else None)
    told["one"] = back.written
    try:
        replicator.restore_dir(root / f"back-{rank}" if rank else root / "new")
    except ReplicatorError as error:
        told["refused"] = type(error).__name__
    dist.barrier()
    told["left"] = sorted(path.name for path in root.iterdir())
    session.close()
    return told


def test_several_ranks(shm_root: Path, tmp_path: Path) -> None:
    """One manifest covers what every rank has (F06, F07); all ranks get the same answer (F09, F41)."""
    with nodes(shm_root, 2) as made:
        zero, one = run_job(made, of_two_ranks, str(tmp_path))
    assert zero["own"] == (3, 4_000_002, 2, True)
    assert one["own"] == (3, 4_000_002, 1, False), "what both have is committed once"
    assert zero["shared"] == one["shared"] == (6, 6_000_000, 3), "the ranks share the work"
    assert zero["errors"] == one["errors"]
    (first, second, third) = zero["errors"]
    assert first[0] == "DirectoryError"
    assert "config.json is one file on rank 0 and another on rank 1" in first[1]
    assert second[0] == "DirectoryError"
    assert "rank 0: " in second[1]
    assert third == ("ConfigError", third[1])
    assert "found steps [3, 4]" in third[1]
    assert zero["newest"] == one["newest"] == 2
    names = {"config.json", "rank-0/shard.bin", "rank-1/shard.bin"}
    assert zero["back"][:2] == one["back"][:2] == (True, names)
    assert zero["together"] == (True, True)
    assert one["together"] == (False, True)
    assert (zero["one"], one["one"]) == (False, True)
    assert zero["refused"] == one["refused"] == "ConfigError"
    assert zero["left"] == ["back", "back-0", "back-1", "one", "own-0", "own-1", "shared"]


def with_a_death(base: str) -> dict[str, Any]:
    """Rank 1 ends in the middle of a file of the second step."""
    import torch.distributed as dist

    rank, told = dist.get_rank(), dict[str, Any]()
    root = make(Path(base) / f"rank-{rank}", {f"{rank}.bin": b"x" * 100})
    session = replicator.init()
    replicator.commit_dir(root, None, 1).wait_protected(20)
    if rank == 1:
        session.create = lambda *_: os._exit(9)  # type: ignore[method-assign]
    try:
        replicator.commit_dir(root, None, 2, deadline_s=3)
    except ReplicatorError as error:
        told["error"] = (type(error).__name__, str(error))
    told["newest"] = lookup(session.agent, session.job, session.epoch, 5).container.step
    told["alone"] = replicator.commit_dir(root, None, 3, alone=True).objects
    return told


def test_a_rank_that_dies_is_named(shm_root: Path, tmp_path: Path) -> None:
    """The step before stays recoverable, and what is left of the job can commit (F05, F15)."""
    with nodes(shm_root, 2) as made:
        job = Job(made, with_a_death, str(tmp_path))
        try:
            told = job.ranks[0].result(time.monotonic() + 60)
        finally:
            job.kill()
    assert told["error"][0] == "DeadlineExceededError"
    assert "rank 1 of 2" in told["error"][1]
    assert told["newest"] == 1
    assert told["alone"] == 1


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_directory_that_replaces_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool) -> None:
    """Also where the file system cannot exchange two names."""
    if not can_exchange:
        monkeypatch.setattr("replicator.partial_dir._exchange", lambda *_: False)
    target = make(tmp_path / "a", {"old": b"", "sub/old": b""})
    with PartialDirectory(target, tag="x", signals=False, replace=True) as partial:
        with partial.create("new") as file:
            partial.write(file, b"new")
        assert content(target).keys() == {"old", "sub/old"}
        partial.finish()
    assert content(target) == {"new": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_share_out() -> None:
    same, other = Found(10, 1, 1, 1), Found(10, 2, 1, 1)
    shares, disputed = share_out([{"a": same, "b": same, "own": other}, {"a": same, "b": other}, {"b": same}, {}])
    assert shares == [["own"], ["a"], [], []]
    assert disputed == {"b": [0, 1, 2]}
    told = [{"state.json": same}, {"state.json": other, "model-1.bin": same}, {"model-1.bin": other}]
    assert share_out(told, ["state.json", "model-*.bin"]) == ([["state.json"], [], []], {"model-1.bin": [1, 2]})
    listing = {f"{index}": Found(index, 0, 0, index) for index in range(1, 101)}
    shares, disputed = share_out([listing] * 4)
    assert disputed == {}
    assert sorted(name for share in shares for name in share) == sorted(listing)
    load = [sum(map(int, share)) for share in shares]
    assert max(load) - min(load) <= 10
    # Another device number is what another host calls the same disk.
    assert share_out([{"a": Found(1, 1, 1, 1)}, {"a": Found(1, 1, 9, 1)}]) == ([["a"], []], {})


def test_listing_names_what_vanishes(tmp_path: Path) -> None:
    assert list(list_files(make(tmp_path, {"b": b"", "a/c": b"x"}))) in (["b", "a/c"], ["a/c", "b"])

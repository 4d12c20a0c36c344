"""`replicator://job/step-5/...` for fsspec, and so for whatever saves and loads through it.

`torch.distributed.checkpoint` takes such a URL as a checkpoint id, on all ranks, without any code:

    dcp.save(state, checkpoint_id="replicator://my-job/step-5")
    dcp.load(state, checkpoint_id="replicator://my-job/step-5")

A file that is written becomes an object of the step on its node. Making the directory of a step begins a save, and
renaming `.metadata.tmp` to `.metadata`, which PyTorch does last and on rank 0, commits all that every rank has written.
Who looks into a job sees committed checkpoints only.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
import time
from typing import Any, ClassVar, NamedTuple

from replicator.integrations._needed import needed

with needed("fsspec>=2024.2"):
    from fsspec.spec import AbstractFileSystem
    from fsspec.utils import stringify_path

with needed("torch>=2.6"):
    from replicator.checkpoint.attempts import Attempt, attempts_of

from replicator.checkpoint.committing import WaitFor, check_options
from replicator.checkpoint.names import METADATA_NAME, container_of
from replicator.checkpoint.object_file import Draft, ReadObject
from replicator.client.looking import look, recoverable
from replicator.client.plan import Plan, plan_from_pb
from replicator.client.retrieval import keep, lookup
from replicator.client.session import Session, current_session, open_session
from replicator.errors import ConfigError, InvalidIdError, NotFoundError, ReplicatorError, UnsupportedError
from replicator.ids import CheckpointContainerId, parse_step_name, validate_job, validate_object_name

PROTOCOL = "replicator"
MAX_PLANS = 64
"""Checkpoints of which this process remembers where their objects are."""
_DRAFT = ".tmp"
_RANKS_OWN_METADATA = re.compile(r"__[0-9]+\.metadata")
# A load that takes longer asks again.
_PLAN_DEADLINES = 20


class MissingError(NotFoundError, FileNotFoundError):
    """A checkpoint, or an object of one, that no node can give. The FileNotFoundError that callers of fsspec expect."""


class Place(NamedTuple):
    """What a path means: everything, a job, a checkpoint, or an object of one."""

    job: str = ""
    container: CheckpointContainerId | None = None
    name: str = ""

    @classmethod
    def of(cls, path: str) -> Place:
        """Raises InvalidIdError."""
        job, _, rest = path.partition("/")
        if not job:
            return cls()
        validate_job(job)
        step, _, name = rest.partition("/")
        if not step:
            return cls(job)
        try:
            container = CheckpointContainerId(job, parse_step_name(step))
        except InvalidIdError:
            raise InvalidIdError(f"{_no_step(path)}, found {step[:80]!r} in its place") from None
        return cls(job, container, validate_object_name(name) if name else "")

    @property
    def path(self) -> str:
        if self.container is None:
            return self.job
        step = f"{self.job}/step-{self.container.step}"
        return f"{step}/{self.name}" if self.name else step


class ReplicatedFileSystem(AbstractFileSystem):
    """Checkpoints in the memory of the job's nodes, as files.

    Writing needs the session of the URL's job, or makes it (`replicator.init`); all ranks save together, and
    rank 0 among them. Reading does the same for this process's own job, and changes nothing for another one.

    Args:
        wait_for: what the commit of a save waits for: `seal`, `commit` or `protected`, see `ReplicatedStorageWriter`.
        resumable: whether a job can go on from what is saved; False, for instance, for the model alone.
    """

    protocol: ClassVar[str] = PROTOCOL

    def __init__(self, *args: Any, wait_for: WaitFor = "seal", resumable: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.wait_for = wait_for
        self.resumable = resumable

    # -- paths

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        """`replicator://job/step-5_ckpt/name` is `job/step-5/name`. Never raises: who looks for a protocol asks it."""
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        parts = stringify_path(path).removeprefix(f"{PROTOCOL}://").strip("/").split("/", 2)
        if len(parts) > 1 and parts[1].startswith("step-"):
            parts[1] = parts[1].removesuffix("_ckpt")
        return "/".join(parts)

    @classmethod
    def _place(cls, path: Any) -> Place:
        return Place.of(cls._strip_protocol(path))

    # -- looking: committed checkpoints only, and no other rank takes part

    def ls(self, path: Any, detail: bool = True, **kwargs: Any) -> Any:
        """The jobs, the checkpoints of one by step, or the objects of one. Only what could be loaded now.

        Raises:
            MissingError: nothing is there.
        """
        place = self._looked_for(path)
        if place.container is None:
            found = [Place(one.version.container.job, one.version.container) for one in recoverable(place.job)]
            if place.job and not found:
                raise MissingError(f"no checkpoint of job {place.job!r} could be loaded: see replicator-admin ls")
            paths = [one.path if place.job else one.job for one in found]
            entries = [_directory(one) for one in dict.fromkeys(paths)]
        else:
            entries = self._entries(place)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: Any, **kwargs: Any) -> dict[str, Any]:
        """Raises MissingError: no committed checkpoint, or no such object in it."""
        place = self._looked_for(path)
        if place.container is None:
            if place.job:
                self.ls(place.job)
            return _directory(place.path)
        entries = self._entries(place)
        if entries[0]["name"] == place.path and entries[0]["type"] == "file":
            return entries[0]
        return _directory(place.path)

    def exists(self, path: Any, **kwargs: Any) -> bool:
        """During a save: whether this node knows of a commit of that step, or has the file. Asks no other node then."""
        place = self._looked_for(path)
        attempt = self._attempt(place)
        if attempt is not None and _RANKS_OWN_METADATA.fullmatch(place.name):
            raise UnsupportedError(
                "use_collectives=False makes every rank write a checkpoint of its own, and a commit here covers all "
                "ranks; use the default"
            )
        if attempt is not None and place.name == METADATA_NAME:
            return attempt.has_predecessor()
        if attempt is not None and attempt.has(place.name):
            return True
        try:
            self.info(path)
        except NotFoundError:
            return False
        return True

    def _looked_for(self, path: Any) -> Place:
        try:
            return self._place(path)
        except InvalidIdError as error:
            raise MissingError(f"{path!r} cannot be there: {error}") from None

    def _entries(self, place: Place) -> list[dict[str, Any]]:
        """What a checkpoint has at a name: one file, or what is one level below."""
        assert place.container is not None
        plan = look(place.container)
        if not plan.found:
            raise MissingError(plan.reason)
        below = f"{place.name}/" if place.name else ""
        entries: dict[str, dict[str, Any]] = {}
        for source in plan.sources:
            if source.name == place.name:
                return [_file(place, source.name, source.size, source.crc32c)]
            if source.name.startswith(below):
                head, _, rest = source.name.removeprefix(below).partition("/")
                one = place._replace(name=below + head)
                entries[head] = _directory(one.path) if rest else _file(one, one.name, source.size, source.crc32c)
        if not entries:
            raise MissingError(f"{plan.version} has no object {place.name!r}")
        return [entries[head] for head in sorted(entries)]

    # -- reading

    def _open(self, path: Any, mode: str = "rb", **kwargs: Any) -> Any:
        """Raises MissingError: nothing to read. ConfigError: to be written, and of another job than the session's."""
        if mode == "rb":
            return self._open_to_read(path)
        if mode not in ("wb", "xb"):
            raise UnsupportedError(f"{path}: expected mode 'rb' or 'wb', found {mode!r}; an object is written once")
        place = self._place(path)
        attempts = attempts_of(self._writing_session(place))
        if place.container is None or not place.name:
            if place.container is None:
                raise ConfigError(_no_step(path))
            raise ConfigError(f"expected a path like job/step-5/name to write to, found {path!r}")
        if place.name.endswith(f"/{METADATA_NAME}{_DRAFT}"):
            raise _inside_a_step(place)
        if place.name == METADATA_NAME:
            raise UnsupportedError(
                f"{place.path} is not written directly: write {METADATA_NAME}{_DRAFT} and rename it, which commits the "
                "checkpoint. For a directory that is finished, use replicator.commit_dir"
            )
        attempt = attempts.writing(place.container)
        return Draft(attempt.drafts, place.name) if place.name.endswith(_DRAFT) else attempt.create(place.name)

    def _open_to_read(self, path: Any) -> ReadObject:
        place = self._looked_for(path)
        if place.container is None or not place.name:
            raise MissingError(f"{path!r} is no file: expected a path like job/step-5/name")
        session = current_session()
        plan = _plans.find(session, place.container, fresh=place.name.rsplit("/")[-1] == METADATA_NAME)
        if all(source.name != place.name for source in plan.sources):
            raise MissingError(f"{plan.version} has no object {place.name!r}")
        return ReadObject(session, plan, place.name)

    # -- writing

    def makedirs(self, path: Any, exist_ok: bool = False) -> None:
        """The directory of a step: a new save of it begins. What is deeper needs no directory.

        Raises:
            UnsupportedError: a directory in that of a step, which is what a checkpoint of its own would begin with.
        """
        place = self._place(path)
        if place.name:
            raise _inside_a_step(place)
        check_options(self.wait_for)
        if place.container is not None:
            attempts_of(self._writing_session(place)).begin(place.container)

    def mkdir(self, path: Any, create_parents: bool = True, **kwargs: Any) -> None:
        self.makedirs(path)

    def mv(self, path1: Any, path2: Any, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Give a draft (`*.tmp`) of a save its name. With `.metadata` the save is committed.

        Raises:
            MissingError: this process has no such draft.
            UnsupportedError: it is no draft, or is to be the `.metadata` of a directory in the step.
            ConfigError: another rank than 0 wants to commit.
            ReplicatorError: the commit failed, and with it the save.
        """
        old, new = self._place(path1), self._place(path2)
        if not old.name.endswith(_DRAFT) or old.container is None or old.container != new.container or not new.name:
            raise UnsupportedError(
                f"only a draft (name{_DRAFT}) can be renamed, inside of its checkpoint; found {path1!r} to {path2!r}"
            )
        if new.name.endswith(f"/{METADATA_NAME}"):
            raise _inside_a_step(new)
        attempt = self._attempt(old)
        data = None if attempt is None else attempt.drafts.pop(old.name, None)
        if attempt is None or data is None:
            raise MissingError(f"{old.path} is not there: this process has written no such draft")
        with attempt.create(new.name) as file:
            file.write(data)
        if new.name == METADATA_NAME:
            attempts_of(attempt.session).commit(old.container, self.wait_for, self.resumable)

    def rm_file(self, path: Any) -> None:
        """Take a file out of the save that is under way.

        Raises:
            MissingError: it is not there. UnsupportedError: it is committed, and goes when newer checkpoints are safe.
        """
        place = self._place(path)
        attempt = self._attempt(place)
        # A commit of this step is superseded by that of the save, and not before.
        if attempt is not None and (place.name == METADATA_NAME or attempt.remove(place.name)):
            return
        self.info(path)
        raise UnsupportedError(f"{place.path} is committed; it goes by itself when newer checkpoints are safe")

    def _rm(self, path: Any) -> None:
        self.rm_file(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Raises like `rm_file`."""
        for one in path if isinstance(path, list) else [path]:
            self.rm_file(one)

    def put_file(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        """A local file into the save that is under way, or into a new one of the step; a directory needs nothing more.

        With `recursive=True` of `put` a directory comes here, too, before what is in it. Raises like `open`.
        """
        if os.path.isdir(lpath):
            place = self._place(rpath)
            if place.container is None:
                raise ConfigError(_no_step(rpath))
            attempts_of(self._writing_session(place)).writing(place.container)
            return
        with open(lpath, "rb") as source, self.open(rpath, "wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def _writing_session(self, place: Place) -> Session:
        session = current_session()
        if place.container is not None:
            container_of(place.container, session.job)
        return session

    def _attempt(self, place: Place) -> Attempt | None:
        """The save of this process that a path is in."""
        session = open_session()
        if session is None or place.container is None or place.job != session.job:
            return None
        return attempts_of(session).find(place.container)


class _Plans:
    """Where the objects of checkpoints are. A load asks once, when it opens `.metadata`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[tuple[str, int, CheckpointContainerId], tuple[Plan, int, float]] = {}

    def find(self, session: Session, container: CheckpointContainerId, *, fresh: bool) -> Plan:
        """The same version on all ranks of the session, when it is of its job.

        Raises:
            MissingError: it is not recoverable, with the reason.
            ReplicatorError: another rank found another version.
        """
        own = container.job == session.job
        generation = session.newest_generation if own else 0
        key = (session.job, session.epoch, container)
        now = time.monotonic()
        with self._lock:
            plan, at, since = self._known.get(key, (None, -1, 0.0))
        if plan is not None and not fresh and at == generation and now - since < _PLAN_DEADLINES * session.deadline_s:
            return plan
        epoch = session.epoch if own else 0
        plan = plan_from_pb(lookup(session.agent, container.job, epoch, session.deadline_s / 3, container.step))
        if plan.version is None:
            raise MissingError(plan.reason)
        if own:
            # No other incarnation can save in this epoch: until this one saves again there is one right answer.
            key_of_all = f"the version of {container} after {generation}"
            agreed = int(session.ranks.first(key_of_all, str(plan.version.generation).encode()))
            if agreed != plan.version.generation:
                raise ReplicatorError(
                    f"this rank is about to read {plan.version} and another one its generation {agreed:x}; start the "
                    "job again, or give all of them the plan of one session.lookup()"
                )
            keep(session.agent, plan.version, session.epoch)
        with self._lock:
            self._known[key] = (plan, generation, now)
            while len(self._known) > MAX_PLANS:
                del self._known[next(iter(self._known))]
        return plan


_plans = _Plans()


def _no_step(path: Any) -> str:
    return f"{path!r}: the checkpoint id has no step; give one like 'replicator://my-job/step-100'"


def _inside_a_step(place: Place) -> UnsupportedError:
    return UnsupportedError(
        f"{place.path} is inside of a step, and a commit covers a whole step: save all of it as one checkpoint, with "
        f"checkpoint_id='{PROTOCOL}://{place._replace(name='').path}', or part by part with "
        "replicator.checkpoint.SaveInParts. A file of your own needs no directory: open it and write"
    )


def _directory(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def _file(place: Place, name: str, size: int, crc32c: int) -> dict[str, Any]:
    return {"name": place._replace(name=name).path, "size": size, "type": "file", "crc32c": f"{crc32c:08x}"}

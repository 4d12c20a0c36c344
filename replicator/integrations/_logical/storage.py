"""The storage interface of `torch_checkpointing`, on containers of a job."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from torch_checkpointing.storage.base_storage import ReadArgs, Storage

from replicator.client.plan import Plan
from replicator.client.session import Session
from replicator.errors import UnsupportedError
from replicator.integrations._logical.catalogue import Catalogue
from replicator.integrations._logical.layout import Layout, Place
from replicator.integrations._logical.reading import VerifiedStream
from replicator.integrations._logical.saves import Save, Saves
from replicator.integrations._logical.writing import NewFile

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class ReplicatorStorage(Storage):
    """The twelve methods of `torch_checkpointing`'s storage. Thread-safe. Made by `ReplicatorStorageConfig`.

    Listing, existence and sizes are those of the job, whichever node is asked: a committed step is one whose every file
    has a verified copy somewhere. A directory that is being written is known to the process that writes it.

    Raises, in all methods:
        UnsupportedError: a path outside of the steps' directories, where it has to be in one; a change of what is
            committed.
        StaleEpochError: a newer incarnation of the job exists.
        AgentUnavailableError, DeadlineExceededError: no answer. While a checkpoint is written it counts as failed
            instead, see `ReplicatorStorageConfig.strict`.
    """

    def __init__(self, session: Callable[[], Session], layout: Layout, saves: Saves) -> None:
        self.session = session
        self.layout = layout
        self.saves = saves
        self.catalogue = Catalogue(session)

    # -- files

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        """A file of a committed step; what is not on this node is brought from its holders, and all is verified."""
        place, plan, size = self._committed_file(path)
        whole = read_args is None or read_args.pre_read_full_file
        return VerifiedStream(self.session(), plan, place.object_name(), size, whole=whole)

    def stream_write(self, path: Path) -> io.IOBase:
        """A new file, sealed and copied to the buddies when it is closed."""
        place = self.layout.require(path)
        name = place.object_name()
        save = self._open(place)
        return NewFile(self.saves, save, self.saves.create(save, name))

    def write(self, path: Path, data: ReadableBuffer) -> None:
        with self.stream_write(path) as file:
            file.write(data)

    def delete(self, path: Path) -> None:
        """Take a file out of a step that is being written. Raises FileNotFoundError."""
        place = self.layout.require(path)
        save = self._written(place)
        if save is None:
            if place.name and self._committed(place) is not None:
                raise UnsupportedError(
                    f"{path} belongs to a committed checkpoint, which is never changed; rmdir the step"
                )
            raise FileNotFoundError(f"no file {path}")
        if save.entries.pop(place.name, None) is None:
            raise FileNotFoundError(f"no file {path} was written by this rank")

    def getsize(self, path: Path) -> int:
        place = self.layout.require(path)
        save = self._written(place)
        if save is not None and place.name in save.entries:
            return save.entries[place.name].size
        return self._committed_file(path)[2]

    # -- directories

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Of a step: begin to save it. Directories in it and above it need not be made."""
        place = self.layout.place(path)
        if not place.is_root:
            self._open(place, first=True)

    def rmdir(self, path: Path) -> None:
        """Let go of a step: of one that is being written, or of a committed one that newer ones supersede.

        Raises:
            FileNotFoundError: there is none.
            UnsupportedError: it is the newest one that can be recovered, or a directory within a step.
        """
        place = self.layout.require(path)
        if place.name:
            raise UnsupportedError(f"{path}: expected the directory of a step, found one in it; a step goes as a whole")
        assert place.step is not None
        save = self._written(place)
        if save is not None:
            self.saves.give_up(save)
        elif place.temporary or self._committed(place, anew=True) is None:
            raise FileNotFoundError(f"no directory {path}")
        else:
            self.catalogue.remove(place.step)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        is_cross_link: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """On rank 0, after all ranks have written: the step is committed, and exists on all nodes from then on.

        Raises:
            FileNotFoundError: nothing was written there.
            UnsupportedError: something else than a step's temporary directory and its final one.
        """
        source, target = self.layout.require(src_path), self.layout.require(dst_path)
        if source.name or target.name or target.temporary or source.step != target.step:
            raise UnsupportedError(
                f"expected a step's temporary directory and its final name, found {src_path} to {dst_path}"
            )
        if not self.saves.is_coordinator:
            raise UnsupportedError(f"a rename commits the files of all ranks, and is for rank 0 alone: {src_path}")
        save = self._written(source)
        if save is None:
            raise FileNotFoundError(f"no directory {src_path} was written by this process")
        assert source.step is not None
        self.saves.commit(save)
        self.catalogue.forget(source.step)

    def ls(self, path: Path) -> list[str]:
        """Names in a directory: above the steps those of the committed ones, and those that this process writes."""
        place = self.layout.place(path)
        if place.is_root:
            names = {self.layout.name_of(step) for step in self.catalogue.steps()}
            return sorted(names | {save.directory for save in self.saves.under_way() if not save.failure})
        names = {name.split("/", 1)[0] for name in self._names_below(place)}
        if not names and not self.exists(path):
            raise FileNotFoundError(f"no directory {path}")
        return sorted(names)

    def exists(self, path: Path) -> bool:
        """A committed step, or something in it; what is above the steps is always there."""
        place = self.layout.place(path)
        if place.is_root:
            return True
        if not place.name:
            return self._written(place) is not None or self._committed(place, anew=True) is not None
        return place.name in self._names(place) or bool(self._names_below(place))

    def isdir(self, path: Path) -> bool:
        place = self.layout.place(path)
        return place.is_root or (self.exists(path) if not place.name else bool(self._names_below(place)))

    def remap_path(self, path: Path) -> str:
        """The address of what the path means, for people and logs."""
        place = self.layout.place(path)
        job = self.session().job
        if place.is_root:
            return f"replicator://{job}"
        return "/".join(["replicator:/", str(place.container(job)), *filter(None, [place.name])])

    # -- its own

    def ready(self, path: str | Path, *, await_copies: bool = True) -> None:
        """This rank has written all of a step: see `Saves.ready`."""
        place = self.layout.require(path)
        assert place.step is not None
        save = self.saves.find(place.step)
        if save is None or save.committing:
            save = self._open(place)
        self.saves.ready(save, await_copies=await_copies)

    def finish(self, path: str | Path) -> bool:
        """The end of a save on every rank, also of one without a rename: whether the step exists now."""
        place = self.layout.require(path)
        assert place.step is not None
        save = self.saves.find(place.step)
        if save is None:
            return False
        exists = self.saves.finish(save)
        self.catalogue.forget(place.step)
        return exists

    def _open(self, place: Place, *, first: bool = False) -> Save:
        assert place.step is not None
        return self.saves.open(place.step, place.directory, first=first)

    def _written(self, place: Place) -> Save | None:
        """The save under way, of which this is the directory."""
        save = self.saves.find(place.step) if place.step is not None else None
        return save if save is not None and not save.committing and save.directory == place.directory else None

    def _committed(self, place: Place, *, anew: bool = False) -> Plan | None:
        if place.temporary or place.step is None:
            return None
        return self.catalogue.find(place.step, anew=anew)

    def _committed_file(self, path: Path) -> tuple[Place, Plan, int]:
        place = self.layout.require(path)
        plan = self._committed(place)
        if plan is not None:
            for source in plan.sources:
                if source.name == place.name:
                    return place, plan, source.size
        raise FileNotFoundError(f"no file {path} in a committed checkpoint ({self.remap_path(path)})")

    def _names(self, place: Place) -> set[str]:
        save, plan = self._written(place), self._committed(place)
        names = set() if save is None else set(save.entries)
        return names | (set() if plan is None else {source.name for source in plan.sources})

    def _names_below(self, place: Place) -> list[str]:
        """Names of files in the directory, as seen from it."""
        prefix = f"{place.name}/" if place.name else ""
        return [name.removeprefix(prefix) for name in self._names(place) if name.startswith(prefix)]

"""The files of a finished directory, and which rank commits which of them. Imports no torch."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from replicator.errors import DirectoryError, InvalidIdError
from replicator.ids import MAX_NAME_PARTS, validate_object_name

MAX_FILES = 65536


@dataclass(frozen=True, slots=True)
class Found:
    """One file. Two ranks that find the same four numbers under one name look at the same file."""

    size: int
    mtime_ns: int
    device: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Found:
        return cls(status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino)

    @property
    def identity(self) -> tuple[int, int, int]:
        """The same on every host that sees the file: device numbers are each host's own."""
        return self.size, self.mtime_ns, self.inode


def list_files(root: Path) -> dict[str, Found]:
    """All files below a directory by their names, which are paths relative to it.

    A link to a file counts as a file with its content. Directories that hold no file are not kept.

    Raises:
        DirectoryError: no directory; or something in it is neither a file nor a directory, is a link to a directory or
            to nothing, or cannot be looked at; or there are more than 65536 files.
        InvalidIdError: a name that no object can have.
    """
    files: dict[str, Found] = {}
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        for entry in _entries(root, folder):
            name = f"{folder}{entry.name}"
            found = _look(root, name)
            if stat.S_ISREG(found.st_mode):
                files[_checked(root, name)] = Found.of(found)
            elif stat.S_ISDIR(found.st_mode) and not entry.is_symlink():
                if name.count("/") + 1 >= MAX_NAME_PARTS:
                    raise InvalidIdError(
                        f"{root / name} is a directory too deep: names have at most {MAX_NAME_PARTS} parts"
                    )
                waiting.append(f"{name}/")
            else:
                what = "a link to a directory" if stat.S_ISDIR(found.st_mode) else "neither a file nor a directory"
                raise DirectoryError(f"{root / name} is {what}, which a checkpoint cannot hold; remove it first")
        if len(files) > MAX_FILES:
            raise DirectoryError(f"{root} has more than {MAX_FILES} files; pack them into fewer")
    return files


def _entries(root: Path, folder: str) -> list[os.DirEntry[str]]:
    where = root / folder
    try:
        with os.scandir(where) as entries:
            return list(entries)
    except NotADirectoryError:
        raise DirectoryError(f"expected a directory to commit, found {where}, which is none") from None
    except FileNotFoundError:
        raise DirectoryError(f"expected a finished directory to commit, and {where} is not there") from None
    except OSError as error:
        raise DirectoryError(f"{where} cannot be listed: {error.strerror}") from None


def _look(root: Path, name: str) -> os.stat_result:
    try:
        return os.stat(root / name)
    except FileNotFoundError:
        gone = "is a link to nothing" if (root / name).is_symlink() else "vanished while the directory was listed"
        raise DirectoryError(f"{root / name} {gone}; commit a directory that is finished") from None
    except OSError as error:
        raise DirectoryError(f"{root / name} cannot be looked at: {error.strerror}") from None


def _checked(root: Path, name: str) -> str:
    try:
        return validate_object_name(name)
    except InvalidIdError as error:
        raise InvalidIdError(f"{root} cannot be committed: {error}; rename the file") from None


def share_out(
    listings: Sequence[Mapping[str, Found]], of_rank_0: Collection[str] = ()
) -> tuple[list[list[str]], dict[str, list[int]]]:
    """Which rank commits which files, by size as evenly as those who have them allow.

    A file that only one rank has is that rank's. One that several have is committed once.

    Args:
        listings: of each rank.
        of_rank_0: names or patterns of names; different files under one of them are not disputed where rank 0 has one,
            which is the one to commit.

    Returns:
        The names for each rank; and those that are different files under one name, with the ranks that have them.
        Whose they are is not decided here: it depends on their content.
    """
    having: dict[str, list[int]] = {}
    for rank, listing in enumerate(listings):
        for name in listing:
            having.setdefault(name, []).append(rank)
    disputed = {
        name: ranks for name, ranks in having.items() if len({listings[rank][name].identity for rank in ranks}) > 1
    }
    for name in list(disputed):
        if 0 in disputed[name] and any(fnmatchcase(name, pattern) for pattern in of_rank_0):
            having[name] = [0]
            del disputed[name]
    shares: list[list[str]] = [[] for _ in listings]
    load = [0] * len(listings)

    def largest_first(name: str) -> tuple[int, int, str]:
        return len(having[name]) > 1, -listings[having[name][0]][name].size, name

    for name in sorted(having.keys() - disputed.keys(), key=largest_first):
        rank = min(having[name], key=lambda one: (load[one], one))
        shares[rank].append(name)
        load[rank] += listings[rank][name].size
    return shares, disputed

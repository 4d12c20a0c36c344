"""A directory that appears under its name complete, or not at all."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
import stat
import threading
from io import FileIO
from pathlib import Path
from types import FrameType, TracebackType

from replicator.errors import ConfigError, StoreError, StoreFullError
from replicator.ids import validate_object_name

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived while a directory was being written."""

    def __init__(self, number: int) -> None:
        super().__init__(f"terminated by {signal.Signals(number).name}")
        self.exit_code = 128 + number


class PartialDirectory:
    """Written as `<target>.partial-<tag>` beside the target, renamed by `finish`, removed when the block fails.

    Args:
        tag: told apart from others that write there at the same time; default: the process id.
        signals: SIGTERM and SIGHUP raise Terminated inside the block (in the main thread), so that they too leave
            nothing behind. Not for a program that handles them itself.
        replace: what the target holds goes when `finish` gives the new directory its name, in one step where the file
            system can exchange two names.

    Raises:
        ConfigError: the target exists and is not an empty directory (with `replace`: no directory), or its parent is
            not there.
        StoreError: the file system does not let us write; StoreFullError when it is full.
    """

    def __init__(
        self, target: str | Path, *, tag: str | None = None, signals: bool = True, replace: bool = False
    ) -> None:
        given = os.fspath(target)
        if not given or "\0" in given:
            raise ConfigError(f"expected a directory to write to, found {given!r}")
        self.target = Path(os.path.realpath(given))
        self.partial = self.target.with_name(f"{self.target.name}.partial-{tag or os.getpid()}")
        self._signals = signals
        self._replace = replace
        self._mode = self._check_target()
        self._handlers: dict[int, object] = {}

    def _check_target(self) -> int:
        """The permission bits that the directory will have."""
        where = self.target
        try:
            found = where.lstat()
            content = next(iter(os.scandir(where)), None) if stat.S_ISDIR(found.st_mode) else None
        except FileNotFoundError:
            if not where.parent.is_dir():
                raise ConfigError(f"{where.parent} is not a directory; create it first, or give another one") from None
            return 0o700
        except OSError as error:
            raise _write_error(where, error) from None
        if not stat.S_ISDIR(found.st_mode):
            raise ConfigError(f"{where} exists and is not a directory; give a new directory")
        if content is not None and not self._replace:
            raise ConfigError(f"{where} is not empty (it has {content.name}); give a new or an empty directory")
        if os.path.ismount(where):
            raise ConfigError(
                f"{where} is a mount point, which a finished directory cannot replace; give one inside it"
            )
        return stat.S_IMODE(found.st_mode)

    def require_space(self, size_bytes: int) -> None:
        """Fail now rather than in the middle.

        Raises:
            StoreFullError: the file system has less room than `size_bytes`; with the numbers.
        """
        space = os.statvfs(self.partial)
        free = space.f_bavail * space.f_frsize
        if free < size_bytes:
            raise StoreFullError(
                f"{self.target.parent} has {free} bytes free and {size_bytes} are needed; give a directory elsewhere"
            )

    def create(self, name: str) -> FileIO:
        """A new file for the object of this name, mode 0600 under the umask; parts of the name are directories.

        Raises:
            InvalidIdError: not a name of an object, so it is no path below the directory either (F38).
        """
        path = self.partial.joinpath(*validate_object_name(name).split("/"))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _write_error(path, error) from None
        return FileIO(descriptor, "wb")

    def write(self, file: FileIO, piece: bytes | bytearray) -> None:
        """Write all of `piece` at the file's position. Raises StoreError, StoreFullError."""
        rest = memoryview(piece)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            raise _write_error(self.partial, error) from None

    def close(self, file: FileIO) -> None:
        """Bring the file to the disk and close it."""
        try:
            os.fsync(file.fileno())
            file.close()
        except OSError as error:
            raise _write_error(self.partial, error) from None

    def finish(self) -> None:
        """Give the directory its name, in one step."""
        try:
            self.partial.chmod(self._mode)
            for folder, _, _ in os.walk(self.partial):
                _fsync_directory(folder)
            self._rename()
            _fsync_directory(self.target.parent)
        except OSError as error:
            raise _write_error(self.target, error) from None

    def _rename(self) -> None:
        if not self._replace or not self.target.exists():
            self.partial.rename(self.target)
        elif not _exchange(self.partial, self.target):
            old = self.partial.with_name(self.partial.name.replace(".partial-", ".old-"))
            self.target.rename(old)
            self.partial.rename(self.target)
            shutil.rmtree(old, ignore_errors=True)

    def __enter__(self) -> PartialDirectory:
        if self._signals and threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                self._handlers[number] = signal.signal(number, _terminate)
        try:
            self.partial.mkdir(mode=0o700)
        except FileExistsError:
            self._restore_handlers()
            raise ConfigError(f"{self.partial} is left from an interrupted command; remove it and try again") from None
        except OSError as error:
            self._restore_handlers()
            raise _write_error(self.partial, error) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None and self._handlers:
            # A second Ctrl-C does not stop the removal half-way.
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._handlers.setdefault(number, signal.getsignal(number))
                signal.signal(number, signal.SIG_IGN)
        if self.partial.exists():
            shutil.rmtree(self.partial, ignore_errors=True)
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._handlers.clear()


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated(number)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names be each other's at once; False where the file system or the kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "renameat2"):
        return False
    return bool(libc.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0)


def _write_error(path: Path, error: OSError) -> StoreError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFullError(f"no room to write {path}: {error.strerror}; nothing was kept, free some space")
    return StoreError(f"cannot write {path}: {error.strerror}; nothing was kept, give another directory")


def _fsync_directory(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

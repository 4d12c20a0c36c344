"""What the machine allows: copying into mapped tmpfs memory, and raw TCP from tmpfs to tmpfs.

Nothing of the product is used here. Every product figure is a ratio to one of these, taken in turns with it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.single import Single
from benchmarks.worker import Role, Worker

RECEIVE_WINDOW = 1 << 20
SEND_RANGE = 1 << 30
PAGE = 4096


def address_of(area: mmap.mmap) -> int:
    """Where a writable mapping lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def nameless_file(directory: str | Path, size: int) -> int:
    """The descriptor of a new file of `size` bytes in `directory`, allocated."""
    fd, path = tempfile.mkstemp(prefix="replicator-limit-", dir=directory)
    os.unlink(path)
    os.posix_fallocate(fd, 0, size)
    return fd


def mapped_file(directory: str | Path, size: int, *, faulted: bool) -> mmap.mmap:
    """A new nameless file, mapped; all its pages touched when `faulted`."""
    fd = nameless_file(directory, size)
    try:
        area = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    if faulted:
        fault_in(area)
    return area


def fault_in(area: mmap.mmap) -> None:
    """Write to every page."""
    piece = os.urandom(min(1 << 20, len(area)))
    for offset in range(0, len(area), len(piece)):
        end = min(offset + len(piece), len(area))
        area[offset:end] = piece[: end - offset]


class CopyRole(Role):
    """In a process of its own: memcpy from private memory into a mapped tmpfs file, or the other way.

    The file's pages are there and mapped, as those of a recycled segment are.
    """

    def __init__(self, directory: str, size: int, into_file: bool = True) -> None:
        self._directory, self._size, self._into_file = directory, size, into_file
        self._memory = mmap.mmap(-1, size)
        fault_in(self._memory)
        self._fd = nameless_file(directory, size)
        self._file = mmap.mmap(self._fd, size)
        fault_in(self._file)

    def run(self, threads: int = 1, fresh: bool = False, remap: bool = False) -> float:
        """Seconds of one copy, which so many threads share.

        Args:
            fresh: into a new file without any page.
            remap: from or to a new mapping of the file, made with all its pages; making it counts.
        """
        if remap:
            began = time.perf_counter()
            with mmap.mmap(self._fd, self._size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE) as area:
                mapped_s = time.perf_counter() - began
                return mapped_s + self._copy(area, threads)
        return self._copy(mapped_file(self._directory, self._size, faulted=False) if fresh else self._file, threads)

    def _copy(self, area: mmap.mmap, threads: int) -> float:
        memory, mapped = address_of(self._memory), address_of(area)
        target, source = (mapped, memory) if self._into_file else (memory, mapped)
        share = -(-self._size // threads // PAGE) * PAGE
        pieces = [(offset, min(share, self._size - offset)) for offset in range(0, self._size, share)]
        start = time.perf_counter()
        if len(pieces) == 1:
            ctypes.memmove(target, source, self._size)
        else:
            copiers = [
                threading.Thread(target=ctypes.memmove, args=(target + offset, source + offset, length))
                for offset, length in pieces
            ]
            for copier in copiers:
                copier.start()
            for copier in copiers:
                copier.join()
        return time.perf_counter() - start


def copy(name: str, directory: Path, size: int, into_file: bool = True) -> Single:
    """Contender: one memcpy of `size` bytes, see `CopyRole`."""
    return Single(name, "limits:CopyRole", "copier", directory=directory, size=size, into_file=into_file)


class SmallFilesRole(Role):
    """In a process of its own: writes many small files on tmpfs and renames each, as sealing does."""

    def __init__(self, directory: str, count: int, size: int) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="replicator-limit-", dir=directory))
        self._count, self._data = count, os.urandom(size)

    def run(self) -> float:
        """Seconds of two files per object: the owner's and the copy."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.mkdir()
        start = time.perf_counter()
        for number in range(2 * self._count):
            path = f"{self._directory}/{number}"
            fd = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(fd, self._data)
            os.close(fd)
            Path(path + ".new").rename(path)
        return time.perf_counter() - start

    def close(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


def small_files(name: str, directory: Path, count: int, size: int) -> Single:
    """Contender: `count` objects of `size` bytes, each written and renamed twice."""
    return Single(name, "limits:SmallFilesRole", "writer", directory=directory, count=count, size=size)


class TcpSenderRole(Role):
    """Serves tmpfs files with `sendfile`: each connection says in a line which file and range, then gets it."""

    def __init__(self, directory: str, size: int, congestion: str = "", files: int = 1) -> None:
        self._fds = [nameless_file(directory, size) for _ in range(files)]
        for fd in self._fds:
            with mmap.mmap(fd, size) as area:
                fault_in(area)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=16)
        if congestion:
            self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        threading.Thread(target=self._accept, daemon=True).start()

    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, connection.makefile("rb") as requests:
            for line in requests:
                file, start, end = map(int, line.split())
                while start < end:
                    start += os.sendfile(connection.fileno(), self._fds[file], start, min(end - start, SEND_RANGE))


class TcpReceiverRole(Role):
    """Receives a file over kept connections straight into a mapped tmpfs file of its own."""

    def __init__(
        self,
        directory: str,
        size: int,
        port: int,
        connections: int,
        recycled: bool = True,
        congestion: str = "",
        files: int = 1,
    ) -> None:
        self._directory, self._size = directory, size
        self._files = [mapped_file(directory, size, faulted=True) for _ in range(files)] if recycled else []
        self._sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
        for connection in self._sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if congestion:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())

    def run(self, file: int = 0) -> float:
        """Seconds from the request to the last byte of one of the files, into the one of that number here."""
        area = self._files[file] if self._files else mapped_file(self._directory, self._size, faulted=False)
        view = memoryview(area)
        share = -(-self._size // len(self._sockets))
        start = time.perf_counter()
        threads = [
            threading.Thread(
                target=_receive, args=(connection, view, file, i * share, min((i + 1) * share, self._size))
            )
            for i, connection in enumerate(self._sockets)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - start


def _receive(connection: socket.socket, view: memoryview, file: int, start: int, end: int) -> None:
    connection.sendall(b"%d %d %d\n" % (file, start, end))
    while start < end:
        count = connection.recv_into(view[start : min(end, start + RECEIVE_WINDOW)])
        if not count:
            raise ConnectionError("the sender closed its connection")
        start += count


class Tcp:
    """Contender: raw TCP over loopback between two processes, tmpfs to tmpfs, no checksum.

    Args:
        recycled: into memory that was written before.
        files: so many on either side; `run` moves the first one, see `InTurn`.
    """

    def __init__(
        self,
        name: str,
        directory: Path,
        size: int,
        connections: int,
        congestion: str = "",
        recycled: bool = True,
        files: int = 1,
    ) -> None:
        self.name, self.files = name, files
        common = {"directory": str(directory), "size": size, "congestion": congestion, "files": files}
        self._sender = Worker("benchmarks.limits:TcpSenderRole", common)
        try:
            port = self._sender.call("port")
            self._receiver = Worker(
                "benchmarks.limits:TcpReceiverRole",
                {**common, "port": port, "connections": connections, "recycled": recycled},
            )
        except BaseException:
            self._sender.close()
            raise

    @property
    def processes(self) -> Mapping[str, int]:
        return {"sender": self._sender.pid, "receiver": self._receiver.pid}

    def prepare(self) -> None:
        return

    def run(self, file: int = 0) -> float:
        return float(self._receiver.call("run", file=file))

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


class InTurn:
    """Contender: the raw TCP of another one, over all of its files in turn, as checkpoints use their segments.

    Memory that was not used for some seconds may be slower, on a shared host above all.
    """

    def __init__(self, name: str, tcp: Tcp) -> None:
        self.name = name
        self._tcp, self._next = tcp, 0

    @property
    def processes(self) -> Mapping[str, int]:
        return self._tcp.processes

    def prepare(self) -> None:
        return

    def run(self) -> float:
        self._next = (self._next + 1) % self._tcp.files
        return self._tcp.run(self._next)

    def close(self) -> None:
        return

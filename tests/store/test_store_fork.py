"""Forked children (data loaders) of a process that has segments mapped, objects open, and its lock."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from store_support import MIB, Trainer, version

from replicator.store import Store
from replicator.store.client_lock import ClientLock, is_client_alive
from replicator.store.reader import open_object


@contextmanager
def child(do: Callable[[], bool]) -> Iterator[None]:
    """A forked child does something, and then lives as long as the block. `do` must return True there.

    What other tests left as garbage in this process is collected here and not in the child: gRPC's destructors, for
    instance, may never return in a forked process.
    """
    go, started = os.pipe(), os.pipe()
    gc.collect()
    gc.freeze()
    try:
        pid = os.fork()
    finally:
        gc.unfreeze()
    if pid == 0:
        status = 1
        gc.freeze()
        try:
            status = 0 if do() else 2
            os.close(go[1])
            os.write(started[1], b"x")
            os.read(go[0], 1)
        finally:
            os._exit(status)
    os.close(started[1])
    try:
        ready = select.poll()
        ready.register(started[0], select.POLLIN)
        if not ready.poll(30_000):
            os.kill(pid, signal.SIGKILL)
        os.read(started[0], 1)
        yield
    finally:
        for fd in (*go, started[0]):
            os.close(fd)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_child_that_closes_the_lock_does_not_make_its_parent_look_dead(store: Store, trainer: Trainer) -> None:
    """F32, and the tenth promise: the parent's memory would go to others while it writes."""

    def close() -> bool:
        trainer.close()
        return True

    with child(close):
        assert store.paths.client(trainer.client_id).exists()
        assert is_client_alive(store.paths, trainer.client_id)


def test_a_living_process_is_not_given_up(store: Store) -> None:
    """Its lock file stays, or it would look dead, and memory that it can still write into would go to others."""
    client_id = "ab" * 16

    def acquire() -> bool:
        ClientLock(store.paths, client_id).acquire()
        return True

    with child(acquire):
        store.client_gone(client_id)
        assert is_client_alive(store.paths, client_id)
    assert not is_client_alive(store.paths, client_id)


def test_a_child_does_not_hold_what_its_parent_read(store: Store, trainer: Trainer) -> None:
    """F24: memory that only a data loader still held would be lost for the life of the job."""
    inode = trainer.save(store, version(1).object("a"), b"1" * MIB)
    mapped = open_object(store.paths, version(1).object("a"))
    assert len(mapped.view) == MIB
    not_mapped = open_object(store.paths, version(1).object("a"))
    with child(lambda: not any("/objects/" in name or "/segments/" in name for name in _open_files())):
        mapped.close()
        not_mapped.close()
        store.drop(version(1))
        assert trainer.save(store, version(2).object("a"), b"2" * MIB) == inode


def _open_files() -> list[str]:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            names.append(str(link.readlink()))
        except FileNotFoundError:
            continue
    return names


def test_a_child_that_lets_go_of_a_mapping_does_not_unmap_what_lies_there(store: Store, trainer: Trainer) -> None:
    """Mappings are not inherited, so something of the child's may lie at their addresses."""
    held = [trainer.reserve(store, MIB).view]
    address = ctypes.addressof(ctypes.c_char.from_buffer(held[0]))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)

    def let_go() -> bool:
        own = libc.mmap(address, MIB, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        ctypes.memset(own, 7, MIB)
        held.clear()
        trainer.close()
        gc.collect()
        return bool(own == address and ctypes.string_at(own, MIB) == b"\x07" * MIB)

    with child(let_go):
        pass
    assert bytes(held[0][:10]) == bytes(10)


def test_a_child_can_open_objects_of_its_own(store: Store, trainer: Trainer) -> None:
    trainer.save(store, version().object("a"), b"abc")

    def read() -> bool:
        with open_object(store.paths, version().object("a")) as reader:
            reader.verify()
            return bytes(reader.view) == b"abc"

    with open_object(store.paths, version().object("a")) as reader, child(read):
        assert bytes(reader.view) == b"abc"

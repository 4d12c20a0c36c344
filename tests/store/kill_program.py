"""Kills itself at one line of the store after another, and looks at what a restart finds each time.

Usage: kill_program.py <directory on a tmpfs> agent|trainer <every n-th line> <first line>. A child process goes through
the life of some objects; at the k-th line that it runs in replicator/store it gets SIGKILL. Before and after
each step it tells its parent, which then knows what must and what must not be there. Prints how many kills there were.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from store_support import BUDGET, Trainer, check_accounts, version

import replicator.store
from replicator.native import crc32c
from replicator.store import JobState, Store
from replicator.store.ingest import Item
from replicator.store.paths import StorePaths, open_root
from replicator.store.publish import publish
from replicator.store.reader import open_object
from replicator.store.segment import create_segment
from replicator.store.trailer import BLOCK_SIZE, ObjectInfo, capacity_for
from replicator.store.writer import ObjectWriter

STORE = str(Path(replicator.store.__file__).parent)
NAMES = ("a", "b/c")
SIZE = 9000
Step = Callable[[str, Callable[[], object]], None]


def content(step: int) -> bytes:
    return bytes([step]) * SIZE


def item(number: int, name: str, client_id: str) -> Item:
    data = content(number)
    crc = crc32c(data)
    return Item(ObjectInfo(version(number).object(name), SIZE, crc, BLOCK_SIZE, (crc,), "node-a", client_id), data)


def agent_life(paths: StorePaths, step: Step) -> None:
    """Agent and trainer in one process."""
    store = Store(paths, BUDGET)
    step("rebuild", store.rebuild)
    trainer = Trainer(paths)
    for number in (1, 2, 3):
        one = version(number)
        for name in NAMES:
            step(f"seal {number} {name}", lambda: trainer.save(store, one.object(name), content(number)))  # noqa: B023
        manifest = b"%d" % number
        step(f"commit {number}", lambda: store.put_manifest(one, manifest, crc32c(manifest)))  # noqa: B023
        step(f"protect {number}", lambda: store.mark_protected(one))  # noqa: B023
        step(f"epoch {number}", lambda: store.put_job_state(JobState("job", number, (), 1)))  # noqa: B023
        if number > 1:
            step(f"drop {number - 1}", lambda: store.drop(version(number - 1)))  # noqa: B023
    step("ingest 4", lambda: store.ingest([item(4, name, trainer.client_id) for name in NAMES]))
    step("stock", lambda: store.stock(trainer.client_id, 1 << 20, lambda mapped, is_stopped: True, blank=True))
    step("reserve", lambda: store.reserve(trainer.client_id, 1 << 19))
    step("gone", lambda: store.client_gone("ab" * 16))
    step("room", lambda: store.reserve(trainer.client_id, BUDGET - (2 << 20)))
    step(f"quarantine 3 {NAMES[0]}", lambda: store.quarantine(version(3).object(NAMES[0]), "a test"))


def trainer_life(paths: StorePaths, step: Step) -> None:
    """A trainer whose agent is away."""
    trainer = Trainer(paths)

    def save(number: int, name: str) -> None:
        def reserve(size: int) -> Any:
            made, inode = create_segment(paths, trainer.client_id, size)
            return trainer.mappings.get(made, inode, size)

        capacity = capacity_for(SIZE)
        writer = ObjectWriter(reserve(capacity), version(number).object(name), "node-a", trainer.client_id, reserve)
        writer.write(content(number))
        publish(paths, writer.mapped.name, writer.close())

    for number in (1, 2):
        for name in NAMES:
            step(f"seal {number} {name}", lambda: save(number, name))  # noqa: B023
    step("close", trainer.close)


def run_child(life: Callable[[StorePaths, Step], None], paths: StorePaths, kill_at: int, progress: int) -> None:
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(STORE):
            return None
        if event == "line":
            lines += 1
            if lines == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def step(name: str, do: Callable[[], object]) -> None:
        os.write(progress, f"begin {name}\n".encode())
        sys.settrace(trace)
        do()
        sys.settrace(None)
        os.write(progress, f"done {name}\n".encode())

    life(paths, step)


def check(paths: StorePaths, progress: list[str]) -> None:
    """Every finished step is there as a whole; of the one that was cut, all or nothing."""
    begun = {line.removeprefix("begin ") for line in progress if line.startswith("begin ")}
    done = {line.removeprefix("done ") for line in progress if line.startswith("done ")}
    store = Store(paths, BUDGET)
    report = store.rebuild()
    assert report.quarantined == 0, report
    for number in (1, 2, 3, 4):
        held = store.objects(version(number))
        for name in NAMES:
            seal = f"ingest {number}" if number == 4 else f"seal {number} {name}"
            quarantine = f"quarantine {number} {name}"
            if f"drop {number}" not in begun and seal in done and quarantine not in begun:
                assert name in held, f"{seal} was done"
            assert name not in held or seal in begun
            assert name not in held or quarantine not in done
            if name in held:
                with open_object(paths, version(number).object(name)) as reader:
                    reader.verify()
                    assert bytes(reader.view) == content(number)
        manifest = store.manifest(version(number))
        if f"drop {number}" in done:
            assert not held
            assert manifest is None
        if manifest is not None:
            assert set(NAMES) == set(held) or "quarantine 3 a" in begun
            assert manifest == b"%d" % number
        if f"drop {number}" not in begun:
            assert (manifest is not None) or f"commit {number}" not in done
            assert store.is_protected(version(number)) or f"protect {number}" not in done
        assert not store.is_protected(version(number)) or f"protect {number}" in begun
    epochs = [number for number in (1, 2, 3) if f"epoch {number}" in done]
    state = store.job_state("job")
    known = state.epoch if state else 0
    assert known in (max(epochs, default=0), max(epochs, default=0) + 1)
    assert store.usage().reserved_bytes == 0
    check_accounts(store)
    trainer = Trainer(paths)
    trainer.save(store, version(9).object("next"), content(9))
    trainer.close()
    store.close()


def main(top: Path, role: str, stride: int, first: int) -> int:
    life = agent_life if role == "agent" else trainer_life
    kill_at = first
    while True:
        root = top / str(kill_at)
        paths = open_root(root, create=True)
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                run_child(life, paths, kill_at, writing)
                os._exit(0)
            os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as stream:
            progress = stream.read().splitlines()
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status not in (0, -signal.SIGKILL):
            raise AssertionError(f"line {kill_at}: the child ended with {status} after {progress[-1:]}")
        try:
            check(paths, progress)
        except BaseException:
            print(f"killed at line {kill_at}, after {progress[-2:]}", file=sys.stderr)
            raise
        shutil.rmtree(root)
        if status == 0:
            return (kill_at - first) // stride
        kill_at += stride


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))

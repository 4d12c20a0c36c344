"""A trainer that forks all the time while it writes and replicates objects. Run by test_fork.py as a program.

Arguments: how many forks, then the roots of two nodes whose agents run. Prints how many copies were acknowledged.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import select
import sys
import threading
from typing import Any

from replicator.client.local_agent import LocalAgent
from replicator.client.session import Session
from replicator.client.session_spec import SessionSpec
from replicator.errors import ForkedClientError
from replicator.ids import CheckpointContainerId


def main() -> None:
    count, *roots = sys.argv[1:]
    agents = [LocalAgent(root, deadline_s=5.0) for root in roots]
    members = tuple(agent.node for agent in agents)
    epoch, _ = agents[0].open_job("job", members, 5.0)
    for agent in agents:
        agent.join_job("job", epoch, members, 1)
    session = Session(agents[0], SessionSpec(roots[0], "job", epoch, members, 1, 5.0, True, None))

    stop = threading.Event()
    futures: list[Any] = []
    failures: list[BaseException] = []

    def work() -> None:
        try:
            version = session.begin(CheckpointContainerId("job", 1))
            while not stop.is_set():
                with session.create(version.object(f"object-{len(futures)}"), 20_000) as sink:
                    sink.write(os.urandom(20_000))
                (future,) = session.replication.async_replicate(sink.info.object)
                futures.append(future)
                if len(futures) % 8 == 0:
                    future.result(20)
        except BaseException as error:
            failures.append(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    for number in range(int(count)):
        pid = os.fork()
        if pid == 0:
            in_child(session, number)
        status = ended_in_time(pid)
        assert status == 0, f"child {number} ended with status {status:#x}"
    stop.set()
    worker.join(20)
    assert not worker.is_alive()
    assert not failures, failures
    copies = [future.result(20) for future in futures]
    for agent in agents:
        agent.close()
    print(len(copies))


def in_child(session: Session, number: int) -> None:
    """Use the handle, drop it, and end: in every eighth child through the whole end of the interpreter."""
    faulthandler.dump_traceback_later(15, exit=True)
    for use in (session.lookup, lambda: session.begin(CheckpointContainerId("job", 1)), session.agent.check):
        try:
            use()
        except ForkedClientError:
            continue
        os._exit(3)
    session.close()
    gc.collect()
    if number % 8:
        os._exit(0)
    sys.exit(0)


def ended_in_time(pid: int) -> int:
    """The child's wait status. A child that hangs says where, and ends with another one."""
    descriptor = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(descriptor)
    try:
        if not waiting.poll(25_000):
            os.kill(pid, 9)
            raise TimeoutError(f"the forked child {pid} hung")
        return os.waitpid(pid, 0)[1]
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()

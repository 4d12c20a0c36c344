"""The job's rendezvous: the key-value store through which torchrun's agents find each other.

It stands for the service that outlives nodes (a launcher's host, etcd): were it on a node, losing that node would
end the job instead of restarting it. Prints its port and ends when its input is closed.
"""

from __future__ import annotations

import sys
from datetime import timedelta

from replicator.local_cluster.processes import die_with_parent


def main() -> int:
    die_with_parent()
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore(sys.argv[1], 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    print(store.port, flush=True)
    sys.stdin.read()
    return 0


if __name__ == "__main__":
    sys.exit(main())

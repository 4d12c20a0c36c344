"""The demo's training job: `torchrun ... -m replicator.demo.train`, one process per rank.

It cannot outlive its torchrun, nor that the demo's driver. PyTorch is loaded only after this is settled.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from replicator.local_cluster.processes import die_with_parent


def main() -> int:
    """Train as the options say; an error ends the rank, and torchrun starts the job again."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="replicator.demo.train", description=__doc__)
    add = parser.add_argument
    add("--on", metavar="NODE", required=True, help="name of the node this rank is on")
    add("--events", required=True, help="unix socket of the driver")
    add("--out", type=Path, required=True, help="directory for the final state")
    add("--seed", type=int, required=True)
    add("--steps", type=int, required=True)
    add("--save-every", type=int, required=True)
    add("--replicas", type=int, required=True)
    add("--plain", action="store_true", help="without Replicator")
    given = vars(parser.parse_args())

    from replicator.demo.training import Settings, train

    train(Settings(node=given.pop("on"), **given))
    return 0


if __name__ == "__main__":
    sys.exit(main())

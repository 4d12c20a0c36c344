"""The entry point of `replicator-admin`. An interrupt is one line also while the command is still being loaded."""

from __future__ import annotations

import os
import sys


def main() -> int:
    """Run one command. Returns its exit status (see docs/admin.md)."""
    try:
        from replicator.admin import cli

        return cli.main()
    except KeyboardInterrupt:
        print("replicator-admin: error: interrupted; nothing was begun", file=sys.stderr, flush=True)
        os._exit(130)


if __name__ == "__main__":
    sys.exit(main())

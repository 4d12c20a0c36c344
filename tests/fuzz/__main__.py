"""`python -m tests.fuzz TARGET --seconds N --seed S`: mutate its inputs for a while; exit code 1 on a finding."""

from __future__ import annotations

import argparse
import secrets
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_engine import fuzz
from fuzz_targets import all_targets


def main() -> int:
    targets = {target.name: target for target in all_targets()}
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=[*targets, "all"], help="what to feed; `all`: one after the other")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each target (default: 60)")
    parser.add_argument("--seed", type=int, default=None, help="the same seed, the same inputs (default: a random one)")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 32) if args.seed is None else args.seed
    failed = False
    for name in targets if args.target == "all" else [args.target]:
        count, found = fuzz(targets[name], seed, seconds=args.seconds)
        print(f"{name}: {count} inputs, seed {seed}, {'FAILED' if found else 'nothing found'}", flush=True)
        if found:
            failed = True
            traceback.print_exception(found.error)
            print(found, file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

"""`python -m examples`: run every example on two nodes of this machine, lose one, and compare what comes back.

Per example: two agents and one rank beside each; the example trains and saves; one agent gets SIGKILL and its memory
is deleted; an empty one takes its place; the example is started again, recovers, and trains on. One line for each. The
exit status is 0 only if every rank got back what it had saved, bit for bit, out of the surviving node's memory.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from examples._play import Play, Played, names
from replicator.errors import ReplicatorError
from replicator.local_cluster.processes import tail
from replicator.local_cluster.workspace import held_signals, raised_signals, workspace
from replicator.partial_dir import Terminated

SCHEMA_VERSION = 1
PREFIX = "replicator-examples-"
_NEEDED_BYTES = 512 << 20
_DEADLINE_S = 240.0


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--only", action="append", choices=names(), metavar="NAME", help=f"only this one of {', '.join(names())}")
    add("--json", action="store_true", help="all results as one JSON object on the last line")
    add("--keep", action="store_true", help="leave stores and logs where they are, and say where")
    add("--deadline-s", type=float, default=_DEADLINE_S, metavar="S", help="for one example (default %(default)s)")
    args = parser.parse_args()
    results = []
    try:
        with raised_signals():
            for name in args.only or names():
                results.append(_play(name, args))
                print(_line(results[-1]), flush=True)
    except KeyboardInterrupt:
        return 130
    except Terminated as stopped:
        return stopped.exit_code
    except ReplicatorError as error:  # no room to play in
        print(f"examples: {error}", file=sys.stderr)
        return error.exit_code
    ok = all(result.ok for result in results)
    if args.json:
        head = {"schema_version": SCHEMA_VERSION, "command": "examples", "ok": ok}
        print(json.dumps(head | {"examples": [asdict(result) for result in results]}), flush=True)
    return 0 if ok else 1


def _play(name: str, args: argparse.Namespace) -> Played:
    with workspace(PREFIX, _NEEDED_BYTES, keep=args.keep) as work:
        play = Play(name, work, args.deadline_s)
        try:
            play.run()
        except ReplicatorError as error:
            play.played.problems.append(str(error))
            for log in play.logs:
                if text := tail(log):
                    print(f"{log.name}:\n{text}", file=sys.stderr)
        finally:
            with held_signals():
                play.close()
        if args.keep:
            print(f"{name}: kept in {work}", file=sys.stderr)
        return play.played


def _line(result: Played) -> str:
    def step(number: int | None) -> str:
        return "nothing" if number is None else f"step {number}"

    line = (
        f"{result.framework:<20} saved {step(result.saved_step)}, recovered {step(result.recovered_step)} from "
        f"{result.source}, bitwise equal: {'yes' if result.bitwise_equal else 'NO'}"
    )
    return "\n".join([line, *(f"  not as it should be: {problem}" for problem in result.problems)])


if __name__ == "__main__":
    sys.exit(main())

"""`replicator-admin demo`: the options, and the exit status."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from replicator.demo.options import DemoOptions
from replicator.demo.report import Report, Result
from replicator.errors import ConfigError, ReplicatorError
from replicator.local_cluster.workspace import held_signals, raised_signals, workspace

PREFIX = "replicator-demo-"
_NEEDED_BYTES = 768 << 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to a parser."""
    defaults = DemoOptions()
    add = parser.add_argument
    add("--nodes", type=int, default=defaults.nodes, metavar="N", help="nodes of the job (default %(default)s)")
    add("--replicas", type=int, default=defaults.replicas, metavar="R", help="copies beside the owner's (%(default)s)")
    add("--lose", type=int, metavar="NODE", help="number of the node that is lost (default: drawn from the seed)")
    add("--lose-at-step", type=int, metavar="STEP", help="lose it after this step (default: drawn from the seed)")
    add("--steps", type=int, default=defaults.steps, metavar="N", help="steps to train (default %(default)s)")
    add("--save-every", type=int, default=defaults.save_every, metavar="N", help="save every N steps (%(default)s)")
    add("--seed", type=int, default=defaults.seed, metavar="N", help="of model, data and fate (default %(default)s)")
    add("--deadline-s", type=float, default=defaults.deadline_s, metavar="S", help="give up after (%(default)s)")
    add("--keep", action="store_true", help="leave stores, logs and final states where they are, and say where")
    if not any("--json" in action.option_strings for action in parser._actions):
        add("--json", action="store_true", help="the result as one JSON object on the last line")


def run(args: argparse.Namespace) -> int:
    """Play the demo.

    Returns:
        The exit status: 0 when everything is true, else 1.

    Raises:
        ConfigError: wrong options, or no PyTorch. StoreRootError: no room in /dev/shm.
        ReplicatorError: a process failed, or did not come in time; what it said last was printed.
        KeyboardInterrupt: Ctrl-C. Terminated: SIGTERM or SIGHUP. No process of the demo is left then either.
    """
    options = _options(args)
    report = Report()
    with raised_signals(), workspace(PREFIX, _NEEDED_BYTES, keep=options.keep) as work:
        result = _play(options, work, report)
    if args.json:
        report.json(result)
    else:
        report.summary(result)
    return 0 if result.ok else 1


def _options(args: argparse.Namespace) -> DemoOptions:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the demo trains with PyTorch, which is not installed; pip install 'replicator[torch]'")
    return DemoOptions(
        nodes=args.nodes,
        replicas=args.replicas,
        lose=args.lose,
        lose_at_step=args.lose_at_step,
        steps=args.steps,
        save_every=args.save_every,
        seed=args.seed,
        keep=args.keep,
        deadline_s=args.deadline_s,
    )


def _play(options: DemoOptions, work: Path, report: Report) -> Result:
    # Imported late: wrong options are told at once, without loading gRPC.
    from replicator.demo.scenario import Scenario

    scenario = Scenario(options, work, report)
    try:
        result = scenario.play()
    except ReplicatorError:
        report.logs(scenario.logs)
        raise
    finally:
        with held_signals():
            scenario.close()
    if options.keep:
        result.kept = str(work)
        report.say("demo", f"kept in {work}")
    return result

"""A seeded simulator: real agents and real stores, with a clock, a network and disks that do what a seed says.

See docs/testing.md. `python -m tests.simulator --seed 123` replays one run.
"""

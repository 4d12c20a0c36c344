"""Decisions as pure functions with reasons: placement, recovery, retention. No I/O, no clock, no randomness."""

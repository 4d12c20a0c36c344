"""Drops what is superseded: after a container became protected, and first of all when the store is full."""

from __future__ import annotations


class Retention:
    """`on_pressure` may be called in any thread, the rest in the event loop."""

    async def run(self, job: str) -> int:
        """Drop what `plan_retention` allows for the job; returns how many containers."""
        raise NotImplementedError

    def on_pressure(self, wanted_bytes: int) -> int:
        """`Store.on_pressure`: drop superseded containers, oldest first; returns the bytes that were freed."""
        raise NotImplementedError

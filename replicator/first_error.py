"""What went wrong first in a file: `torch.save` ends its archive after a failed write, and raises another error."""

from __future__ import annotations

from replicator.errors import ReplicatorError


class FirstError:
    """Of one file. Not thread-safe."""

    def __init__(self) -> None:
        self._error: ReplicatorError | OSError | None = None

    def keep(self, error: ReplicatorError | OSError) -> None:
        """A write failed with it."""
        if self._error is None:
            self._error = error

    def raise_for(self, error: BaseException | None) -> None:
        """Raise what was kept, when `error`, with which the block of the file ended, hides it.

        An error that says itself what is wrong is left alone, and so is what ends a program.
        """
        if self._error is None or error is self._error:
            return
        if isinstance(error, Exception) and not isinstance(error, ReplicatorError):
            # Without `from error`: that one has this error as its context already, and a ring of causes helps nobody.
            raise self._error from None

"""A file that is being written: an object, sealed when the file is closed."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from replicator.client.segments import SegmentObject
from replicator.errors import ReplicatorError
from replicator.first_error import FirstError
from replicator.integrations._logical.saves import Save, Saves

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class NewFile(io.RawIOBase):
    """A file being written. Nothing of it stays when the block that writes it raises, or when it is never closed."""

    def __init__(self, saves: Saves, save: Save, sink: SegmentObject | None) -> None:
        super().__init__()
        self._saves = saves
        self._save = save
        self._sink = sink
        self._position = 0
        self._first_error = FirstError()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data)
        if self._sink is not None:
            try:
                self._sink.write(view)
            except ReplicatorError as error:
                self._abandon()
                try:
                    self._saves.fail(self._save, "a file cannot be written", error)
                except ReplicatorError as told:
                    self._first_error.keep(told)
                    raise
        self._position += view.nbytes
        return view.nbytes

    def close(self) -> None:
        """Idempotent."""
        if not self.closed:
            super().close()
            sink, self._sink = self._sink, None
            if sink is not None:
                try:
                    self._saves.add(self._save, sink)
                finally:
                    sink.abandon()

    def __exit__(self, kind: Any, error: BaseException | None, _: object) -> None:
        if kind is not None:
            self._abandon()
        self.close()
        self._first_error.raise_for(error)

    def __del__(self) -> None:
        self._abandon()
        super().close()

    def _abandon(self) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.abandon()

"""Page-locked segments; the two calls of the CUDA runtime are made up where there is no device."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from replicator.checkpoint import items, page_lock
from replicator.checkpoint.items import write_item
from replicator.checkpoint.page_lock import PageLocks
from replicator.store import mapping

MIB = 1 << 20


class Runtime:
    """Keeps what is registered, and whether its memory was still mapped when it was unregistered."""

    def __init__(self, code: int = 0) -> None:
        self.code = code
        self.now: dict[int, int] = {}
        self.calls = 0
        self.mapped_at_end: list[bool] = []

    def register(self, address: int, length: int) -> int:
        self.calls += 1
        if not self.code:
            assert address not in self.now
            self.now[address] = length
        return self.code

    def unregister(self, address: int) -> int:
        length = self.now.pop(address)
        self.mapped_at_end.append(f"{address:x}-{address + length:x} rw-s" in Path("/proc/self/maps").read_text())
        return 0


@pytest.fixture
def new_view(shm_root: Path) -> Callable[[int], memoryview]:
    def make(size: int) -> memoryview:
        fd = mapping.open_parents_only(shm_root / f"segment-{size}", os.O_RDWR | os.O_CREAT)
        os.ftruncate(fd, size)
        return mapping.map_file(fd, size, writable=True)

    return make


def test_a_mapping_is_registered_once_and_until_just_before_it_ends(new_view: Callable[[int], memoryview]) -> None:
    runtime = Runtime()
    locks = PageLocks(runtime.register, runtime.unregister)
    view = new_view(3 * MIB)
    other = new_view(2 * MIB)
    for start in (0, 7, 2 * MIB):
        assert locks.lock(view[start : start + 100])
    assert locks.lock(other)
    assert runtime.calls == 2
    assert sorted(runtime.now.values()) == [2 * MIB, 3 * MIB]
    del view
    gc.collect()
    assert runtime.mapped_at_end == [True]
    # The address may serve again at once.
    assert locks.lock(new_view(3 * MIB + 4096))
    assert runtime.calls == 3
    gc.collect()
    assert list(runtime.now.values()) == [2 * MIB]


def test_what_is_no_segment_or_a_small_one_is_left_alone(new_view: Callable[[int], memoryview]) -> None:
    runtime = Runtime()
    locks = PageLocks(runtime.register, runtime.unregister)
    assert not locks.lock(memoryview(bytearray(4 * MIB)))
    assert not locks.lock(new_view(4096))
    assert not runtime.calls


@pytest.mark.parametrize("how", ["refused", "raised"])
def test_a_failure_is_told_once_and_not_tried_again(
    new_view: Callable[[int], memoryview], caplog: pytest.LogCaptureFixture, how: str
) -> None:
    runtime = Runtime(code=2)

    def register(address: int, length: int) -> int:
        code = runtime.register(address, length)
        if how == "raised":
            raise RuntimeError("no device")
        return code

    locks = PageLocks(register, runtime.unregister)
    with caplog.at_level(logging.WARNING, "replicator.checkpoint"):
        for _ in range(3):
            assert not locks.lock(new_view(2 * MIB))
    assert runtime.calls == 1
    assert len(caplog.records) == 1
    assert ("CUDA error 2" if how == "refused" else "no device") in caplog.text


class OnDevice(torch.Tensor):
    """Says that it lies on a device; its bytes are on the CPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", 0)


class Sink:
    def __init__(self, view: memoryview) -> None:
        self.view, self.size = view, 0

    def write(self, data: memoryview | bytes) -> int:
        self.next_buffer_slice(len(data))[:] = data
        return len(data)

    def next_buffer_slice(self, size: int) -> memoryview:
        self.size += size
        return self.view[self.size - size : self.size]

    def tell(self) -> int:
        return self.size


def test_a_tensor_on_the_device_goes_into_a_locked_segment(
    new_view: Callable[[int], memoryview], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Runtime()
    monkeypatch.setattr(items, "PAGE_LOCKS", PageLocks(runtime.register, runtime.unregister))
    monkeypatch.setattr(items, "is_templated", lambda tensor: True)
    view = new_view(4 * MIB)
    plain = torch.arange(1000, dtype=torch.float32).view(10, 100)
    for _ in range(3):
        sink = Sink(view)
        offset, length = write_item(sink, plain.as_subclass(OnDevice))
        expected = Sink(memoryview(bytearray(MIB)))
        assert (offset, length) == write_item(expected, plain)
        assert view[:length] == expected.view[:length]
    assert runtime.calls == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_real_device(new_view: Callable[[int], memoryview]) -> None:
    view = new_view(8 * MIB)
    sink = Sink(view)
    tensor = torch.arange(1 << 20, dtype=torch.float32, device="cuda")
    write_item(sink, tensor)
    assert page_lock.PAGE_LOCKS.lock(view)
    area = torch.frombuffer(view, dtype=torch.uint8)
    assert area.is_pinned()

"""The items of a save, divided into objects, and how one object is written.

A bucket becomes one object: its tensors first, then its bytes.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

import torch
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type, _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from replicator.checkpoint.items import BufferSink, Gathering, write_item
from replicator.checkpoint.template import PAYLOAD_ALIGNMENT, is_templated, template_of
from replicator.errors import ConfigError, ReplicatorError, SaveError, UnsupportedError
from replicator.ids import CheckpointContainerId, CheckpointObjectId

logger = logging.getLogger("replicator.checkpoint")

ResultT = TypeVar("ResultT")


class WriteItemResolver(Protocol):
    """Gives the value of an item. Every `torch.distributed.checkpoint` `SavePlanner` is one."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """May be called again, and from several threads. A tensor may lie on any device and have any strides."""
        ...


@dataclass
class ObjectWriteBucket:
    """What becomes one object.

    Attributes:
        object_id: the object. object_name: its name, seen from where the metadata are.
        bytesio_data, tensor_data: the items with their values.
    """

    object_id: CheckpointObjectId
    object_name: str
    bytesio_data: list[tuple[WriteItem, io.BytesIO]] = field(default_factory=list)
    tensor_data: list[tuple[WriteItem, torch.Tensor]] = field(default_factory=list)
    _own: set[int] = field(default_factory=set, repr=False, compare=False)

    def add(self, item: WriteItem, resolver: WriteItemResolver) -> None:
        """Resolve an item, and take it. Raises SaveError, with the key, and like `add_tensor`."""
        if is_blob(item):
            self.bytesio_data.append((item, resolve_blob(resolver, item)))
        else:
            self.add_tensor(item, resolver)

    def add_tensor(self, item: WriteItem, resolver: WriteItemResolver) -> None:
        """A tensor of the CPU that is part of a larger storage, or not contiguous, becomes a contiguous copy.

        Raises:
            UnsupportedError: it cannot be copied; with the key.
        """
        tensor = resolve_tensor(resolver, item).detach()
        if tensor.device.type == "cpu" and is_templated(tensor) and not _is_whole(tensor):
            with naming(item, f"{_kind(tensor)} cannot be saved", UnsupportedError):
                tensor = tensor.clone(memory_format=torch.contiguous_format)
            self._own.add(len(self.tensor_data))
        self.tensor_data.append((item, tensor))

    def rename(self, name: str) -> None:
        """Give the object another name, in the same folder."""
        above = len(self.object_id.name) - len(self.object_name)
        self.object_id, self.object_name = CheckpointObjectId(self.object_id.container, name), name[above:]

    def tensors(self) -> Iterable[tuple[WriteItem, torch.Tensor]]:
        """To be written."""
        return self.tensor_data

    def owns(self, index: int) -> bool:
        """Whether nobody else has the tensor at this place of `tensor_data`."""
        return index in self._own

    def stage(self, copy: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Hold copies from now on, of what is not this bucket's own."""
        self.tensor_data = [
            (item, tensor if self.owns(index) else copy(tensor))
            for index, (item, tensor) in enumerate(self.tensor_data)
        ]
        self._own = set(range(len(self.tensor_data)))

    @property
    def size_bytes(self) -> int:
        """What the object will take; a guess for tensors that are not dense."""
        blobs = sum(blob.getbuffer().nbytes for _, blob in self.bytesio_data)
        return blobs + sum(tensor_bytes(tensor.dtype, tensor.shape) for _, tensor in self.tensor_data)


@dataclass
class LateBucket(ObjectWriteBucket):
    """One whose tensors are had when they are written, one after another, and written from wherever they lie.

    A planner that makes them then, to cast them for instance, needs memory for one at a time (F26). Not to be staged
    or pickled.
    """

    _late: list[tuple[WriteItem, WriteItemResolver]] = field(default_factory=list, repr=False, compare=False)

    def add_tensor(self, item: WriteItem, resolver: WriteItemResolver) -> None:
        self._late.append((item, resolver))

    def tensors(self) -> Iterable[tuple[WriteItem, torch.Tensor]]:
        return ((item, resolve_tensor(resolver, item)) for item, resolver in self._late)

    @property
    def size_bytes(self) -> int:
        dense = [(one.properties.dtype, one.chunk.sizes) for item, _ in self._late if (one := item.tensor_data)]
        return super().size_bytes + sum(tensor_bytes(dtype, shape) for dtype, shape in dense)


def split_items(items: Sequence[WriteItem], count: int) -> list[list[WriteItem]]:
    """At most `max(count, 1)` lists of items, of about the same size; none is empty."""
    return [bucket for bucket in _split_by_size_and_type(max(count, 1), list(items)) if bucket]


def check_unique(items: Sequence[WriteItem], rank: int) -> None:
    """Raises SaveError for a key that occurs twice."""
    seen: set[MetadataIndex] = set()
    for item in items:
        if item.index in seen:
            raise SaveError(f"key {item.index.fqn!r} occurs twice in the items of rank {rank}; each is saved once")
        seen.add(item.index)


def check_names(buckets: Sequence[ObjectWriteBucket], container: CheckpointContainerId, rank: int) -> None:
    """Raises ConfigError for buckets with the same name, or of another container."""
    seen: set[str] = set()
    for bucket in buckets:
        one = bucket.object_id
        if one.container != container or not f"/{one.name}".endswith(f"/{bucket.object_name}"):
            raise ConfigError(f"expected buckets of {container}, found {bucket.object_name!r} with {one}")
        if one.name in seen:
            raise ConfigError(
                f"rank {rank} has two buckets called {one.name!r} in {container}; prepare them with different prefixes"
            )
        seen.add(one.name)


def is_blob(item: WriteItem) -> bool:
    return bool(item.type == WriteItemType.BYTE_IO)


def resolve(resolver: WriteItemResolver, item: WriteItem) -> torch.Tensor | io.BytesIO:
    """The value of an item.

    Raises:
        SaveError: what the resolver raised, with the key.
    """
    with naming(item, "its value cannot be had"):
        value = resolver.resolve_data(item)
    expected = io.BytesIO if is_blob(item) else torch.Tensor
    if not isinstance(value, expected):
        raise SaveError(
            f"key {item.index.fqn!r}: expected the planner to give a {expected.__name__}, found {type(value).__name__}"
        )
    return value


def resolve_blob(resolver: WriteItemResolver, item: WriteItem) -> io.BytesIO:
    return cast(io.BytesIO, resolve(resolver, item))


def resolve_tensor(resolver: WriteItemResolver, item: WriteItem) -> torch.Tensor:
    return cast(torch.Tensor, resolve(resolver, item))


def write_object(
    sink: BufferSink,
    name: str,
    tensors: Iterable[tuple[WriteItem, torch.Tensor]],
    blobs: Iterable[tuple[WriteItem, io.BytesIO]],
    *,
    stock: bool = False,
) -> list[WriteResult]:
    """Write the items of one object: tensors, then bytes.

    Args:
        name: of the object, for the results.
        stock: write tensors with `torch.save` itself, which is slower; the bytes mean the same.

    Returns:
        For each item where it is in the object, as `FileSystemReader` expects it.

    Raises:
        UnsupportedError: a tensor that cannot be saved, with its key.
        ReplicatorError: what the sink or an iterable raised.
    """
    gathering = Gathering(sink)
    results: list[WriteResult] = []
    for item, tensor in tensors:
        with naming(item, f"{_kind(tensor)} cannot be saved", UnsupportedError):
            offset, length = write_item(gathering, tensor, stock=stock)
        results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
    for item, blob in blobs:
        offset, length = write_item(gathering, blob)
        results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
    gathering.flush()
    return results


def in_threads(work: Sequence[tuple[str, Callable[[], ResultT]]], threads: int, what: str) -> list[ResultT]:
    """Do named pieces of work, `threads` at a time; their results, in order.

    All of it is tried. Every error is logged, and all of them are raised together.

    Raises:
        ReplicatorError: of the class of the errors when they have one in common, else SaveError. It is raised from an
            ExceptionGroup of all.
    """

    def attempt(name: str, piece: Callable[[], ResultT]) -> ResultT | Exception:
        try:
            return piece()
        except Exception as error:
            logger.error("%s of %s could not be written: %s: %s", name, what, type(error).__name__, error)
            return error

    if min(threads, len(work)) < 2:
        done = [attempt(name, piece) for name, piece in work]
    else:
        with ThreadPoolExecutor(min(threads, len(work)), thread_name_prefix="replicator-save") as pool:
            done = list(pool.map(lambda one: attempt(*one), work))
    errors = [one for one in done if isinstance(one, Exception)]
    if errors:
        raise together(errors, [name for (name, _), one in zip(work, done, strict=True) if one in errors], what)
    return cast("list[ResultT]", done)


def together(errors: Sequence[Exception], names: Sequence[str], what: str) -> ReplicatorError:
    """One error that tells of all; they are its cause."""
    kinds = {type(error) for error in errors}
    common = kinds.pop() if len(kinds) == 1 else SaveError
    made = common if issubclass(common, ReplicatorError) else SaveError
    told = "; ".join(
        f"{name}: {error}" if isinstance(error, made) else f"{name}: {type(error).__name__}: {error}"
        for name, error in zip(names, errors, strict=True)
    )
    one = made(f"{len(errors)} of the objects of {what} could not be written: {told}")
    one.__cause__ = ExceptionGroup(f"writing {what}", list(errors))
    return one


@contextmanager
def naming(item: WriteItem, what: str, kind: type[ReplicatorError] = SaveError) -> Iterator[None]:
    """Errors that do not come from the store get the key of the item."""
    try:
        yield
    except UnsupportedError as error:
        raise kind(f"key {item.index.fqn!r}: {what}: {error}") from error
    except ReplicatorError:
        raise
    except Exception as error:
        raise kind(f"key {item.index.fqn!r}: {what}: {type(error).__name__}: {error}") from error


def _is_whole(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def _kind(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__ if type(tensor) is not torch.Tensor else "a tensor"
    return f"{kind} of {tensor.dtype}, {tensor.layout}"


def tensor_bytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """What a dense tensor takes in an object, with its alignment; a guess for other kinds, of which objects grow."""
    try:
        return template_of(dtype, tuple(shape)).total_bytes + PAYLOAD_ALIGNMENT
    except (RuntimeError, TypeError, KeyError):  # a dtype that has no plain tensors
        return PAYLOAD_ALIGNMENT

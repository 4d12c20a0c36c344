"""Any order of what may happen to a store, against a model that knows what must be there."""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from store_support import Trainer, bytes_on_disk, version

from replicator.errors import ObjectExistsError, SegmentError, StoreFullError
from replicator.ids import ContainerVersion, ObjectVersion
from replicator.native import block_crcs, combine_blocks, crc32c
from replicator.store import Store
from replicator.store.ingest import Item
from replicator.store.paths import open_root
from replicator.store.publish import publish
from replicator.store.reader import ObjectReader, open_object
from replicator.store.segment import MappedSegment
from replicator.store.trailer import PAGE, ObjectInfo, capacity_for
from replicator.store.writer import ObjectWriter

BLOCK = PAGE
BUDGET = 60 * PAGE
SIZES = st.sampled_from([0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 9 * PAGE + 5])
OBJECTS = st.builds(
    lambda step, name: version(step).object(name),
    st.integers(0, 2),
    st.sampled_from(["a", "b/c"]),
)
VERSIONS = OBJECTS.map(lambda one: one.version)


@dataclass(eq=False)
class Client:
    """A trainer; `old` are segments that it once had, and into which it writes when it hangs and comes back late."""

    trainer: Trainer
    attached: bool = True
    alive: bool = True
    old: list[MappedSegment] = field(default_factory=list)


@dataclass(eq=False)
class Writing:
    client: Client
    one: ObjectVersion
    data: bytes
    writer: ObjectWriter
    over: bool = False


@dataclass(eq=False)
class Reading:
    reader: ObjectReader
    data: bytes


class StoreMachine(RuleBasedStateMachine):
    """An agent with its trainers. Every sealed object, every manifest and every open reader is in the model."""

    clients = Bundle("clients")
    writings = Bundle("writings")
    readings = Bundle("readings")

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="replicator-test-", dir="/dev/shm"))
        self.paths = open_root(self.top / "store", create=True)
        self.by_id: dict[str, Client] = {}
        self.objects: dict[ObjectVersion, bytes] = {}
        self.writers: dict[ObjectVersion, Client] = {}
        self.manifests: dict[ContainerVersion, bytes] = {}
        self.protected: set[ContainerVersion] = set()
        self.readings_open: list[Reading] = []
        self.writings_open: list[Writing] = []
        self.quarantined = 0
        self.serial = 0
        self.store = self._open()

    def _open(self) -> Store:
        store = Store(self.paths, BUDGET)
        store.is_attached = lambda client_id: client_id in self.by_id and self.by_id[client_id].attached
        report = store.rebuild()
        assert report.quarantined == 0
        return store

    def teardown(self) -> None:
        for reading in self.readings_open:
            reading.reader.close()
        for client in self.by_id.values():
            client.trainer.close()
        self.store.close()
        shutil.rmtree(self.top)

    # -- trainers

    @precondition(lambda self: sum(client.alive for client in self.by_id.values()) < 3)
    @rule(target=clients)
    def new_client(self) -> Client:
        client = Client(Trainer(self.paths))
        self.by_id[client.trainer.client_id] = client
        return client

    @initialize(target=clients)
    def first_client(self) -> Client:
        return self.new_client()

    @rule(client=clients)
    def hang(self, client: Client) -> None:
        client.attached = False

    @rule(client=clients)
    def come_back(self, client: Client) -> None:
        client.attached = client.alive

    @rule(client=clients)
    def write_late(self, client: Client) -> None:
        """What hung goes on where it was: in memory that it has no right to any more.

        Not in what it has sealed: only checksums help against a writer that spoils its own objects.
        """
        if not client.alive or client.attached:
            return
        mine = {self.store.paths.object(one).stat().st_ino for one, by in self.writers.items() if by is client}
        mine |= {os.fstat(reading.reader.fd).st_ino for reading in self.readings_open}
        mine |= {w.writer.mapped.inode for w in self.writings_open if w.client is client and not w.over}
        for mapped in client.old:
            if mapped.inode not in mine:
                mapped.view[:] = b"!" * mapped.capacity

    @rule(client=clients, tell=st.booleans())
    def die(self, client: Client, tell: bool) -> None:
        if client.alive:
            client.alive = client.attached = False
            client.old.clear()
            client.trainer.close()
        if tell:
            self.store.client_gone(client.trainer.client_id)

    # -- objects

    @rule(target=writings, client=clients, one=OBJECTS, size=SIZES, room=SIZES)
    def write(self, client: Client, one: ObjectVersion, size: int, room: int) -> object:
        if not client.attached:
            return multiple()
        data = self._content(one, size)
        try:
            writer = client.trainer.writer(self.store, one, capacity_for(room, BLOCK), BLOCK)
        except StoreFullError:
            self._must_be_full(capacity_for(room, BLOCK))
            return multiple()
        try:
            writer.write(data[: size // 2])
            area = writer.next_buffer_slice(size - size // 2)
            area[:] = data[size // 2 :]
            del area
        except StoreFullError:
            self._must_be_full(capacity_for(size, BLOCK))
            self.store.release(client.trainer.client_id, writer.mapped.name)
            return multiple()
        client.old.append(writer.mapped)
        writing = Writing(client, one, data, writer)
        self.writings_open.append(writing)
        return writing

    def _content(self, one: ObjectVersion, size: int) -> bytes:
        """New bytes, or, when that is the size of what is sealed already, those."""
        there = self.objects.get(one)
        if there is not None and len(there) == size:
            return there
        self.serial += 1
        return (b"%05d" % self.serial * (size // 5 + 1))[:size]

    def _must_be_full(self, wanted: int) -> None:
        usage = self.store.usage()
        assert usage.sealed_bytes + usage.reserved_bytes + wanted > BUDGET

    @rule(client=clients, one=OBJECTS, size=SIZES)
    def save(self, client: Client, one: ObjectVersion, size: int) -> None:
        writing = self.write(client, one, size, size)
        if isinstance(writing, Writing):
            self.seal(writing)

    @rule(writing=writings)
    def seal(self, writing: Writing) -> None:
        """Also again, also of what was given back meanwhile."""
        self._publish(writing, by_itself=False)

    @rule(writing=writings)
    def publish_alone(self, writing: Writing) -> None:
        self._publish(writing, by_itself=True)

    def _publish(self, writing: Writing, *, by_itself: bool) -> None:
        client, one = writing.client, writing.one
        if not client.alive or not client.attached or (by_itself and writing.over):
            return
        name = writing.writer.mapped.name
        if writing.over:
            return
        info = writing.writer.close()
        there = self.objects.get(one)
        exists = self.paths.segment(name).exists()
        try:
            if by_itself:
                publish(self.paths, name, info)
                assert self.store.adopt(one).same_content(info)
            else:
                self.store.seal(client.trainer.client_id, name, info)
        except ObjectExistsError:
            assert there is not None
            assert there != writing.data
            self.store.release(client.trainer.client_id, name)
        except SegmentError:
            assert not exists
        else:
            assert there is None or there == writing.data
            if there is None:
                assert exists
                self.writers[one] = client
            self.objects[one] = writing.data
        writing.over = True

    @rule(client=clients, ones=st.lists(OBJECTS, min_size=1, max_size=4, unique=True), size=SIZES)
    def ingest(self, client: Client, ones: list[ObjectVersion], size: int) -> None:
        """Many at once, each for itself."""
        if not client.attached:
            return
        self.serial += 1
        data = (b"%05d" % self.serial * (size // 5 + 1))[:size]
        crcs = tuple(block_crcs(data, BLOCK))
        crc, client_id = combine_blocks(crcs, size, BLOCK), client.trainer.client_id
        items = [Item(ObjectInfo(one, size, crc, BLOCK, crcs, "node-a", client_id), data) for one in ones]
        for one, error in zip(ones, self.store.ingest(items), strict=True):
            there = self.objects.get(one)
            if error is None:
                assert there is None or there == data
                self.objects[one] = data
                self.writers.setdefault(one, client)
            elif isinstance(error, ObjectExistsError):
                assert there is not None
                assert there != data
            else:
                assert isinstance(error, StoreFullError)
                self._must_be_full(len(ones) * capacity_for(size, BLOCK))

    @rule(client=clients, pages=st.integers(1, 12), blank=st.booleans(), done=st.booleans())
    def stock(self, client: Client, pages: int, blank: bool, done: bool) -> None:
        """Ahead of need; or it is stopped."""
        if client.attached:
            self.store.stock(client.trainer.client_id, pages * PAGE, lambda mapped, is_stopped: done, blank)

    @rule(writing=writings)
    def release(self, writing: Writing) -> None:
        client = writing.client
        if client.attached and not writing.over:
            writing.over = True
            self.store.release(client.trainer.client_id, writing.writer.mapped.name)

    @rule(one=OBJECTS)
    def quarantine(self, one: ObjectVersion) -> None:
        self.store.quarantine(one, "a test")
        if one in self.objects:
            self.quarantined += 1
            self._forget(one)

    @rule(container=VERSIONS)
    def drop(self, container: ContainerVersion) -> None:
        self.store.drop(container)
        self.manifests.pop(container, None)
        self.protected.discard(container)
        for one in [one for one in self.objects if one.version == container]:
            self._forget(one)

    def _forget(self, one: ObjectVersion) -> None:
        del self.objects[one]
        del self.writers[one]

    # -- readers, commits, restarts

    @rule(target=readings, one=OBJECTS, mapped=st.booleans())
    def read(self, one: ObjectVersion, mapped: bool) -> object:
        if one not in self.objects:
            return multiple()
        reading = Reading(open_object(self.paths, one), self.objects[one])
        if mapped:
            assert bytes(reading.reader.view) == reading.data
        self.readings_open.append(reading)
        return reading

    @rule(reading=consumes(readings))
    def end_reading(self, reading: Reading) -> None:
        reading.reader.close()
        self.readings_open.remove(reading)

    @rule(container=VERSIONS)
    def commit(self, container: ContainerVersion) -> None:
        data = str(container).encode()
        self.store.put_manifest(container, data, crc32c(data))
        self.manifests[container] = data

    @rule(container=VERSIONS)
    def protect(self, container: ContainerVersion) -> None:
        is_protected = self.store.mark_protected(container)
        assert is_protected == (container in self.manifests)
        if is_protected:
            self.protected.add(container)

    @rule()
    def restart(self) -> None:
        before = self.store.usage()
        self.store.close()
        self.store = self._open()
        after = self.store.usage()
        assert after.sealed_bytes == before.sealed_bytes
        assert after.free_bytes >= before.free_bytes

    @invariant()
    def everything_is_as_it_was_written(self) -> None:
        held = {
            container.object(name): info
            for container in self.store.versions()
            for name, info in self.store.objects(container).items()
        }
        assert held.keys() == self.objects.keys()
        for one, data in self.objects.items():
            with open_object(self.paths, one) as reader:
                assert reader.info == held[one]
                reader.verify()
                assert bytes(reader.view) == data

    @invariant()
    def readers_see_what_they_opened(self) -> None:
        for reading in self.readings_open:
            reading.reader.verify()
            assert bytes(reading.reader.view) == reading.data

    @invariant()
    def commits_are_kept(self) -> None:
        versions = {one.version for one in self.objects} | self.manifests.keys()
        assert self.store.versions("job") == sorted(versions)
        for container in versions:
            assert self.store.manifest(container) == self.manifests.get(container)
            assert self.store.is_protected(container) == (container in self.protected)

    @invariant()
    def no_byte_is_unaccounted(self) -> None:
        usage = self.store.usage()
        assert usage.used_bytes == bytes_on_disk(self.paths) <= BUDGET
        assert usage.sealed_objects == len(self.objects)


class TestStore(StoreMachine.TestCase):  # type: ignore[misc, name-defined]
    """Promises 1, 7, 9 and 10; F03, F17, F24, F27."""

    settings = settings(
        max_examples=100,
        stateful_step_count=40,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )

"""What a store holds, in memory: objects, manifests and marks by version. Rebuilt from the files at start."""

from __future__ import annotations

from dataclasses import dataclass, field

from replicator.ids import ContainerVersion, ObjectVersion
from replicator.store.trailer import ObjectInfo


@dataclass(slots=True)
class _Container:
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    manifest: bytes | None = None
    is_protected: bool = False

    @property
    def is_empty(self) -> bool:
        return not self.objects and self.manifest is None


class Index:
    """Not thread-safe; `Store` locks."""

    def __init__(self) -> None:
        self._containers: dict[ContainerVersion, _Container] = {}
        self._capacities: dict[ObjectVersion, int] = {}
        self.sealed_bytes = 0

    @property
    def object_count(self) -> int:
        return len(self._capacities)

    def add(self, info: ObjectInfo, capacity: int) -> None:
        one = info.object
        self.remove(one)
        self._containers.setdefault(one.version, _Container()).objects[one.name] = info
        self._capacities[one] = capacity
        self.sealed_bytes += capacity

    def remove(self, one: ObjectVersion) -> ObjectInfo | None:
        container = self._containers.get(one.version)
        if container is None or one.name not in container.objects:
            return None
        self.sealed_bytes -= self._capacities.pop(one)
        info = container.objects.pop(one.name)
        self._forget_empty(one.version)
        return info

    def get(self, one: ObjectVersion) -> ObjectInfo | None:
        container = self._containers.get(one.version)
        return container.objects.get(one.name) if container else None

    def objects(self, version: ContainerVersion) -> dict[str, ObjectInfo]:
        container = self._containers.get(version)
        return dict(container.objects) if container else {}

    def bytes_of(self, version: ContainerVersion) -> int:
        """Capacity of the segments that hold the version's objects."""
        return sum(self._capacities[version.object(name)] for name in self.objects(version))

    def versions(self, job: str | None) -> list[ContainerVersion]:
        return sorted(version for version in self._containers if job is None or version.container.job == job)

    def set_manifest(self, version: ContainerVersion, data: bytes) -> None:
        self._containers.setdefault(version, _Container()).manifest = data

    def manifest(self, version: ContainerVersion) -> bytes | None:
        container = self._containers.get(version)
        return container.manifest if container else None

    def set_protected(self, version: ContainerVersion) -> None:
        self._containers[version].is_protected = True

    def is_protected(self, version: ContainerVersion) -> bool:
        container = self._containers.get(version)
        return container.is_protected if container else False

    def drop_manifest(self, version: ContainerVersion) -> None:
        container = self._containers.get(version)
        if container is not None:
            container.manifest = None
            container.is_protected = False
            self._forget_empty(version)

    def _forget_empty(self, version: ContainerVersion) -> None:
        if self._containers[version].is_empty:
            del self._containers[version]

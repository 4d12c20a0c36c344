"""A store, and a trainer that uses it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from store_support import BUDGET, Trainer

from replicator.store import Store
from replicator.store.paths import open_root


@pytest.fixture
def store(shm_root: Path) -> Iterator[Store]:
    opened = Store(open_root(shm_root / "store", create=True), BUDGET)
    opened.rebuild()
    yield opened
    opened.close()


@pytest.fixture
def trainer(store: Store) -> Iterator[Trainer]:
    made = Trainer(store.paths)
    yield made
    made.close()

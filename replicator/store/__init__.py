"""The node-local store: the only code that touches its files. See docs/architecture.md for the layout."""

from replicator.store.pool import Reservation
from replicator.store.rebuild import RebuildReport
from replicator.store.records import JobState
from replicator.store.room import StoreUsage
from replicator.store.store import Store

__all__ = ["JobState", "RebuildReport", "Reservation", "Store", "StoreUsage"]

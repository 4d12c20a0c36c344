"""The frameworks that save through Replicator: one file each, imported by name. This package itself imports nothing."""

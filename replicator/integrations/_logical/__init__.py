"""Directories of checkpoints that belong to a job and to no node: paths, saves by many processes, and reading."""

"""Limits of the machine, the product and its peers, measured in one run: `python -m benchmarks`."""

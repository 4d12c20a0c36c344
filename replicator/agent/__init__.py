"""The daemon of a node: it wires store, transfer and decide together. Does not import torch."""

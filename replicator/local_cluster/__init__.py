"""A cluster on this machine: several nodes, each an agent with its own address and memory and a torchrun of its ranks.

`cluster` the nodes as processes; `processes` how they are started and ended; `rendezvous` where torchruns meet;
`workspace` the memory they get, and signals. The demo and the examples are played on it.
"""

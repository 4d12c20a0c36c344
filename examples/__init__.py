"""One example per framework, each short enough to be read as documentation: see docs/integrations.md.

`python -m examples` runs them all as `make examples` does: on two nodes of this machine, one of which is lost.
"""

"""The agent's configuration: a TOML file, then the environment, then flags; the later wins.

Every setting is one field of `AgentConfig`. In the file it is a key of the same name, in the environment
`REPLICATOR_<NAME>`, on the command line `--<name>` with dashes. Unknown keys are errors, and all
timeouts derive from the one knob `deadline_s`.
"""

from replicator.config.agent import AgentConfig, default_root
from replicator.config.load import CLIENT_ENV, ENV_PREFIX, load_config
from replicator.config.values import AUTO_BYTES, parse_cpus, parse_size, split_address

__all__ = [
    "AUTO_BYTES",
    "CLIENT_ENV",
    "ENV_PREFIX",
    "AgentConfig",
    "default_root",
    "load_config",
    "parse_cpus",
    "parse_size",
    "split_address",
]

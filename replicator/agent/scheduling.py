"""How the kernel's scheduler treats the agent: its niceness and its CPUs."""

from __future__ import annotations

import os

from replicator.config import AgentConfig, parse_cpus
from replicator.errors import ConfigError


def apply(config: AgentConfig) -> None:
    """Set what is configured, for this thread and all that it starts: call it before there are others.

    Raises:
        ConfigError: the system does not allow it, or has none of these CPUs.
    """
    if config.cpu_affinity:
        wanted = parse_cpus(config.cpu_affinity)
        try:
            os.sched_setaffinity(0, wanted)
        except (OSError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"cpu_affinity: this process cannot run on CPUs {config.cpu_affinity} ({error}); "
                "the Cpus_allowed_list in /proc/self/status says on which it may"
            ) from None
    if config.nice:
        try:
            os.setpriority(os.PRIO_PROCESS, 0, config.nice)
        except OSError as error:
            raise ConfigError(
                f"nice: the system does not allow {config.nice} ({error.strerror}); less than what the process was "
                "started with needs CAP_SYS_NICE or LimitNICE= of systemd"
            ) from None

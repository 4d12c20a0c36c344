"""When a newer protected container makes the copies of an older one superfluous, and when it does not (F43).

A job cannot go on from a container that is not resumable, for instance from the model alone. So such a one never
supersedes one that is, however much newer, and however safe it is.
"""

from __future__ import annotations

from collections.abc import Mapping

from replicator.decide.types import recency
from replicator.ids import ContainerVersion


def superseding(
    version: ContainerVersion, resumable: bool, protected: Mapping[ContainerVersion, bool]
) -> ContainerVersion | None:
    """The newest protected container that supersedes `version`; None when there is none.

    Args:
        resumable: whether a job can go on from `version`; what is not known to be otherwise is.
        protected: the protected containers, and whether each is resumable.
    """
    found = [
        newer
        for newer, newer_resumable in protected.items()
        if newer.container.job == version.container.job
        and newer_resumable >= resumable
        and recency(newer) > recency(version)
    ]
    return max(found, key=recency, default=None)


def still_wanted(
    committed: Mapping[ContainerVersion, bool], protected: Mapping[ContainerVersion, bool], limit: int
) -> tuple[ContainerVersion, ...]:
    """Committed containers of one job, not protected, that nothing supersedes; newest first.

    Args:
        committed, protected: the containers, and whether each is resumable.
        limit: so many of the resumable ones and so many of the others at most: many saves of the model alone do not
            crowd out the one that a job could go on from.
    """
    found = [
        version
        for version in sorted(committed, key=recency, reverse=True)
        if version not in protected and superseding(version, committed[version], protected) is None
    ]
    few = {one for kind in (True, False) for one in [one for one in found if committed[one] is kind][:limit]}
    return tuple(version for version in found if version in few)

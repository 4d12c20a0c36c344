"""Which container and which object a path means. A path is a name here, and never a place on a disk."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from pathlib import Path, PurePath

from replicator.errors import ConfigError, InvalidIdError, UnsupportedError
from replicator.ids import CheckpointContainerId, validate_object_name, validate_step

PARTIAL_SUFFIX = ".partial"
_TRIED_STEP = 7


@dataclass(frozen=True, slots=True)
class Place:
    """What a path means. `step` is None above the directories of steps; `name` is empty for a step's directory.

    `directory` is its name as it is written in the path. `temporary`: it is the name of a step that is being written.
    """

    step: int | None = None
    name: str = ""
    directory: str = ""
    temporary: bool = False

    @property
    def is_root(self) -> bool:
        return self.step is None

    def container(self, job: str) -> CheckpointContainerId:
        """Raises UnsupportedError where there is no step."""
        if self.step is None:
            raise UnsupportedError("expected a path below the directory of a step, found one above all of them")
        return CheckpointContainerId(job, self.step)

    def object_name(self) -> str:
        """Raises InvalidIdError when it cannot be one."""
        return validate_object_name(self.name)


class Layout:
    """How a step's directory is called.

    Args:
        directory: with `{step}` in it, as in "step-{step}" or "iter_{step:09d}".
        temporary_prefix: of the directory that a step is written into before it is renamed. A suffix ".partial" means
            the same.

    Raises:
        ConfigError: `directory` has not exactly one `{step}`, or does not begin or end with something else.
    """

    def __init__(self, directory: str = "step-{step}", temporary_prefix: str = "tmp_") -> None:
        self.directory = directory
        self.temporary_prefix = temporary_prefix
        try:
            parts = list(string.Formatter().parse(directory))
            self.name_of(_TRIED_STEP)
        except (ValueError, KeyError, IndexError) as error:
            raise ConfigError(
                f"directory: expected a name like 'step-{{step}}', found {directory!r}: {error}"
            ) from None
        fields = [field for _, field, _, _ in parts if field is not None]
        words = "".join(text for text, _, _, _ in parts)
        if fields != ["step"] or not words or "/" in directory:
            raise ConfigError(
                f"directory: expected one name with one {{step}} and a word beside it, like 'step-{{step}}', "
                f"found {directory!r}"
            )
        pattern = "".join(re.escape(text) + ("" if field is None else "([0-9]+)") for text, field, _, _ in parts)
        self._pattern = re.compile(pattern)

    def name_of(self, step: int) -> str:
        """The directory of a committed step."""
        return self.directory.format(step=step)

    def step_of(self, name: str) -> int | None:
        """The step whose committed directory has this name, None for any other name."""
        match = self._pattern.fullmatch(name)
        if match is None or len(match[1]) > 20:
            return None
        try:
            step = validate_step(int(match[1]))
        except InvalidIdError:
            return None
        return step if self.name_of(step) == name else None

    def any_step_of(self, name: str) -> tuple[int | None, bool]:
        """The step that a directory is of, and whether its name is that of one being written."""
        step = self.step_of(name)
        if step is not None:
            return step, False
        if self.temporary_prefix and name.startswith(self.temporary_prefix):
            return self.step_of(name.removeprefix(self.temporary_prefix)), True
        if name.endswith(PARTIAL_SUFFIX):
            return self.step_of(name.removesuffix(PARTIAL_SUFFIX)), True
        return None, False

    def place(self, path: str | Path) -> Place:
        """What the path means: the last of its parts that is a step's directory counts, what is above does not.

        Users choose what is above, and a job that goes on from another one's step may well be in a directory of that
        name: "step-1000/tuned/step-5". Were it the first, all saves of that job would be step 1000, one over the other.
        What is inside of a step is chosen by the framework, which has no steps there.
        """
        parts = PurePath(path).parts
        for index in range(len(parts) - 1, -1, -1):
            step, temporary = self.any_step_of(parts[index])
            if step is not None:
                return Place(step, "/".join(parts[index + 1 :]), parts[index], temporary)
        return Place()

    def require(self, path: str | Path) -> Place:
        """Like `place`. Raises UnsupportedError for what is not a step's directory or something in it."""
        place = self.place(path)
        if place.is_root:
            name = self.name_of(100)
            raise UnsupportedError(
                f"expected a path with the directory of a step in it, like {name!r}, {self.temporary_prefix + name!r} "
                f"or {name + PARTIAL_SUFFIX!r}, found {str(path)[:200]!r}; if your steps are called otherwise say so "
                "with `directory`"
            )
        return place

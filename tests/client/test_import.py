"""What importing the package costs and exports."""

from __future__ import annotations

import subprocess
import sys

import pytest

import replicator

LOADED = """
import sys
import {module}
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "grpc", "numpy"}}))
"""


@pytest.mark.parametrize("module", ["replicator", "replicator.ids", "replicator.config", "replicator.client.launch"])
def test_light_imports(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module=module)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_the_session_does_not_need_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOADED.format(module="replicator.client.session")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.strip() == "['grpc']"


def test_exports() -> None:
    for name in replicator.__all__:
        assert getattr(replicator, name) is not None
    assert set(replicator.__all__) <= set(dir(replicator))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        replicator.nothing  # noqa: B018

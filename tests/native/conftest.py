"""The facade over each implementation: every test of these functions runs against both."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

import pytest

import replicator.native


def _load(implementation: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A separate copy of replicator.native; for `python` it is loaded where the native core cannot be imported."""
    with monkeypatch.context() as patch:
        if implementation == "python":
            patch.setitem(sys.modules, "replicator._native", None)
        name = f"native_under_test_{implementation}"
        spec = importlib.util.spec_from_file_location(name, replicator.native.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    assert implementation == module.IMPLEMENTATION, module.FALLBACK_REASON
    return module


@pytest.fixture(params=["native", "python"])
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return _load(request.param, monkeypatch)

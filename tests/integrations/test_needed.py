"""Where a framework is not installed, the integration says which one it wants, and in what version."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from replicator.integrations._needed import needed

_PROGRAM = """
import importlib, sys
for hidden in ("transformers", "torchtitan", "torch_checkpointing"):
    sys.modules[hidden] = None  # what is not there, for Python
def tell(function, *args):
    try:
        print("no error:", function(*args))
    except ModuleNotFoundError as error:
        print(error.name, error, sep=": ")
for name in ("torchtitan", "torch_checkpointing"):
    tell(importlib.import_module, f"replicator.integrations.{name}")
huggingface = importlib.import_module("replicator.integrations.huggingface")
tell(huggingface.ReplicatorCallback)
"""


def test_what_to_install_is_said() -> None:
    """Also by an object of huggingface.py, whose other half needs Accelerate alone."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    wanted = ("torchtitan>=0.3.0", "torch_checkpointing==0.1.0", "transformers>=5.0")
    for line, requirement in zip(lines, wanted, strict=True):
        package = requirement.partition("=")[0].rstrip(">")
        assert line.startswith(f"{package}: expected {requirement}, found ")
        assert line.endswith(f"; pip install '{requirement}'")


_WITHOUT_TORCH = """
import importlib, sys
for hidden, name in (("fsspec", "fsspec"), ("torch", "fsspec"), ("torch", "cosmos")):
    sys.modules.pop("fsspec", None)
    sys.modules[hidden] = None
    try:
        importlib.import_module(f"replicator.integrations.{name}")
    except ModuleNotFoundError as error:
        print(name, error)
"""


def test_torch_and_fsspec_are_asked_for_in_the_same_way() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT_TORCH], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert [line.partition(", found ")[0] for line in lines] == [
        "fsspec expected fsspec>=2024.2",
        "fsspec expected torch>=2.6",
        "cosmos expected torch>=2.6",
    ]
    assert lines[0].endswith("; pip install 'fsspec>=2024.2'")


@pytest.mark.parametrize(
    ("requirement", "imported", "said"),
    [
        ("pytest>=99", "pytest.of_a_later_version", r"expected pytest>=99, found pytest [0-9.]+; pip install"),
        ("no_such>=1", "no_such", "expected no_such>=1, found none; pip install"),
        ("pytest>=99", "no_such", "No module named 'no_such'"),
    ],
)
def test_another_version_and_another_package_are_told_apart(requirement: str, imported: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=said), needed(requirement):
        importlib.import_module(imported)

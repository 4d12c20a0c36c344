"""What an example tells of its state, so that `python -m examples` can compare before and after the loss of a node.

An example calls `saved` after its last save, and `recovered` before it trains on. Alone, without the harness, the
lines go to stdout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

REPORT_FILE = "EXAMPLES_REPORT"


def options(description: str | None = None) -> argparse.Namespace:
    """What every example is given: `steps` to train, and `save_every` so many of them."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=8, metavar="N", help="the last step to train (default 8)")
    parser.add_argument("--save-every", type=int, default=4, metavar="K", help="save every K steps (default 4)")
    return parser.parse_args()


def saved(step: int, state: Any) -> None:
    """The state of this rank as it was saved at `step`: any nesting of dictionaries, lists, tensors and values.

    Raises:
        TypeError: something in it has no bytes to compare; with its key.
    """
    _tell("saved", step, state)


def recovered(step: int, state: Any) -> None:
    """The state of this rank as it was loaded from `step`, in the same nesting as for `saved`. Raises the same."""
    _tell("recovered", step, state)


def digest(state: Any) -> tuple[str, int]:
    """SHA-256 over all keys, values, and bytes of tensors (of a DTensor this rank's), and how many bytes tensors have.

    Raises:
        TypeError: something in it has no bytes to compare; with its key.
    """
    sha = hashlib.sha256()
    tensor_bytes = 0
    for key, value in _leaves("", state):
        sha.update(key.encode() + b"\0")
        if isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            data = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            sha.update(f"{local.dtype} {tuple(local.shape)}\0".encode() + data)
            tensor_bytes += len(data)
        else:
            sha.update(f"{type(value).__name__} {value!r}\0".encode())
    return sha.hexdigest(), tensor_bytes


def _leaves(key: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield from _leaves(f"{key}/{name}", value[name])
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(f"{key}/{index}", item)
    elif value is None or isinstance(value, (torch.Tensor, bool, int, float, complex, str, bytes, torch.dtype)):
        yield key, value
    else:
        raise TypeError(f"{key}: expected a tensor or a plain value to compare, found {type(value).__name__}")


def _tell(kind: str, step: int, state: Any) -> None:
    sha256, tensor_bytes = digest(state)
    line = {
        "kind": kind,
        "rank": int(os.environ.get("RANK", "0")),
        "step": step,
        "sha256": sha256,
        "tensor_bytes": tensor_bytes,
    }
    text = json.dumps(line) + "\n"
    path = os.environ.get(REPORT_FILE)
    if path is None:
        sys.stdout.write(text)
        return
    # One write to the end of the file: lines of ranks that report at the same time do not mix.
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)

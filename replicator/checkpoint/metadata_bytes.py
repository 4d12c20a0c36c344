"""`.metadata` as bytes that depend on what it says alone, so that nodes which write the same write the same bytes."""

from __future__ import annotations

import io
import pickle

from torch.distributed.checkpoint.metadata import Metadata


def metadata_bytes(metadata: Metadata) -> bytes:
    """A pickle, which `pickle.loads` and every reader of PyTorch take.

    A pickle refers back to objects that it has seen, by identity; equal metadata that came to two ranks in different
    ways have different identities. Without such references the bytes are the same.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=4)
    pickler.fast = True
    pickler.dump(metadata)
    return stream.getvalue()

"""torchtitan's trainer on a CPU: to be imported before anything of torchtitan, which looks for its device at import.

It is made for accelerators. What stands in its way without one: it takes "cuda" for the device; it imports Triton, of
which PyTorch for CPUs brings none, for kernels that only run on an accelerator; it asks the device for its memory.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule


class _Kernels(ModuleType):
    """In the place of Triton while torchtitan's kernels are defined; they are never started here."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **_: args[0] if args and callable(args[0]) else (lambda function: function)


def _import_kernels() -> None:
    if importlib.util.find_spec("triton") is not None:
        return
    kernels, language = _Kernels("triton"), _Kernels("triton.language")
    kernels.language = language  # type: ignore[attr-defined]
    for module in (kernels, language):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    try:
        importlib.import_module("torchtitan.distributed.minimal_async_ep")
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


torch._utils._get_available_device_type = lambda: "cpu"
_import_kernels()

from torchtitan.components import metrics  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import parallelize_llama  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


class _NoMemoryMonitor:
    device_name = "cpu"
    device_capacity_gib = 0.0

    def get_peak_stats(self) -> metrics.DeviceMemStats:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


metrics.build_device_memory_monitor = _NoMemoryMonitor
distributed.set_pg_timeouts = lambda timeout, parallel_dims: None  # it takes a device's number for its barrier


class RandomTokens(BaseDataLoader):
    """The same tokens at the same place of the same rank's data, and a place to go on from."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        vocab_size: int = 2048

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self._config = config
        self._rank = dp_rank
        self._shape = (local_batch_size, seq_len + 1)
        self._place = 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(1000 * self._place + self._rank)
            self._place += 1
            tokens = torch.randint(self._config.vocab_size, self._shape, generator=generator)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {"place": self._place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._place = state_dict["place"]


class NoTokenizer(BaseTokenizer):
    """The data are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return 2048


def _parallelize(*args: Any, **options: Any) -> torch.nn.Module:
    """As llama3 is, but gradients are summed: gloo cannot scale them on their way."""
    model: torch.nn.Module = parallelize_llama(*args, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def debugmodel() -> Trainer.Config:
    """torchtitan's llama3_debugmodel with one layer, attention that needs no compiler, and made-up data."""
    config: Trainer.Config = llama3_debugmodel()
    assert config.model_spec is not None
    config.model_spec = replace(config.model_spec, parallelize_fn=_parallelize)
    model: Any = config.model_spec.model
    model.layers = model.layers[:1]
    model.layers[0].attention.inner_attention = ScaledDotProductAttention.Config()
    config.dataloader, config.tokenizer = RandomTokens.Config(), NoTokenizer.Config()
    config.training.seq_len, config.training.local_batch_size = 16, 2
    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"
    config.validator.enable = False
    config.activation_checkpoint = None  # type: ignore[assignment]
    config.debug.seed = 1
    config.parallelism.spmd_backend = "partial_dtensor"
    return config

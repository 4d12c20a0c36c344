"""The demo's model and data: a small byte-level transformer under FSDP2, fed with windows of one long text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

VOCABULARY = 256
WIDTH = 256
HEADS = 4
LAYERS = 3
CONTEXT = 64
BATCH = 2


class Block(nn.Module):
    """Pre-norm attention and MLP, with dropout so that the random generator's state matters."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        split = self.qkv(self.attention_norm(x)).view(batch, length, 3, HEADS, width // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(heads.transpose(1, 2).reshape(batch, length, width)))
        result: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))
        return result


class ByteTransformer(nn.Module):
    """Predicts the next byte. Input (batch, length) of int64, output the mean cross entropy of (batch, length)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        x = self.bytes(inputs) + self.positions(torch.arange(inputs.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def build(mesh: DeviceMesh, seed: int) -> tuple[ByteTransformer, torch.optim.Optimizer]:
    """The model, the same on every rank and then sharded over `mesh`, and its optimizer."""
    torch.manual_seed(seed)
    model = ByteTransformer()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


class Windows(Iterator[tuple[Tensor, Tensor]]):
    """Batches of random windows of a text. `state` is its position: the windows yet to come depend on it alone."""

    def __init__(self, text: bytes, seed: int, rank: int) -> None:
        self._text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._generator = torch.Generator().manual_seed(seed * 1_000_003 + rank)

    def __next__(self) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(self._text) - CONTEXT, (BATCH,), generator=self._generator)
        rows = torch.stack([self._text[start : start + CONTEXT + 1] for start in cast(list[int], starts.tolist())])
        return rows[:, :-1].long(), rows[:, 1:].long()

    @property
    def state(self) -> Tensor:
        return self._generator.get_state()

    @state.setter
    def state(self, value: Tensor) -> None:
        self._generator.set_state(value)

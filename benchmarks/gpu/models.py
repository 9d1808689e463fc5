"""A small transformer whose every operation is deterministic on CUDA."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = 512
_WIDTH = 128
_HEADS = 4
_LENGTH = 64
_BATCH = 4


class Block(nn.Module):
    """Attention and a perceptron, each with its norm before it."""

    def __init__(self) -> None:
        """Make the layers."""
        super().__init__()
        self.norm1 = nn.LayerNorm(_WIDTH)
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH)
        self.norm2 = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 4 * _WIDTH)
        self.down = nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return the block's output for ``x``, (batch, length, width)."""
        batch, length, _ = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, length, 3, _HEADS, _WIDTH // _HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-1, -2) / math.sqrt(_WIDTH // _HEADS)
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, _WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A causal language model of about half a million parameters."""

    def __init__(self, num_layers: int) -> None:
        """Make `num_layers` blocks, and two embeddings."""
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, _WIDTH)
        self.positions = nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(_WIDTH)
        self.head = nn.Linear(_WIDTH, VOCABULARY, bias=False)
        mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).triu(1)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting ``ids[:, 1:]``."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        mask = self.mask[: ids.shape[1], : ids.shape[1]]
        for block in self.blocks:
            x = block(x, mask)
        logits = self.head(self.norm(x))[:, :-1].float()
        return F.cross_entropy(logits.reshape(-1, VOCABULARY), ids[:, 1:].reshape(-1))


def build(num_layers: int, dtype: torch.dtype) -> Transformer:
    """Return the model on the CPU, the same for the same arguments."""
    torch.manual_seed(1234)
    return Transformer(num_layers).to(dtype)


def batch(index: int, device: torch.device) -> torch.Tensor:
    """Return the token ids of one micro-batch, the same for the same `index`."""
    generator = torch.Generator().manual_seed(99 + index)
    return torch.randint(0, VOCABULARY, (_BATCH, _LENGTH), generator=generator).to(device)

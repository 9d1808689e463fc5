"""Small models of plain nn modules, each with a loss on random data."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

VOCAB, WIDTH, LENGTH = 19, 32, 8


class Block(nn.Module):
    """Pre-norm transformer block with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x after attention and feed-forward, (batch, length, width)."""
        batch, length, _ = x.shape
        parts = self.qkv(self.norm(x)).view(batch, length, 3, 4, WIDTH // 4)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(x)))


class Transformer(nn.Module):
    """Two blocks, learned positions, and a head tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return logits, (batch, length, vocabulary)."""
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.embed.weight)


def transformer_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Return the next-token loss on random ids."""
    ids = torch.randint(0, VOCAB, (2, LENGTH), generator=generator)
    logits = model(ids)[:, :-1]
    return F.cross_entropy(logits.reshape(-1, VOCAB), ids[:, 1:].reshape(-1))

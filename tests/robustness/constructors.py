"""Ways to construct modules that people use, each with its own way to make and fill parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations


class ByHand(nn.Module):
    """Parameters assigned, registered, replaced, deleted and filled in every way."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(5, 3))
        self.register_parameter("b", nn.Parameter(torch.empty(4, 5)))
        self.register_parameter("none", None)
        self.c = nn.Parameter(torch.empty(7))
        self.c = nn.Parameter(torch.rand(8))
        self.gone = nn.Parameter(torch.rand(9))
        del self.gone
        self.frozen = nn.Parameter(torch.rand(2, 2), requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.empty = nn.Parameter(torch.empty(0))
        self.register_buffer("steps", torch.arange(4))
        nn.init.trunc_normal_(self.b, std=0.02)
        with torch.no_grad():
            self.a[0].fill_(3.0)
            self.a.mul_(0.5)
        self.c.data.normal_()
        self.c.data[2:4] = 1.0
        self.frozen.data = torch.eye(2)


class Initialised(nn.Module):
    """The same layers, filled by a function applied to every module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4, padding_idx=1)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Bilinear(4, 4, 2)
        self.apply(self._fill)

    @staticmethod
    @torch.no_grad()
    def _fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight, gain=0.7)
            module.bias.uniform_(-1, 1)
        elif isinstance(module, nn.Embedding):
            nn.init.xavier_normal_(module.weight)


class Tied(nn.Module):
    """A head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embed.weight


def _dynamic() -> nn.Module:
    def init(self: Any) -> None:
        nn.Module.__init__(self)
        self.inner = nn.Linear(3, 5)
        self.w = nn.Parameter(torch.randn(3))

    made = type("Made", (nn.Module,), {"__init__": init})
    return made()


def _lists() -> nn.Module:
    module = nn.Module()
    module.list = nn.ParameterList([torch.randn(3), nn.Parameter(torch.rand(2))])
    module.list.append(nn.Parameter(torch.ones(4)))
    module.dict = nn.ParameterDict({"x": nn.Parameter(torch.randn(2, 2))})
    module.dict["y"] = nn.Parameter(torch.zeros(1))
    return module


def _surgery() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1] = nn.Linear(4, 6)
    model.add_module("extra", nn.LayerNorm(6))
    model[0].weight = nn.Parameter(model[0].weight.detach().clone() * 2)
    return model


def _loaded() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    source = {name: torch.full_like(value, 2) for name, value in model.state_dict().items()}
    model.load_state_dict(source)
    return model


def _default_dtype() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    finally:
        torch.set_default_dtype(before)


def _copied() -> nn.Module:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, copy.deepcopy(layer), copy.copy(layer))


CONSTRUCTORS: dict[str, Callable[[], nn.Module]] = {
    "sequential": lambda: nn.Sequential(
        nn.Linear(3, 5), nn.Sequential(nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3)), nn.PReLU()
    ),
    "by-hand": ByHand,
    "applied": Initialised,
    "tied": Tied,
    "dynamic-class": _dynamic,
    "lists": _lists,
    "surgery": _surgery,
    "loaded": _loaded,
    "dtype-argument": lambda: nn.Linear(5, 3, dtype=torch.float64),
    "default-dtype": _default_dtype,
    "converted": lambda: nn.Sequential(nn.Linear(5, 3), nn.LayerNorm(3)).bfloat16(),
    "channels-last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
    "deep-copied": _copied,
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(6, 2, kdim=3, vdim=2),
    "transformer": lambda: nn.Transformer(6, 2, 1, 2, 8, batch_first=True),
    "spectral-norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "from-pretrained": lambda: nn.Embedding.from_pretrained(torch.rand(5, 3), freeze=False),
    "frozen": lambda: nn.Linear(3, 4).requires_grad_(False),
}

"""Modules and uses of parameters that are easily done wrong, each with a loss on random data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

WIDTH = 6


class Case(nn.Module):
    """Parts under their names, and `compute`, which makes a tensor of them and the batch."""

    def __init__(
        self,
        compute: Callable[[Any, torch.Tensor], torch.Tensor],
        **parts: nn.Module | nn.Parameter,
    ) -> None:
        super().__init__()
        self._compute = compute
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss on x, (2, 5, WIDTH)."""
        return self._compute(self, x).float().square().mean()


def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    """Return the model's loss on a random batch."""
    result: torch.Tensor = model(torch.randn(2, 5, WIDTH, generator=generator))
    return result


def _ids(x: torch.Tensor) -> torch.Tensor:
    return (x[..., 0].abs() * 3).long().clamp(max=6)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


def _lists(m: Any, x: torch.Tensor) -> torch.Tensor:
    for weight in m.weights:
        x = torch.tanh(x @ weight)
    return x * m.scales["a"] + m.scales["b"]


def _functional_call(m: Any, x: torch.Tensor) -> torch.Tensor:
    halved = {name: param * 0.5 for name, param in m.inner.named_parameters()}
    own = dict(m.inner.named_parameters())
    y = torch.func.functional_call(m.inner, halved, (x,))
    return y + torch.func.functional_call(m.inner, own, (x,))


def _double_backward(m: Any, x: torch.Tensor) -> torch.Tensor:
    y = m.inner(x).square().sum()
    grads = torch.autograd.grad(y, tuple(m.inner.parameters()), create_graph=True)
    return y * 0.01 + sum(grad.square().sum() for grad in grads) * 0.001


def _input_penalty(m: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    y = m.inner(x)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + grad


def _used_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    weight, bias = torch.autograd.grad(
        m.inner(x).square().mean(), [m.inner.weight, m.inner.bias], allow_unused=True
    )
    return F.linear(x, m.inner.weight - 0.1 * weight, m.inner.bias - 0.1 * bias)


def _autocast(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y: torch.Tensor = m.inner(x)
        assert y.dtype is torch.bfloat16
    return y


def _channels_last(m: Any, x: torch.Tensor) -> torch.Tensor:
    images = x.reshape(2, 3, 2, 5).contiguous(memory_format=torch.channels_last)
    y: torch.Tensor = m.inner(images)
    return y


def _strided(m: Any, x: torch.Tensor) -> torch.Tensor:
    assert m.weight.stride() == (1, WIDTH)
    assert not m.weight.is_contiguous()
    return x @ m.weight


def _views(m: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = m.weight.chunk(2)
    row = m.weight[0]
    return x @ first.T + x @ second.T * row.view(2, 3).sum() + m.weight.flatten()[:3]


def _packed_experts(m: Any, x: torch.Tensor) -> torch.Tensor:
    experts = m.weight.index_select(0, torch.tensor([2, 0]))
    return torch.einsum("bld,bde->ble", x, experts)


def _shared_layer(m: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(12):
        x = torch.tanh(m.inner(x))
    return x


def _own_edit(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        m.weight.mul_(0.99)
    return x @ m.weight


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, WIDTH))


def _attended(m: Any, x: torch.Tensor, *, need_weights: bool) -> torch.Tensor:
    y, weights = m.inner(x, x, x, need_weights=need_weights)
    return y if weights is None else y + weights.mean()


def _tied(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.embed(_ids(x)) @ m.embed.weight.T


OPERATIONS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Case(
        lambda m, x: m.inner(x)[0],
        inner=nn.LSTM(WIDTH, 4, num_layers=2, bidirectional=True, batch_first=True),
    ),
    "gru": lambda: Case(
        lambda m, x: m.inner(x)[0], inner=nn.GRU(WIDTH, 5, num_layers=2, dropout=0.3)
    ),
    "rnn-cell": lambda: Case(lambda m, x: m.inner(x[:, 0]), inner=nn.GRUCell(WIDTH, 4)),
    "attention": lambda: Case(
        lambda m, x: _attended(m, x, need_weights=False),
        inner=nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.2),
    ),
    "attention-weights": lambda: Case(
        lambda m, x: _attended(m, x, need_weights=True),
        inner=nn.MultiheadAttention(WIDTH, 2, kdim=WIDTH, vdim=WIDTH, add_bias_kv=True),
    ),
    "encoder-layer": lambda: Case(
        lambda m, x: m.inner(x),
        inner=nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=11, batch_first=True),
    ),
    "decoder-layer": lambda: Case(
        lambda m, x: m.inner(x, x),
        inner=nn.TransformerDecoderLayer(WIDTH, 2, dim_feedforward=11, batch_first=True),
    ),
    "weight-norm": lambda: Case(
        lambda m, x: m.inner(x), inner=parametrizations.weight_norm(nn.Linear(WIDTH, 4))
    ),
    "spectral-norm": lambda: Case(
        lambda m, x: m.inner(x), inner=parametrizations.spectral_norm(nn.Linear(WIDTH, 4))
    ),
    "orthogonal": lambda: Case(
        lambda m, x: m.inner(x), inner=parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
    ),
    "padding-idx": lambda: Case(
        lambda m, x: m.inner(_ids(x)), inner=nn.Embedding(7, WIDTH, padding_idx=0)
    ),
    "max-norm": lambda: Case(
        lambda m, x: m.inner(_ids(x)), inner=nn.Embedding(7, WIDTH, max_norm=1.0)
    ),
    "embedding-bag": lambda: Case(
        lambda m, x: m.inner(_ids(x)), inner=nn.EmbeddingBag(7, WIDTH, mode="sum")
    ),
    "tied": lambda: Case(_tied, embed=nn.Embedding(7, WIDTH)),
    "conv1d": lambda: Case(
        lambda m, x: m.inner(x.transpose(1, 2)), inner=nn.Conv1d(WIDTH, 4, 3, groups=2)
    ),
    "conv2d-channels-last": lambda: Case(
        _channels_last, inner=nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    ),
    "conv-transpose": lambda: Case(
        lambda m, x: m.inner(x.transpose(1, 2)), inner=nn.ConvTranspose1d(WIDTH, 3, 2)
    ),
    "batch-norm": lambda: Case(
        lambda m, x: m.inner(x.transpose(1, 2)), inner=nn.BatchNorm1d(WIDTH)
    ),
    "group-norm-prelu": lambda: Case(
        lambda m, x: m.act(m.inner(x.transpose(1, 2))),
        inner=nn.GroupNorm(2, WIDTH),
        act=nn.PReLU(),
    ),
    "bilinear": lambda: Case(lambda m, x: m.inner(x, x), inner=nn.Bilinear(WIDTH, WIDTH, 3)),
    "strided": lambda: Case(_strided, weight=nn.Parameter(torch.randn(4, WIDTH).T)),
    "gapped": lambda: Case(
        lambda m, x: x * m.weight.sin(), weight=nn.Parameter(torch.randn(5, WIDTH)[::2][:1])
    ),
    "lists": lambda: Case(
        _lists,
        weights=nn.ParameterList([_parameter(WIDTH, WIDTH) for _ in range(3)]),
        scales=nn.ParameterDict({"a": _parameter(WIDTH), "b": _parameter(1)}),
    ),
    "views": lambda: Case(_views, weight=_parameter(WIDTH, WIDTH)),
    "packed-experts": lambda: Case(_packed_experts, weight=_parameter(4, WIDTH, WIDTH)),
    "shared-layer": lambda: Case(_shared_layer, inner=nn.Linear(WIDTH, WIDTH)),
    "scalar-and-empty": lambda: Case(
        lambda m, x: m.scale * m.inner(x) + m.empty.sum(),
        scale=nn.Parameter(torch.tensor(2.0)),
        empty=nn.Parameter(torch.empty(0)),
        inner=nn.Linear(WIDTH, 1),
    ),
    "functional-call": lambda: Case(_functional_call, inner=_mlp()),
    "double-backward": lambda: Case(_double_backward, inner=_mlp()),
    "input-penalty": lambda: Case(_input_penalty, inner=_mlp()),
    "used-gradients": lambda: Case(_used_gradients, inner=nn.Linear(WIDTH, WIDTH)),
    "autocast": lambda: Case(_autocast, inner=_mlp()),
    "own-edit": lambda: Case(_own_edit, weight=_parameter(WIDTH, WIDTH)),
}

"""Random small models and schedules, as data that hypothesis draws and shrinks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

VOCAB = 11
WIDTHS = (1, 2, 7, 16, 33, 64)
TIERS = ("device", "host", "nvme")


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a model: what kind, how wide it comes out, and parts inside."""

    kind: str
    width: int
    inside: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is done with the model."""

    optimizer: str
    num_steps: int
    accumulation: tuple[int, ...]
    """Micro-batches of each step, in turn."""
    clip: float | None
    evaluates: bool
    set_to_none: bool
    frozen: int
    """Every parameter whose number this divides is frozen; none if 0."""


class Residual(nn.Module):
    """x plus what the inside makes of it."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        result: torch.Tensor = x + self.inside(x)
        return result


class Convolution(nn.Conv1d):
    """A convolution over the middle dimension."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (batch, length, width) for the same."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Twice(nn.Module):
    """The same layers two times."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what comes out of the second time."""
        result: torch.Tensor = self.inside(torch.tanh(self.inside(x)))
        return result


def built(parts: tuple[Part, ...], width: int) -> tuple[nn.Module, int]:
    """Return the module made of `parts` for inputs of `width`, and the width that comes out."""
    modules: list[nn.Module] = []
    for part in parts:
        if part.kind in {"residual", "twice"}:
            inside, inner_width = built(part.inside, width)
            back = nn.Linear(inner_width, width)
            kind = Residual if part.kind == "residual" else Twice
            modules.append(kind(nn.Sequential(inside, back)))
        elif part.kind == "norm":
            modules.append(nn.LayerNorm(width))
        elif part.kind == "convolution":
            modules.append(Convolution(width, part.width, 3, padding=1))
            width = part.width
        else:
            modules.append(nn.Linear(width, part.width, bias=part.kind == "linear"))
            modules.append(nn.Tanh())
            width = part.width
    return nn.Sequential(*modules), width


class RandomModel(nn.Module):
    """An embedding, random parts, and a loss."""

    def __init__(self, parts: tuple[Part, ...], width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.body, _ = built(parts, width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss on ids (batch, length)."""
        result: torch.Tensor = self.body(self.embed(ids)).square().mean()
        return result


_leaf = st.builds(
    Part,
    kind=st.sampled_from(["linear", "linear", "no-bias", "norm", "convolution"]),
    width=st.sampled_from(WIDTHS),
)
_part = st.recursive(
    _leaf,
    lambda inner: st.builds(
        Part,
        kind=st.sampled_from(["residual", "twice"]),
        width=st.just(0),
        inside=st.lists(inner, min_size=1, max_size=3).map(tuple),
    ),
    max_leaves=4,
)


@dataclass(frozen=True, slots=True)
class Model:
    """A model as data."""

    width: int
    parts: tuple[Part, ...] = field(default=())

    def build(self) -> nn.Module:
        """Return it with its seed."""
        torch.manual_seed(0)
        return RandomModel(self.parts, self.width)


models = st.builds(
    Model, width=st.sampled_from(WIDTHS), parts=st.lists(_part, max_size=4).map(tuple)
)
_rule: st.SearchStrategy[Any] = st.sampled_from(TIERS) | st.fixed_dictionaries(
    {"body.0.*": st.sampled_from(TIERS), "*.bias": st.sampled_from(TIERS)},
).flatmap(lambda rule: st.sampled_from(TIERS).map(lambda last: {**rule, "*": last}))
homes = st.fixed_dictionaries({"parameters": _rule, "gradients": _rule, "optimizer_states": _rule})
schedules = st.builds(
    Schedule,
    optimizer=st.sampled_from(["AdamW", "SGD", "Adagrad", "RMSprop", "Adadelta"]),
    num_steps=st.integers(1, 3),
    accumulation=st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    clip=st.sampled_from([None, 0.1]),
    evaluates=st.booleans(),
    set_to_none=st.booleans(),
    frozen=st.integers(0, 3),
)


def follow(schedule: Schedule, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train by the schedule; return losses and norms."""
    generator = torch.Generator().manual_seed(1)
    trace = []
    for step in range(schedule.num_steps):
        for _ in range(schedule.accumulation[step % len(schedule.accumulation)]):
            ids = torch.randint(0, VOCAB, (2, 3), generator=generator)
            loss = model(ids)
            loss.backward()
            trace.append(loss.item())
        if schedule.evaluates:
            with torch.no_grad():
                trace.append(model.eval()(ids).item())
            model.train()
        if schedule.clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), schedule.clip)
            trace.append(norm.item())
        optimizer.step()
        optimizer.zero_grad(set_to_none=schedule.set_to_none)
    return trace


def freeze(schedule: Schedule, model: nn.Module) -> nn.Module:
    """Freeze what the schedule freezes, but never the first parameter."""
    for number, param in enumerate(model.parameters()):
        if number and schedule.frozen and number % schedule.frozen == 0:
            param.requires_grad_(False)
    return model

"""Optimizer choice: a class of torch.optim by name, its options checked before use."""

from __future__ import annotations

import difflib
import inspect
from dataclasses import dataclass
from typing import Any

import torch

from zinf_core.errors import ConfigError
from zinf_torch.train.config import LoopConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerChoice:
    """A class of torch.optim and the keyword arguments it will take."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]


def choose_optimizer(config: LoopConfig) -> OptimizerChoice:
    """Return the class and options that `config` names.

    Raises ConfigError if torch.optim has no such class, if it needs a closure, or if it does not
    take one of the options.
    """
    found = getattr(torch.optim, config.optimizer, None)
    if not (inspect.isclass(found) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"train.optimizer = {config.optimizer!r} is no class of torch.optim"
            f"{_suggestion(config.optimizer, _optimizer_names())}"
        )
    closure = inspect.signature(found.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"train.optimizer = {config.optimizer!r} evaluates the loss several times per step, "
            "which this command does not do; use it from your own loop"
        )
    options: dict[str, Any] = dict(config.optimizer_options)
    named = {"lr": config.learning_rate, "weight_decay": config.weight_decay, "betas": config.betas}
    for name, value in named.items():
        if value is not None and name in options:
            raise ConfigError(f"train.optimizer_options.{name} is set in [train] already")
        if value is not None:
            options[name] = value
    accepted = set(inspect.signature(found).parameters) - {"params"}
    for name in options:
        if name not in accepted:
            raise ConfigError(
                f"train: {config.optimizer} takes no {name!r}{_suggestion(name, accepted)}"
            )
    return OptimizerChoice(optimizer_class=found, options=options)


def _optimizer_names() -> set[str]:
    """Return the names of torch.optim's optimizers."""
    return {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    }


def _suggestion(name: str, known: set[str]) -> str:
    """Return a hint at the nearest of `known`, or at all of them."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"

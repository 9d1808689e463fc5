"""Optimizer state: which parts of it are streamed, under which names, and how much to expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Path = tuple[str | int, ...]
"""Where a tensor stands in one parameter's state: ``("exp_avg",)`` or ``("history", 0)``."""


def streamed_tensors(state: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """Iterate over the tensors in `state` that are streamed: those of more than one element.

    Looks into dicts, lists and tuples. Scalars, one-element tensors (step counts) and everything
    else stay in memory as they are.
    """
    if isinstance(state, torch.Tensor):
        if state.numel() > 1:
            yield path, state
    elif isinstance(state, dict):
        for name, value in state.items():
            yield from streamed_tensors(value, (*path, name))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from streamed_tensors(value, (*path, index))


def replace_tensors(state: Any, replacements: dict[Path, Any], path: Path = ()) -> Any:
    """Return `state` with the tensors at the given paths replaced; containers are copied."""
    if path in replacements:
        return replacements[path]
    if isinstance(state, dict):
        return {
            name: replace_tensors(value, replacements, (*path, name))
            for name, value in state.items()
        }
    if type(state) in {list, tuple}:
        return type(state)(
            replace_tensors(value, replacements, (*path, index))
            for index, value in enumerate(state)
        )
    return state


def copy_scalars(state: dict[str, Any]) -> dict[str, Any]:
    """Return `state` with copies of the one-element tensors that are not streamed."""
    copied: dict[str, Any] = {
        name: value.clone() if isinstance(value, torch.Tensor) and value.numel() <= 1 else value
        for name, value in state.items()
    }
    return copied


def part_name(path: Path) -> str:
    """Return the `TensorKey.part` for a path: ``"history.0"``."""
    return ".".join(map(str, path))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateForecast:
    """What one step of an optimizer leaves behind for a parameter of a given dimension."""

    full_shape: tuple[tuple[Path, torch.dtype], ...]
    """Tensors of the parameter's own shape."""
    nbytes_per_element: float
    """Bytes of all streamed tensors per parameter element."""


def forecast_state(
    construct: Callable[[dict[str, Any]], torch.optim.Optimizer],
    group: dict[str, Any],
    *,
    ndim: int,
    dtype: torch.dtype,
) -> StateForecast | None:
    """Return what the optimizer keeps per parameter, found by one step on a tiny parameter.

    `construct` makes the optimizer over one group; `group` has the options.

    None if the optimizer cannot step without something only the caller has (a closure), or the
    parameter is of a type that has no gradient.
    """
    if not (dtype.is_floating_point or dtype.is_complex):
        return None
    options = {name: value for name, value in group.items() if name not in _NOT_OPTIONS}
    with torch.random.fork_rng(devices=[]), torch.inference_mode(mode=False), torch.enable_grad():
        tiny = nn.Parameter(torch.ones((4,) * ndim, dtype=dtype))
        tiny.grad = torch.ones_like(tiny)
        try:
            optimizer = construct({**options, "params": [tiny]})
            optimizer.step()
        except (TypeError, RuntimeError, ValueError, KeyError, AttributeError):
            # an optimizer that wants more than parameters and gradients: it is met in its step
            return None
        found = list(streamed_tensors(dict(optimizer.state.get(tiny, {}))))
    nbytes = sum(tensor.numel() * tensor.element_size() for _, tensor in found)
    return StateForecast(
        full_shape=tuple((path, t.dtype) for path, t in found if t.shape == tiny.shape),
        nbytes_per_element=nbytes / tiny.numel(),
    )


_NOT_OPTIONS = frozenset({"params", "param_names", "initial_lr"})

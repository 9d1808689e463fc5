"""A parameter's optimizer state as users see it, made of and taken apart into its parts'."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from zinf_core.errors import UnsupportedError
from zinf_torch.joined import JoinedTensor
from zinf_torch.optimizer_state import Path, replace_tensors, streamed_tensors
from zinf_torch.parameter import PagedTensor
from zinf_torch.parameter_states import ParameterStates
from zinf_torch.parts import flatten
from zinf_torch.tensor_page import TensorPage
from zinf_torch.update import EmptyUpdate, ParameterUpdate

Update = ParameterUpdate | EmptyUpdate


def updates_of(all_states: Sequence[ParameterStates]) -> Iterator[ParameterUpdate]:
    """Iterate over the updates of the parts of one parameter."""
    for states in all_states:
        update = ParameterUpdate(states)
        update.siblings = [other for other in all_states if other is not states]
        yield update


def join_state(updates: Sequence[Update], state: dict[str, Any]) -> dict[str, Any]:
    """Return `state`, which the last part ended with, with its streamed tensors joined over all
    parts."""
    parts = _states(updates)
    if len(parts) < 2:
        return state
    joined = {path: _joined(parts, path) for path in parts[-1].pages}
    result: dict[str, Any] = replace_tensors(state, dict(joined))
    return result


def take_state(updates: Sequence[Update], state: dict[str, Any]) -> dict[str, Any]:
    """Copy streamed tensors that users put into `state` to the pages of the parts; return it with
    handles for them. Raises UnsupportedError for a tensor of another size than the parameter."""
    parts = _states(updates)
    if len(parts) < 2:
        return parts[0].take(state) if parts else state
    replaced: dict[Path, Any] = {}
    for path, tensor in streamed_tensors(state):
        pages = [each.pages.get(path) for each in parts]
        if isinstance(tensor, JoinedTensor) and None not in pages and tensor.is_of(_known(pages)):
            continue
        if tensor.numel() != parts[0].param.numel():
            raise UnsupportedError(
                f"the optimizer state {'.'.join(map(str, path))} of "
                f"{parts[0].param.zinf_page.label} has {tensor.numel()} elements, the parameter "
                f"{parts[0].param.numel()}; large parameters are updated in pieces, and so must "
                "their states be"
            )
        flat = flatten(parts[0].param, tensor)
        for each in parts:
            piece = each.part.cut(flat)
            each.forget_if_unlike(path, piece)
            each.page(path, piece).fill(piece)
        replaced[path] = _joined(parts, path)
    result: dict[str, Any] = replace_tensors(state, replaced) if replaced else state
    return result


def load_state(updates: Sequence[Update], state: dict[str, Any]) -> dict[str, Any]:
    """Replace the states by `state`, one tensor at a time; return it with handles for what is
    streamed. Without a ``master_weight`` the master is made anew from the parameter."""
    parts = _states(updates)
    if len(parts) < 2:
        return parts[0].load(state) if parts else state
    state = dict(state)
    master = state.pop("master_weight", None)
    flat = None if master is None else flatten(parts[0].param, master)
    for each in parts:
        each.load_master(None if flat is None else each.part.cut(flat))
    taken = take_state(updates, state)
    for each in parts:
        each.keep_only(taken)
    return taken


def master_of(updates: Sequence[Update]) -> torch.Tensor | None:
    """Return a handle of the fp32 master; None if there is none yet."""
    masters = [each.master for each in _states(updates)]
    if not masters or any(master is None or not master.page.has_bytes for master in masters):
        return None
    pages = _known(masters)
    if len(pages) == 1:
        return PagedTensor.of(pages[0])
    page = _states(updates)[0].param.zinf_page
    return JoinedTensor.of(pages, page.shape, page.stride)


def _states(updates: Sequence[Update]) -> list[ParameterStates]:
    return [update.states for update in updates if update.states is not None]


def _joined(parts: Sequence[ParameterStates], path: Path) -> JoinedTensor:
    page = parts[0].param.zinf_page
    return JoinedTensor.of([each.pages[path] for each in parts], page.shape, page.stride)


def _known(pages: Sequence[TensorPage | None]) -> list[TensorPage]:
    return [page for page in pages if page is not None]

"""Scaling: clipping without another pass over gradients that are not at hand.

`torch.nn.utils.clip_grad_norm_` takes the norm of every gradient and multiplies each by a number.
The norm is taken when a gradient is stored, and the factor is remembered and applied when its
bytes are used next, which is in the optimizer step. Both are the same operations on the same
values, so the bits are the same.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from zinf_core.keys import StateKind
from zinf_torch.tensor_page import KnownNorm, TensorPage

_CHUNK_NUMEL = 1 << 18
"""Elements per step of a scaled copy: its temporary stays in the processor's cache."""


def scale_later(handle: Any, other: Any) -> Any:
    """Do what ``handle.mul_(other)`` does, when the bytes are needed next; NotImplemented unless
    `handle` is a gradient and `other` a single number."""
    page: TensorPage = handle.zinf_page
    if page.key.kind_value != StateKind.GRAD.value or not _is_number(other):
        return NotImplemented
    with page.pager.lock, DisableTorchFunctionSubclass():
        page.norm = None
        if float(other) != 1.0:  # which changes no bit
            page.factors.append(other.clone() if isinstance(other, torch.Tensor) else other)
    return handle


def known_norm(
    handle: Any, ord: Any = 2, dim: Any = None, keepdim: bool = False, **options: Any
) -> Any:
    """Return ``torch.linalg.vector_norm(handle, ord)`` if it is known; else NotImplemented, and
    from now on it is noted for gradients."""
    page: TensorPage = handle.zinf_page
    if page.key.kind_value != StateKind.GRAD.value or dim is not None or keepdim or options:
        return NotImplemented
    with page.pager.lock:
        page.registry.norm_order = ord
        known = page.norm
        if known is None or known.order != ord or known.edits != page.edits_so_far():
            return NotImplemented
        return known.value.clone()


def note_norm(page: TensorPage, values: torch.Tensor) -> None:
    """Note the norm of a gradient that was just stored, if norms are asked for. `values` are the
    page's own bytes in host memory."""
    order = page.registry.norm_order
    if order is None or page.registry.compute.memory is not None:
        page.norm = None
        return
    page.norm = KnownNorm(order, page.edits_so_far(), torch.linalg.vector_norm(values, order))


def copy_scaled(target: torch.Tensor, source: torch.Tensor, factors: Sequence[Any]) -> None:
    """Copy `source`, multiplied by `factors` one after the other in its own dtype, to `target` of
    the same shape and stride, both without gaps."""
    if not factors:
        target.copy_(source)
        return
    numel = source.numel()
    flat_source, flat_target = source.as_strided((numel,), (1,)), target.as_strided((numel,), (1,))
    for start in range(0, numel, _CHUNK_NUMEL):
        part = flat_source[start : start + _CHUNK_NUMEL]
        for factor in factors:
            part = part.mul(factor)
        flat_target[start : start + _CHUNK_NUMEL].copy_(part)


def _is_number(value: Any) -> bool:
    if type(value) is torch.Tensor:
        return value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad
    return isinstance(value, numbers.Real)

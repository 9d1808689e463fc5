"""Torch functions that mean something of their own on a handle, instead of needing its bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from zinf_core.errors import UnsupportedError
from zinf_torch.scaling import known_norm, scale_later
from zinf_torch.tensor_page import TensorPage, dense_stride

_PLAIN = (torch.Tensor, nn.Parameter)


def autograd_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
    """Run `torch.autograd.grad` with paging on: it needs no bytes of what it differentiates by."""
    return torch.autograd.grad(_edges(outputs), _edges(inputs), plain(grad_outputs), **options)


BACKWARD: Final = {torch.Tensor.backward: 4, torch.autograd.backward: 5}
"""Functions that run backward, and the position of their `inputs`."""


def autograd_backward(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run backward with paging on: it needs no bytes of the parameters in `inputs`."""
    position = BACKWARD[func]
    positional = [_edges(a) if i == position else plain(a) for i, a in enumerate(args)]
    named = {k: _edges(a) if k == "inputs" else plain(a) for k, a in kwargs.items()}
    return func(*positional, **named)


def format_tensor(tensor: torch.Tensor, format_spec: str) -> str:
    """Return what `Tensor.__format__` returns for a plain tensor."""
    if tensor.dim() == 0:
        return format(tensor.item(), format_spec)
    return object.__format__(tensor, format_spec)


def set_values(handle: Any, source: Any, others: tuple[Any, ...]) -> Any:
    """Do what `handle.set_(source)` is for. Raises UnsupportedError for its other forms."""
    if not isinstance(source, torch.Tensor) or others:
        raise UnsupportedError(
            f"set_ on {handle.zinf_page.label} would move it behind the pager's back; "
            f"assign a new tensor to .data instead"
        )
    _assign_data(handle, source)
    return handle


def _edges(arg: Any) -> Any:
    """Replace handles and views by their gradient edges."""
    if isinstance(arg, torch.Tensor) and type(arg) not in _PLAIN:
        return torch.autograd.graph.get_gradient_edge(arg)
    if isinstance(arg, list | tuple):
        return tuple(_edges(item) for item in arg)
    return arg


def plain(arg: Any) -> Any:
    """Replace handles and views by plain tensors of the same values."""
    if isinstance(arg, torch.Tensor) and type(arg) not in _PLAIN:
        return arg.clone()
    if isinstance(arg, list | tuple):
        return tuple(plain(item) for item in arg)
    return arg


def _alias(handle: Any) -> Any:
    return handle.zinf_alias()


def _data(handle: Any) -> Any:
    return handle.zinf_data()


def _assign_data(handle: Any, value: torch.Tensor) -> None:
    page: TensorPage = handle.zinf_page
    if getattr(value, "zinf_page", None) is page:
        return
    fits = value.shape == page.shape and value.dtype == page.dtype
    value = plain(value)
    if fits and dense_stride(value) == page.stride:
        page.fill(value)
    else:
        handle.zinf_rebind(value)


def _stride(handle: Any, dim: int | None = None) -> Any:
    stride = handle.zinf_page.stride
    return stride if dim is None else stride[dim]


def _is_contiguous(handle: Any, memory_format: Any = torch.contiguous_format) -> bool:
    return handle.zinf_page.meta().is_contiguous(memory_format=memory_format)  # type: ignore[no-any-return]


def _dlpack(handle: Any, *args: Any, **kwargs: Any) -> Any:
    page: TensorPage = handle.zinf_page
    with page.pinned() as view:
        page.note_untraced()
        return view.detach().__dlpack__(*args, **kwargs)


def _requires_grad(handle: Any, requires_grad: bool = True) -> Any:
    with DisableTorchFunctionSubclass():
        torch.Tensor.requires_grad_(handle, requires_grad)
    handle.zinf_watch()
    return handle


SPECIAL: Final[dict[Callable[..., Any], Callable[..., Any]]] = {
    torch.Tensor.data.__get__: _data,  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _assign_data,  # type: ignore[attr-defined]
    torch.Tensor.detach: _alias,
    torch.detach: _alias,
    torch.Tensor.stride: _stride,
    torch.Tensor.is_contiguous: _is_contiguous,
    torch.Tensor.requires_grad_: _requires_grad,
    torch.Tensor.__dlpack__: _dlpack,
    torch.Tensor.mul_: scale_later,
    torch.linalg.vector_norm: known_norm,
}
"""Called with a handle first, and the function's other arguments. What returns NotImplemented
leaves the call to be run with the handle's bytes."""

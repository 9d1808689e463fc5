"""Which torch functions need a tensor's bytes, and which only its metadata or its identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

T = torch.Tensor

VIEW_ATTRIBUTES: Final = frozenset({"T", "H", "mT", "mH", "real", "imag"})
"""Attributes whose value is a view of the bytes."""

METADATA: Final[frozenset[Callable[..., Any]]] = frozenset(
    getattr(T, name)
    for name in (
        "size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "data_ptr",
        "untyped_storage", "storage", "storage_offset", "is_floating_point", "is_complex",
        "is_signed", "is_inference", "is_same_size", "is_set_to", "is_shared", "is_pinned",
        "register_hook", "register_post_accumulate_grad_hook", "retain_grad",
        "_is_view", "__len__", "detach_", "dense_dim", "sparse_dim", "has_names", "names",
        "is_conj", "is_neg", "type_as", "__dlpack_device__",
    )
    if hasattr(T, name) and name not in {"names", "type_as"}
) | {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.result_type,
     torch.is_same_size, torch.is_inference, torch.is_conj, torch.is_neg}  # fmt: skip
"""Functions of shape, dtype, device and identity; `data_ptr` and the storage are those of the
placeholder, which handles of one page share and no two pages do."""

RAW_ACCESS: Final[frozenset[Callable[..., Any]]] = frozenset(
    getattr(T, name) for name in ("numpy", "__array__", "apply_", "map_", "map2_")
    if hasattr(T, name)
)  # fmt: skip
"""Methods that write, or whose result can, without counting a version."""

REFUSED: Final[dict[Callable[..., Any], str]] = {
    getattr(T, name): name
    for name in (
        "resize_", "resize_as_", "set_", "t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_",
        "unsqueeze_", "as_strided_", "share_memory_", "sparse_resize_", "rename_",
    )
    if hasattr(T, name)
}  # fmt: skip
"""Functions that would give a page another shape or another memory behind the pager's back."""


def is_untraced(func: Callable[..., Any]) -> bool:
    """Return whether `func` can write to its arguments without counting a version."""
    return func in RAW_ACCESS or getattr(func, "__name__", "").startswith(("_amp_", "_fused_"))


def attribute_of(func: Callable[..., Any]) -> tuple[str, str] | None:
    """Return (accessor, attribute) if `func` reads, sets or deletes a tensor attribute.

    For example ``("__get__", "shape")``; None for functions and methods.
    """
    name = getattr(func, "__name__", "")
    if name not in {"__get__", "__set__", "__delete__"}:
        return None
    return name, getattr(getattr(func, "__self__", None), "__name__", "")


def is_foreach(func: Callable[..., Any]) -> bool:
    """Return whether `func` works on lists of tensors, item by item."""
    name: str = getattr(func, "__name__", "")
    return name.startswith(("_foreach_", "_amp_foreach_"))

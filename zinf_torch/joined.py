"""JoinedTensor: an optimizer state that is stored in pieces, seen as one tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from zinf_torch.overrides import METADATA, VIEW_ATTRIBUTES, attribute_of
from zinf_torch.tensor_page import TensorPage


class JoinedTensor(torch.Tensor):
    """Stands for pages that hold consecutive ranges of one tensor's elements.

    Any operation reads the pages into a plain tensor in ordinary memory, outside the budgets;
    what it writes to it goes back to the pages.
    """

    zinf_pages: list[TensorPage]
    zinf_stride: tuple[int, ...]
    __hash__ = object.__hash__

    @classmethod
    def of(
        cls, pages: Sequence[TensorPage], shape: torch.Size, stride: tuple[int, ...]
    ) -> JoinedTensor:
        """Return the tensor of `shape` whose elements lie with `stride` in `pages`."""
        placeholder = pages[0].placeholder.as_strided(shape, (0,) * len(shape))
        joined: Any = torch.Tensor._make_subclass(cls, placeholder)
        joined.zinf_pages = list(pages)
        joined.zinf_stride = stride
        return joined  # type: ignore[no-any-return]

    def is_of(self, pages: Sequence[TensorPage]) -> bool:
        """Return whether it stands for exactly these pages."""
        return len(pages) == len(self.zinf_pages) and all(
            mine is other for mine, other in zip(self.zinf_pages, pages, strict=True)
        )

    def read(self) -> torch.Tensor:
        """Return a plain tensor with the values. Blocks."""
        with torch.no_grad(), DisableTorchFunctionSubclass():
            flat = torch.empty(self.numel(), dtype=self.dtype)
            start = 0
            for page in self.zinf_pages:
                numel = page.shape.numel()
                flat[start : start + numel].copy_(page.clone())
                start += numel
            return flat.as_strided(self.shape, self.zinf_stride)

    def write(self, values: torch.Tensor) -> None:
        """Take over what an operation made of the tensor that `read` returned. Blocks."""
        flat = values.detach().as_strided((values.numel(),), (1,))
        start = 0
        for page in self.zinf_pages:
            numel = page.shape.numel()
            page.fill(flat[start : start + numel])
            start += numel

    def stride(self, dim: int | None = None) -> Any:
        """Return the strides of the tensor it stands for."""
        return self.zinf_stride if dim is None else self.zinf_stride[dim]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what a plain tensor shows."""
        del tensor_contents
        return repr(self.read())

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        return self.read().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor of the same values."""
        memo[id(self)] = copy = self.read()
        return copy

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `func` with plain tensors in place of every joined one."""
        del types
        attribute = attribute_of(func)
        if attribute == ("__set__", "data"):
            return args[0].copy_(args[1])
        needs_bytes = VIEW_ATTRIBUTES | {"data"}
        if func in METADATA or (attribute is not None and attribute[1] not in needs_bytes):
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        read: dict[JoinedTensor, tuple[torch.Tensor, int]] = {}
        result = func(*_plain(args, read), **_plain(kwargs or {}, read))
        for joined, (values, version) in read.items():
            if values._version != version:
                joined.write(values)
                result = joined if result is values else result
        return result


def _plain(value: Any, read: dict[JoinedTensor, tuple[torch.Tensor, int]]) -> Any:
    if isinstance(value, JoinedTensor):
        if value not in read:
            values = value.read()
            read[value] = values, values._version
        return read[value][0]
    if isinstance(value, list | tuple):
        return type(value)(_plain(item, read) for item in value)
    if isinstance(value, dict):
        return {name: _plain(item, read) for name, item in value.items()}
    return value

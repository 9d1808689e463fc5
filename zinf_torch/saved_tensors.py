"""Saved tensors: what autograd wants to keep of a page is kept as a reference to the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass

from zinf_torch.tensor_page import ResidentPages, TensorPage

_EDITED = (
    "one of the variables needed for gradient computation has been modified by an inplace "
    "operation: {what} is at version {now}; expected version {saved} instead"
)


@dataclass(frozen=True, slots=True)
class SavedView:
    """A view of a page that autograd saved: enough to make it again when it is needed."""

    page: TensorPage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    version: int

    def load(self) -> torch.Tensor:
        """Return the view, bringing the page in. Blocks.

        Raises RuntimeError, as plain PyTorch does, if the tensor was edited in place since.
        """
        page = self.page
        if page.version != self.version:
            raise RuntimeError(
                _EDITED.format(what=page.label, now=page.version, saved=self.version)
            )
        with (
            page.pager.pinned(page.page) as view,
            torch.no_grad(),
            DisableTorchFunctionSubclass(),
        ):
            if self.dtype is not page.dtype:
                view = view.as_strided((view.numel(),), (1,)).view(self.dtype)
            return view.as_strided(self.size, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class SavedPlain:
    """Any other tensor that autograd saved while an operation on pages ran."""

    tensor: torch.Tensor
    version: int

    def load(self) -> torch.Tensor:
        """Return the tensor. Raises RuntimeError if it was edited in place since."""
        now = self.tensor._version
        if now != self.version:
            what = f"[{self.tensor.dtype} {list(self.tensor.shape)}]"
            raise RuntimeError(_EDITED.format(what=what, now=now, saved=self.version))
        return self.tensor


@dataclass(frozen=True, slots=True)
class SavedByOuter:
    """What the hooks around ours (a checkpoint's, the user's) made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Any]

    def load(self) -> Any:
        """Return what the outer hooks make of it."""
        return self.unpack(self.packed)


def unpack(saved: SavedView | SavedPlain | SavedByOuter) -> Any:
    """Return the saved tensor for backward."""
    return saved.load()


@contextmanager
def page_saving(registry: ResidentPages) -> Iterator[None]:
    """Save views of pages as references while the block runs, in this thread.

    torch runs only the innermost pair of hooks, so ours ask the pair outside for everything that
    is not a page: both kinds of `torch.utils.checkpoint` and user hooks keep working.
    """
    autograd = torch._C._autograd
    outer = autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        page = registry.find(tensor)
        if page is not None:
            return SavedView(
                page,
                tensor.size(),
                tensor.stride(),
                tensor.storage_offset(),
                tensor.dtype,
                page.version,
            )
        if outer is not None:
            return SavedByOuter(outer[0](tensor), outer[1])
        return SavedPlain(tensor.detach(), tensor._version)

    autograd._push_saved_tensors_default_hooks(pack, unpack)
    try:
        yield
    finally:
        autograd._pop_saved_tensors_default_hooks()

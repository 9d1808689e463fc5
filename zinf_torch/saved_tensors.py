"""Saved tensors: what autograd wants to keep of a page is kept as a reference to the page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, page: TensorPage, view: torch.Tensor) -> SavedView:
        """Describe `view`, a view of the resident `page`."""
        return cls(
            page=page,
            size=view.size(),
            stride=view.stride(),
            offset=int(view.storage_offset()),
            dtype=view.dtype,
            version=page.version,
            is_conj=view.is_conj(),
            is_neg=view.is_neg(),
        )

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
            page.pinned() as view,
            torch.no_grad(),
            DisableTorchFunctionSubclass(),
            torch._C._DisableTorchDispatch(),  # not an operation of the user's
        ):
            same_dtype: torch.Tensor = view
            if self.dtype is not page.dtype:
                same_dtype = view.as_strided((view.numel(),), (1,)).view(self.dtype)
            made = same_dtype.as_strided(self.size, self.stride, self.offset)
            made = made.conj() if self.is_conj else made
            return torch._neg_view(made) if self.is_neg else made


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


class PageTicket(torch.Tensor):
    """Empty tensor that takes a page's place in the hands of `torch.utils.checkpoint`.

    [Note: Recomputation before pages] A checkpoint recomputes its region when the first tensor
    saved in it is asked for. If that is asked of the checkpoint before any page is brought in,
    recomputation finds the whole device budget free.
    """

    saved: SavedView

    @classmethod
    def of(cls, saved: SavedView) -> PageTicket:
        """Return the ticket for `saved`."""
        with torch._C._DisableTorchDispatch():  # not an operation of the user's
            ticket: Any = torch.Tensor._make_subclass(cls, torch.empty(0))
        ticket.saved = saved
        return ticket  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Stay a ticket when detached; answer metadata."""
        del types
        if func is torch.Tensor.detach:
            return args[0]
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


@dataclass(frozen=True, slots=True)
class SavedByOuter:
    """What the hooks around ours (a checkpoint's, the user's) made of a tensor."""

    packed: Any
    unpack: Callable[[Any], Any]

    def load(self) -> Any:
        """Return what the outer hooks make of it, or the page it was a ticket for."""
        result = self.unpack(self.packed)
        return result.saved.load() if isinstance(result, PageTicket) else result


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
    outer: Any = autograd._top_saved_tensors_default_hooks(False)

    def pack(tensor: torch.Tensor) -> Any:
        page = registry.find(tensor)
        if page is not None:
            view = SavedView.of(page, tensor)
            if outer is not None and _is_checkpoint(outer[0]):
                return SavedByOuter(outer[0](PageTicket.of(view)), outer[1])
            return view
        if outer is not None:
            return SavedByOuter(outer[0](tensor), outer[1])
        return SavedPlain(tensor.detach(), tensor._version)

    autograd._push_saved_tensors_default_hooks(pack, unpack)
    try:
        yield
    finally:
        autograd._pop_saved_tensors_default_hooks()


def _is_checkpoint(pack: Callable[..., Any]) -> bool:
    return getattr(pack, "__module__", "") == "torch.utils.checkpoint"

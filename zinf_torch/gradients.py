"""Gradients: taken from autograd as they appear and accumulated on their home tier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunctionSubclass

from zinf_core.errors import UnsupportedError
from zinf_core.keys import StateKind
from zinf_torch.parameter import PagedParameter, PagedTensor, take_raw_grad
from zinf_torch.scaling import note_norm
from zinf_torch.tensor_page import scale_page

if TYPE_CHECKING:
    from zinf_core.runtime.loans import LoanDesk
    from zinf_torch.tensor_page import TensorPage

LOW_PRECISION = frozenset({torch.bfloat16, torch.float16})

MakePage = Callable[[StateKind, str, torch.Tensor], "TensorPage"]
"""Makes a page for a state of one parameter: kind, part, and a tensor of its shape and dtype."""


class Gradient:
    """The gradient of one parameter.

    The first gradient of a step is stored in the dtype autograd made it in. When a second one
    arrives for a low-precision parameter, the sum goes on in fp32. No gradient is different from
    a gradient of zeros.
    """

    __slots__ = ("_desk", "_handle", "_hook", "_make_page", "_param", "narrow", "wide")

    def __init__(self, param: PagedParameter, *, desk: LoanDesk, make_page: MakePage) -> None:
        """Belong to `param`; no room is taken before the first gradient or `reserve`."""
        self._param = param
        self._desk = desk
        self._make_page = make_page
        self._handle: PagedTensor | None = None
        self._hook: Any = None
        self.narrow: TensorPage | None = None
        self.wide: TensorPage | None = None

    def watch(self) -> None:
        """Take gradients of the parameter from now on, if it requires them."""
        if self._hook is None and self._param.requires_grad:
            param: Any = self._param
            self._hook = param.register_post_accumulate_grad_hook(_intake)

    def unwatch(self) -> None:
        """Leave gradients to autograd from now on."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def reserve(self) -> TensorPage:
        """Return the page of the gradient in the parameter's dtype, making room for it."""
        if self.narrow is None:
            like = torch.empty_strided(
                self._param.shape,
                self._param.zinf_page.stride,
                dtype=self._param.dtype,
                device="meta",
            )
            self.narrow = self._make_page(StateKind.GRAD, "", like)
        return self.narrow

    @property
    def current(self) -> TensorPage | None:
        """The page that holds the gradient; None if there is none."""
        for page in (self.wide, self.narrow):
            if page is not None and page.page.has_bytes:
                return page
        return None

    def handle(self) -> PagedTensor | None:
        """Return the tensor user code sees as `p.grad`."""
        page = self.current
        if page is None:
            return None
        if self._handle is None or self._handle.zinf_page is not page:
            self._handle = PagedTensor.of(page)
        return self._handle

    def assign(self, value: torch.Tensor | None) -> None:
        """Do what setting `p.grad` does. Raises what plain PyTorch raises for a wrong tensor."""
        if value is None:
            self.clear()
            return
        param = self._param
        current = self.current
        if isinstance(value, PagedTensor) and value.zinf_page is current:
            return
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"assigned grad expected to be a Tensor or None but got {type(value)}")
        if value.shape != param.shape:
            raise RuntimeError(
                f"assigned grad has data of a different size: {list(value.shape)} for "
                f"{param.zinf_page.label} of {list(param.shape)}"
            )
        if value.dtype == param.dtype:
            page = self.reserve()
        elif param.dtype in LOW_PRECISION and value.dtype is torch.float32:
            page = self._widened()
        else:
            raise RuntimeError(
                f"assigned grad has data of a different type: {value.dtype} for "
                f"{param.zinf_page.label} of {param.dtype}"
            )
        plain = value.clone() if isinstance(value, PagedTensor) else value.detach()
        if current is not page:
            self.clear()
        page.fill(plain)

    def clear(self) -> None:
        """Have no gradient. Handles that user code still holds keep their values."""
        self._handle = None
        for page in (self.narrow, self.wide):
            if page is not None:
                page.drop()

    def forget_if_unlike(self, value: torch.Tensor) -> None:
        """Have no gradient and no room for one if the parameter became another kind of tensor."""
        for page in (self.narrow, self.wide):
            if page is not None and (page.shape != value.shape or page.dtype != value.dtype):
                page.remove()
        if self.narrow is not None and self.narrow.is_removed:
            self.narrow = None
        if self.wide is not None and self.wide.is_removed:
            self.wide = None
        self._handle = None

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add `grad` (full shape, the parameter's dtype) to what is stored.

        Blocks for reading what is there, not for writing the sum.
        """
        if grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{self._param.zinf_page.label} got a sparse gradient; build the layer with "
                f"sparse=False"
            )
        lock = self._param.zinf_page.pager.lock  # backward may run in several threads
        with (
            lock,
            torch.no_grad(),
            DisableTorchFunctionSubclass(),
            torch._C._DisableTorchDispatch(),  # not an operation of the user's
        ):
            current = self.current
            if current is None:
                self._store(self.reserve(), grad)
            elif self._param.dtype in LOW_PRECISION and current is self.narrow:
                self._widen(current, grad)
            else:
                self._add(current, grad)

    def _store(self, page: TensorPage, grad: torch.Tensor) -> None:
        with self._desk.lent(page.page, read=False, write=True) as buffer:
            note_norm(page, page.over(buffer).copy_(grad))

    def _add(self, page: TensorPage, grad: torch.Tensor) -> None:
        if page.factors:
            scale_page(page)
        with self._on_host(grad) as added, self._desk.lent(page.page, write=True) as buffer:
            note_norm(page, page.over(buffer).add_(added))

    def _widen(self, narrow: TensorPage, grad: torch.Tensor) -> None:
        wide = self._widened()
        if narrow.factors:
            scale_page(narrow)
        with (
            self._on_host(grad) as added,
            self._desk.lent(narrow.page) as source,
            self._desk.lent(wide.page, read=False, write=True) as total,
        ):
            note_norm(wide, wide.over(total).copy_(narrow.over(source)).add_(added))
        narrow.drop()

    @contextmanager
    def _on_host(self, grad: torch.Tensor) -> Iterator[torch.Tensor]:
        """Lend `grad` as a tensor in host memory."""
        if grad.device.type == "cpu":
            yield grad
            return
        lease = self._param.zinf_page.pager.lease_host(grad.numel() * grad.element_size())
        try:
            flat = torch.from_numpy(lease.buffer.array).view(grad.dtype)
            yield flat.view(grad.shape).copy_(grad)
            del flat
        finally:
            lease.release()

    def _widened(self) -> TensorPage:
        if self.wide is None:
            like = torch.empty_strided(
                self._param.shape,
                self._param.zinf_page.stride,
                dtype=torch.float32,
                device="meta",
            )
            self.wide = self._make_page(StateKind.GRAD, "fp32", like)
        return self.wide


def _intake(param: torch.Tensor) -> None:
    """Move the gradient that autograd just accumulated in `param` to its home."""
    grad = take_raw_grad(param)
    if grad is not None and isinstance(param, PagedParameter):
        param.zinf_gradient.accumulate(grad)

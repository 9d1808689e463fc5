"""Handles of pages: `PagedParameter`, `PagedTensor`, and `PageView` for views of resident pages.

[Note: How an operation finds its bytes]
torch calls `__torch_function__` of a handle for every operation that takes it as an argument, in
whatever module, function or loop that happens. The operation then runs with the pages pinned and
their bytes shown in the handles themselves, so that autograd sees the parameter as the leaf it is.
Afterwards the handles show a placeholder again and the pages may be evicted: what autograd saved
of them is a reference (`zinf_torch.saved_tensors`). Shape, dtype, device and other metadata are
answered without bytes (`zinf_torch.overrides`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass

from zinf_core.errors import UnsupportedError
from zinf_torch.functions import (
    BACKWARD,
    SPECIAL,
    autograd_backward,
    autograd_grad,
    format_tensor,
    set_values,
)
from zinf_torch.overrides import (
    METADATA,
    REFUSED,
    VIEW_ATTRIBUTES,
    attribute_of,
    is_foreach,
    is_untraced,
)
from zinf_torch.saved_tensors import page_saving
from zinf_torch.tensor_page import ResidentPages, TensorPage, successor

_GRAD: Any = torch.Tensor.grad
TensorT = TypeVar("TensorT", bound=torch.Tensor)


def take_raw_grad(param: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient autograd left in `param` and take it out; None if there is none."""
    with DisableTorchFunctionSubclass():
        grad: torch.Tensor | None = _GRAD.__get__(param)
        if grad is not None:
            _GRAD.__set__(param, None)
        return grad


@classmethod  # type: ignore[misc]
def _torch_function(
    cls: type,
    func: Callable[..., Any],
    types: Sequence[type],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Run `func` with the bytes of every page among its arguments. May block."""
    del cls, types
    return dispatch(func, args, kwargs or {})


class PagedTensor(torch.Tensor):
    """Handle of a page that is not a parameter: a gradient, an optimizer state, `p.data`."""

    zinf_page: TensorPage
    zinf_uses: int
    zinf_seen: int
    zinf_counts_edits = False
    __hash__ = torch.Tensor.__hash__

    def zinf_watch(self) -> None:
        """Do nothing: only parameters have gradients that are taken home."""

    def zinf_data(self) -> PageView:
        """Return the page's own bytes as a tensor: what `.data` is."""
        return _view_of(self.zinf_page)

    def zinf_alias(self) -> PagedTensor:
        """Return another handle of the page."""
        return PagedTensor.of(self.zinf_page)

    def zinf_rebind(self, value: torch.Tensor) -> None:
        """Refuse to become something else: several handles share the page."""
        page = self.zinf_page
        raise UnsupportedError(
            f"{page.label} is {page.dtype} {list(page.shape)}; its .data cannot become "
            f"{value.dtype} {list(value.shape)}"
        )

    @classmethod
    def of(cls, page: TensorPage) -> PagedTensor:
        """Return a new handle of `page`."""
        handle: Any = torch.Tensor._make_subclass(cls, page.placeholder.data)
        page.adopt_handle(handle)
        return handle  # type: ignore[no-any-return]

    __torch_function__ = _torch_function

    def set_(self, source: Any = None, *args: Any) -> Any:
        """Take the values of `source`, which torch's `set_` would take the memory of."""
        return set_values(self, source, args)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what a plain tensor shows."""
        del tensor_contents
        with self.zinf_page.pinned() as view:
            return repr(view)

    def __format__(self, format_spec: str) -> str:
        """Format as a plain tensor does: a scalar by its value."""
        return format_tensor(self, format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor with the page's values."""
        return _reduce(self.zinf_page.clone(), protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor with the page's values."""
        return _remember(memo, self, self.zinf_page.clone())


class PagedParameter(nn.Parameter):
    """A parameter whose bytes live on a tier.

    Made from an `nn.Parameter` in place, by exchanging its class, so that everything that holds
    the parameter (modules, optimizers, lists, hooks) holds the paged one.
    """

    zinf_page: TensorPage
    zinf_uses: int
    zinf_seen: int
    zinf_counts_edits = True
    zinf_gradient: Any
    zinf_states: list[TensorPage]
    """Every page of this parameter: its own, gradient, master, optimizer states."""
    __hash__ = torch.Tensor.__hash__

    __torch_function__ = _torch_function

    def zinf_watch(self) -> None:
        """Take gradients home from now on, if the parameter requires them."""
        self.zinf_gradient.watch()

    def zinf_data(self) -> PageView:
        """Return the page's own bytes as a tensor: what `.data` is."""
        return _view_of(self.zinf_page)

    def zinf_alias(self) -> PagedTensor:
        """Return a handle of the page that has no gradient."""
        return PagedTensor.of(self.zinf_page)

    def zinf_rebind(self, value: torch.Tensor) -> None:
        """Become a parameter of the shape, stride, dtype and values of `value`, without a
        gradient if its own no longer fits."""
        old = self.zinf_page
        page = successor(old, value)
        old.forget_handle(self)
        page.adopt_handle(self)
        self.zinf_gradient.forget_if_unlike(value)
        self.zinf_states.append(page)
        old.remove()

    @property
    def grad(self) -> torch.Tensor | None:
        """Gradient accumulated so far, wherever it is stored; None if there is none.

        A handle: reading it fetches it, editing it in place takes effect.
        """
        self._take_in()
        handle: torch.Tensor | None = self.zinf_gradient.handle()
        return handle

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        take_raw_grad(self)
        self.zinf_gradient.assign(value)

    @grad.deleter
    def grad(self) -> None:
        take_raw_grad(self)
        self.zinf_gradient.assign(None)

    def _take_in(self) -> None:
        """Move what autograd left in the parameter home, for a hook that runs before ours."""
        raw = take_raw_grad(self)
        if raw is not None:
            self.zinf_gradient.accumulate(raw)

    def set_(self, source: Any = None, *args: Any) -> Any:
        """Take the values of `source`, which torch's `set_` would take the memory of."""
        return set_values(self, source, args)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what a plain parameter shows."""
        del tensor_contents
        with self.zinf_page.pinned() as view:
            return repr(nn.Parameter(view, requires_grad=self.requires_grad))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain `nn.Parameter` with the page's values."""
        plain = nn.Parameter(self.zinf_page.clone(), requires_grad=self.requires_grad)
        return _reduce(plain, protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Return a plain `nn.Parameter` with the page's values."""
        plain = nn.Parameter(self.zinf_page.clone(), requires_grad=self.requires_grad)
        return _remember(memo, self, plain)


class PageView(torch.Tensor):
    """A view of a resident page, with its bytes: operations on it save references, too.

    While it lives, its page stays resident and counted.
    """

    zinf_registry: ResidentPages
    __hash__ = torch.Tensor.__hash__

    __torch_function__ = _torch_function

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Return what a plain tensor shows."""
        del tensor_contents
        with DisableTorchFunctionSubclass():
            return repr(self.as_subclass(torch.Tensor))

    def __format__(self, format_spec: str) -> str:
        """Format as a plain tensor does: a scalar by its value."""
        return format_tensor(self, format_spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor."""
        with DisableTorchFunctionSubclass():
            return _reduce(self.detach().clone(), protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """Return a plain tensor of the same values."""
        with DisableTorchFunctionSubclass():
            return _remember(memo, self, self.detach().clone())


def _reduce(plain: torch.Tensor, protocol: Any) -> Any:
    return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _remember(memo: dict[int, Any], original: torch.Tensor, copy: TensorT) -> TensorT:
    memo[id(original)] = copy
    return copy


def _view_of(page: TensorPage) -> PageView:
    """Return an alias of the page's bytes, which keeps it resident and counts as a writer."""
    with page.pinned() as view, DisableTorchFunctionSubclass():
        page.note_untraced()
        alias: Any = view.detach()
        alias.__class__ = PageView
        alias.zinf_registry = page.registry
        return alias  # type: ignore[no-any-return]


_HANDLES = (PagedParameter, PagedTensor)


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a torch function that got a handle or a view among its arguments."""
    if func in METADATA:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    special = SPECIAL.get(func)
    if special is not None and isinstance(args[0], _HANDLES):
        result = special(*args, **kwargs)
        if result is not NotImplemented:
            return result
    attribute = attribute_of(func)
    if attribute is not None and attribute[1] not in VIEW_ATTRIBUTES:
        return _access_attribute(func, attribute, args)
    if func is torch.autograd.grad:
        return autograd_grad(*args, **kwargs)
    if func in BACKWARD and not (args and isinstance(args[0], _HANDLES)):
        return autograd_backward(func, args, kwargs)
    if is_foreach(func):
        return _run_foreach(func, args, kwargs)
    if func in REFUSED and args and isinstance(args[0], _HANDLES):
        raise UnsupportedError(
            f"{REFUSED[func]} on {args[0].zinf_page.label} would move it behind the pager's back; "
            f"assign a new tensor to .data instead"
        )
    return run_with_pages(func, args, kwargs)


def run_with_pages(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `func` with the bytes of every page among its arguments, all of them at once. Blocks.

    Raises BudgetExceededError if they do not fit the device budget together.
    """
    handles: list[Any] = []
    views: list[PageView] = []
    _collect(args, handles, views)
    if kwargs:
        _collect(kwargs.values(), handles, views)
    if not handles and not views:
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if torch._C._functorch.maybe_current_level() is not None:
        raise UnsupportedError(
            "torch.func transforms (vmap, grad, jvp) do not work over attached models; use "
            "torch.autograd, or a plain copy of the parameters ({k: v.clone() for k, v in ...})"
        )
    registry = handles[0].zinf_page.registry if handles else views[0].zinf_registry
    with DisableTorchFunctionSubclass(), ExitStack() as stack:
        for handle in handles:
            handle.zinf_page.enter(handle)
            stack.callback(handle.zinf_page.leave, handle)
        if is_untraced(func):
            _note_untraced(handles, views, registry)
        with page_saving(registry) if torch.is_grad_enabled() else nullcontext():
            result = func(*args, **kwargs)
        _mark_views(result, registry, traced=all(type(h) is PagedParameter for h in handles))
    return result


def _collect(values: Iterable[Any], handles: list[Any], views: list[PageView]) -> None:
    for value in values:
        if isinstance(value, _HANDLES):
            if not any(value is handle for handle in handles):
                handles.append(value)
        elif isinstance(value, PageView):
            views.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, handles, views)
        elif isinstance(value, dict):
            _collect(value.values(), handles, views)


def _mark_views(result: Any, registry: ResidentPages, *, traced: bool) -> None:
    """Turn results that are views of a page into PageViews.

    Views made through a parameter share its version counter; others (`traced=False`) can be
    written to unseen once their handle is gone, so their page counts as dirty.
    """
    if isinstance(result, torch.Tensor):
        page = registry.find(result) if type(result) is torch.Tensor else None
        if page is not None:
            if not (traced and result._is_view()):
                page.note_untraced()
            result.__class__ = PageView
            result.zinf_registry = registry  # type: ignore[attr-defined]
    elif isinstance(result, list | tuple):
        for item in result:
            _mark_views(item, registry, traced=traced)


def _note_untraced(handles: list[Any], views: list[PageView], registry: ResidentPages) -> None:
    for handle in handles:
        handle.zinf_page.note_untraced()
    for view in views:
        page = registry.find(view)
        if page is not None:
            page.note_untraced()


def _access_attribute(
    func: Callable[..., Any], attribute: tuple[str, str], args: tuple[Any, ...]
) -> Any:
    accessor, name = attribute
    with DisableTorchFunctionSubclass():
        result = func(*args)
    if accessor == "__set__" and name == "requires_grad" and isinstance(args[0], PagedParameter):
        args[0].zinf_watch()
    if name == "data" and isinstance(args[0], PageView) and accessor == "__get__":
        registry = args[0].zinf_registry
        page = registry.find(args[0])
        if page is not None:
            page.note_untraced()
            result.__class__ = PageView
            result.zinf_registry = registry
    return result


def _run_foreach(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a list operation item by item, so that one page at a time is resident."""
    lists = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, list | tuple)]
    results: list[Any] = []
    for index in range(len(lists[0])):

        def item(arg: Any, index: int = index) -> Any:
            return [arg[index]] if isinstance(arg, list | tuple) else arg

        one = run_with_pages(
            func, tuple(map(item, args)), {name: item(arg) for name, arg in kwargs.items()}
        )
        if one is not None:
            results.extend(one)
    return tuple(results) if results else None

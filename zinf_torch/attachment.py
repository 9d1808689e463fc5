"""Attachment: turns plain parameters into paged ones, keeps their names, buries the dead."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zinf_core.errors import KeyExistsError, UnsupportedError
from zinf_core.keys import StateKind, TensorKey
from zinf_core.runtime.loans import LoanDesk
from zinf_core.runtime.pager import Pager
from zinf_torch.compute import Compute
from zinf_torch.gradients import Gradient
from zinf_torch.homes import Homes
from zinf_torch.parameter import PagedParameter
from zinf_torch.set_up import SetUp
from zinf_torch.tensor_page import ResidentPages, TensorPage


class Attachment:
    """The paged parameters of one runtime. Not thread-safe: models are attached by one thread."""

    def __init__(self, pager: Pager, homes: Homes, compute: Compute) -> None:
        """Page parameters through `pager`, at home where `homes` says, for use on `compute`."""
        self.pager = pager
        self._compute = compute
        self.desk = LoanDesk(pager)
        self.set_up = SetUp(pager, homes)
        self._homes = homes
        self._registry = ResidentPages(compute)
        self._names: dict[str, int] = {}
        self._owners: dict[int, tuple[weakref.ref[Any], list[TensorPage]]] = {}
        self._dead: deque[weakref.ref[Any]] = deque()
        """Owners that died. Callbacks only append, which runs no Python code that a lock or an
        interrupt could meet; `bury` does the work."""

    def adopt(self, param: torch.Tensor, name: str) -> None:
        """Page `param` if it is a plain parameter, as `page` does.

        Raises UnsupportedError if it is none, or belongs to another runtime, BudgetTooSmallError
        if the budgets cannot hold it.
        """
        if isinstance(param, PagedParameter):
            if param.zinf_page.pager is not self.pager:
                raise UnsupportedError(f"{param.zinf_page.label} belongs to another runtime")
        elif isinstance(param, nn.Parameter):
            if param.numel() > 0:
                self.set_up.check_parameter(param, name)
            self.page(param, name)
        else:
            raise UnsupportedError(
                f"{name} is a {type(param).__name__}; zinf optimizes nn.Parameter objects"
            )

    def page(self, param: nn.Parameter, name: str) -> None:
        """Send `param` home and make it a PagedParameter, in place; one without elements is only
        moved to the device.

        Raises UnsupportedError unless it is a dense tensor on the CPU or the device.
        """
        if param.device.type != "cpu" and param.device != self._compute.device:
            remedy = (
                "materialise it first, or build the model under runtime.deferred_init()"
                if param.is_meta
                else "move the model to the CPU first"
            )
            raise UnsupportedError(f"{name} is on {param.device}; {remedy}")
        if param.numel() == 0:
            param.data = param.data.to(self._compute.device)
            return
        self.bury()
        key = TensorKey.of(self._unique(name), StateKind.PARAM)
        with torch.inference_mode(mode=False):
            page = self._make(key, param, self._homes.home(name, StateKind.PARAM), name)
            page.fill(param.data)
            grad, param.grad = param.grad, None
            param.__class__ = PagedParameter
            paged: Any = param
            page.adopt_handle(paged)
            paged.zinf_states = [page]
            paged.zinf_gradient = Gradient(paged, desk=self.desk, make_page=self._maker(paged))
            paged.zinf_gradient.watch()
            if grad is not None:
                paged.grad = grad
        self.own(param, paged.zinf_states)

    def move_buffers(self, model: nn.Module) -> None:
        """Move the buffers of `model`, which are not paged, to the device."""
        device = self._compute.device
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device:
                    module._buffers[name] = buffer.to(device)

    def rename(self, param: PagedParameter, name: str) -> None:
        """Know `param` as `name` from now on; move it if that name has another home.

        Raises UnsupportedError if it belongs to another runtime.
        """
        page = param.zinf_page
        if page.pager is not self.pager:
            raise UnsupportedError(f"{name} belongs to another runtime; detach it there first")
        page.label = name
        home = self._homes.home(name, StateKind.PARAM)
        if home != page.page.home:
            key = TensorKey.of(self._unique(name), StateKind.PARAM)
            moved = self._make(key, page.meta(), home, name)
            with page.pinned() as view:
                moved.fill(view)
            page.forget_handle(param)
            moved.adopt_handle(param)
            page.remove()
            param.zinf_states.remove(page)
            param.zinf_states.append(moved)

    def home(self, param: PagedParameter, kind: StateKind) -> str:
        """Return the home tier of a state of `param`."""
        return self._homes.home(param.zinf_page.label, kind)

    def available_host_nbytes(self) -> int:
        """Return the host bytes that are free or cache what others may displace."""
        usage = self.pager.host_pool.usage()
        return usage.budget_nbytes - usage.leased_nbytes + self.pager.idle_host_nbytes()

    def make_state_page(
        self, param: PagedParameter, kind: StateKind, part: str, like: torch.Tensor
    ) -> TensorPage:
        """Return a new page for a state of `param`, with room on its home tier."""
        page = param.zinf_page
        key, number = TensorKey.of(page.key.name, kind, part), 1
        while self.pager.has(key):  # of another optimizer over the same parameter
            number += 1
            key = TensorKey.of(page.key.name, kind, f"{part}#{number}")
        state = self._make(key, like, self.home(param, kind), str(key))
        param.zinf_states[:] = [page for page in param.zinf_states if not page.is_removed]
        param.zinf_states.append(state)
        return state

    def own(self, owner: object, pages: list[TensorPage]) -> None:
        """Free `pages`, as they are by then, once `owner` is gone."""
        ref = weakref.ref(owner, self._dead.append)
        self._owners[id(ref)] = (ref, pages)  # not by the reference: tensors compare by value

    def bury(self) -> None:
        """Free the room of parameters and optimizers that no longer exist."""
        while self._dead:
            _, pages = self._owners.pop(id(self._dead.popleft()))
            for page in pages:
                if not page.is_removed:
                    page.remove()

    def _make(self, key: TensorKey, like: torch.Tensor, home: str, label: str) -> TensorPage:
        try:
            page = TensorPage(self.pager, self._registry, key, like=like, home=home)
        except KeyExistsError as exc:
            raise KeyExistsError(
                f"{home} holds {key} of somebody else: another run, or its owner, uses the same "
                "tier; give each run a tier of its own"
            ) from exc
        page.label = label
        return page

    def _maker(self, param: PagedParameter) -> Callable[..., TensorPage]:
        ref = weakref.ref(param)

        def make(kind: StateKind, part: str, like: torch.Tensor) -> TensorPage:
            alive = ref()
            if alive is None:
                raise UnsupportedError("the parameter was deleted")
            return self.make_state_page(alive, kind, part, like)

        return make

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return name if count == 0 else f"{name}#{count + 1}"


def refuse_shared_memory(named: list[tuple[str, nn.Parameter]]) -> None:
    """Raise UnsupportedError if two different plain parameters lie in the same memory."""
    owners: dict[int, tuple[str, nn.Parameter]] = {}
    for name, param in named:
        if isinstance(param, PagedParameter) or param.numel() == 0 or param.is_meta:
            continue
        other = owners.setdefault(param.untyped_storage().data_ptr(), (name, param))
        if other[1] is not param:
            raise UnsupportedError(
                f"{other[0]} and {name} are different parameters over the same memory; tie them by "
                f"assigning the parameter itself, or give one a copy (.clone())"
            )

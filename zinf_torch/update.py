"""ParameterUpdate: one parameter's states, opened as real tensors while they are updated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf_core.errors import InternalError
from zinf_core.keys import StateKind
from zinf_core.runtime.optimizer_step import PageUse
from zinf_core.units import align_up
from zinf_torch.gradients import LOW_PRECISION
from zinf_torch.optimizer_state import (
    Path,
    StateForecast,
    forecast_state,
    part_name,
    replace_tensors,
    streamed_tensors,
)
from zinf_torch.parameter import PagedParameter, PagedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from zinf_core.runtime.loans import Loan
    from zinf_core.runtime.pool import Lease
    from zinf_torch.api import Runtime
    from zinf_torch.tensor_page import TensorPage


class ParameterUpdate:
    """Master weights and optimizer states of one parameter, and how they are brought together.

    `open` builds `working` (a real parameter with its gradient, over working memory) and
    `working_state`; `close` takes what the optimizer made of them.
    """

    def __init__(self, runtime: Runtime, param: torch.Tensor, *, master_weights: bool) -> None:
        """Prepare for `param`, a PagedParameter or an empty tensor that is not paged."""
        self._runtime = runtime
        self.param = param
        self.has_master = master_weights and param.dtype in LOW_PRECISION
        self.master: TensorPage | None = None
        self.state_pages: dict[Path, TensorPage] = {}
        self.stepped = False
        self._forecast: StateForecast | None = None
        self._edits_in_master = 0
        self._loans: dict[TensorPage, Loan] = {}
        self._scratch: Lease | None = None
        self.working: torch.Tensor = param
        self.working_state: dict[str, Any] = {}

    # -- set-up --------------------------------------------------------------------------------

    def reserve(self, optimizer_class: type[torch.optim.Optimizer], group: dict[str, Any]) -> None:
        """Make room for gradient, master and the states the optimizer is expected to keep.

        Raises TierFullError if a tier has no room.
        """
        if not isinstance(self.param, PagedParameter):
            return
        if self.param.requires_grad:
            self.param.zinf_gradient.reserve()
        dtype = torch.float32 if self.has_master else self.param.dtype
        if self.has_master and self.master is None:
            self.master = self._make_page(StateKind.MASTER, "", self._like(dtype))
        self._forecast = forecast_state(optimizer_class, group, ndim=self.param.ndim, dtype=dtype)
        if self._forecast is not None and self.param.requires_grad:
            for path, state_dtype in self._forecast.full_shape:
                self._state_page(path, self._like(state_dtype))

    def working_nbytes(self) -> int:
        """Return the host memory one update takes at most.

        Weights and states for the whole update; the gradient and its fp32 copy before, or the
        low-precision parameter after it.
        """
        if not isinstance(self.param, PagedParameter):
            return 0
        page = self.param.zinf_page
        numel = self.param.numel()
        weights = self.master if self.master is not None else page
        states = sum(self._leased(state) for state in self.state_pages.values())
        if not self.stepped and self._forecast is not None:
            states = max(states, int(self._forecast.nbytes_per_element * numel))
        gradient = self.param.zinf_gradient
        stored = gradient.current or gradient.narrow
        before = self._leased(stored) if stored is not None else page.page.nbytes
        if self.has_master and (stored is None or stored.dtype is not torch.float32):
            before += align_up(4 * numel)
        after = self._leased(page) if self.has_master else 0
        return self._leased(weights) + states + max(before, after)

    def _leased(self, page: TensorPage) -> int:
        return 0 if self._runtime.is_host_memory(page.page.home) else align_up(page.page.nbytes)

    # -- one step ------------------------------------------------------------------------------

    def has_gradient(self) -> bool:
        """Return whether the parameter takes part in the next step."""
        if isinstance(self.param, PagedParameter):
            return self.param.zinf_gradient.current is not None
        return self.param.grad is not None

    def is_complete(self) -> bool:
        """Return whether `uses` will name everything the update needs."""
        return self.stepped

    def uses(self) -> tuple[PageUse, ...]:
        """Return the pages to read, in the order in which `open` takes their loans."""
        return tuple(PageUse(page=page.page, written=written) for page, written in self._used())

    def _used(self) -> list[tuple[TensorPage, bool]]:
        if not isinstance(self.param, PagedParameter):
            return []
        page = self.param.zinf_page
        gradient = self.param.zinf_gradient.current
        if gradient is None:
            raise InternalError(f"{page.label} lost its gradient during the optimizer step")
        used: list[tuple[TensorPage, bool]] = []
        if self.master is None:
            used.append((page, True))
        else:
            if self.master.page.has_bytes:
                used.append((self.master, True))
            if not self.master.page.has_bytes or page.edits_so_far() != self._edits_in_master:
                used.append((page, False))
        used.append((gradient, False))
        used.extend((state, True) for state in self.state_pages.values() if state.page.has_bytes)
        return used

    def open(
        self,
        state: dict[str, Any],
        loans: Iterator[Loan],
        construct: Callable[[torch.Tensor], dict[str, Any]],
    ) -> None:
        """Build `working` and `working_state` over the loans of `uses`.

        `construct` returns the state the optimizer's constructor makes for a parameter.
        """
        if not isinstance(self.param, PagedParameter):
            self.working, self.working_state = self.param, state
            return
        self._loans = {page: next(loans) for page, _ in self._used()}
        try:
            self._build(self.param, state, construct)
        except BaseException:
            self._abandon()
            raise

    def _build(
        self,
        param: PagedParameter,
        state: dict[str, Any],
        construct: Callable[[torch.Tensor], dict[str, Any]],
    ) -> None:
        weights = self._open_weights(param.zinf_page)
        self.working = nn.Parameter(weights, requires_grad=param.requires_grad)
        self.working.grad = self._open_gradient(weights)
        tensors = {
            path: page.over(self._loans[page].buffer)
            for path, page in self.state_pages.items()
            if page in self._loans
        }
        if not state and not self.stepped:
            self.working_state = construct(self.working)
        else:
            self.working_state = replace_tensors(state, dict(tensors))

    def _abandon(self) -> None:
        self.working, self.working_state = self.param, {}
        loans, self._loans = self._loans, {}
        for loan in loans.values():
            self._runtime.desk.give_back(loan, written=False)
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.release()

    def _open_weights(self, page: TensorPage) -> torch.Tensor:
        if self.master is None:
            return page.over(self._loans[page].buffer)
        if self.master not in self._loans:
            self._loans[self.master] = self._runtime.desk.borrow(self.master.page, read=False)
            weights = self.master.over(self._loans[self.master].buffer)
            weights.copy_(page.over(self._loans[page].buffer))
        else:
            weights = self.master.over(self._loans[self.master].buffer)
            if page in self._loans:  # edited since the last step: the edited elements win
                edited = page.over(self._loans[page].buffer)
                kept = weights.to(page.dtype) == edited
                weights.copy_(torch.where(kept, weights, edited.float()))
        if page in self._loans:
            self._runtime.desk.give_back(self._loans.pop(page), written=False)
        return weights

    def _open_gradient(self, weights: torch.Tensor) -> torch.Tensor:
        stored = self._gradient_page()
        loan = self._loans[stored]
        gradient = stored.over(loan.buffer)
        if gradient.dtype is weights.dtype:
            return gradient
        self._scratch = self._runtime.pager.lease_host(weights.numel() * weights.element_size())
        flat = torch.from_numpy(self._scratch.buffer.array).view(weights.dtype)
        scratch = flat.as_strided(stored.shape, stored.stride).copy_(gradient)
        del gradient
        self._runtime.desk.give_back(self._loans.pop(stored), written=False)
        return scratch

    def _gradient_page(self) -> TensorPage:
        if not isinstance(self.param, PagedParameter):
            raise InternalError("an empty parameter has no gradient page")
        page: TensorPage | None = self.param.zinf_gradient.current
        if page is None:
            raise InternalError(f"{self.param.zinf_page.label} lost its gradient in its update")
        return page

    def close(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take the updated weights and states home; return the state with handles for what is
        streamed. The loans that remain are given back by the caller."""
        if not isinstance(self.param, PagedParameter):
            return state
        self._close_gradient()
        handles = {path: self._close_state(path, t) for path, t in streamed_tensors(state)}
        for path in [path for path in self.state_pages if path not in handles]:
            self._forget_state(path)
        page = self.param.zinf_page
        page.note_edit()
        if self.master is not None:
            with self._runtime.desk.lent(page.page, read=False, write=True) as buffer:
                page.over(buffer).copy_(self.working)
            self._edits_in_master = page.edits_so_far()
            master_loan = self._loans[self.master]
            self._runtime.desk.give_back(master_loan, written=True)
        self.stepped = True
        self.working, self.working_state, self._loans = self.param, {}, {}
        result: dict[str, Any] = replace_tensors(state, dict(handles))
        return result

    def _close_gradient(self) -> None:
        stored = self._gradient_page()
        gradient = self.working.grad
        written = gradient is not None and gradient._version > 0 and self._scratch is None
        self.working.grad = None
        del gradient
        if stored in self._loans:
            self._runtime.desk.give_back(self._loans.pop(stored), written=written)
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.release()

    def _close_state(self, path: Path, tensor: torch.Tensor) -> PagedTensor:
        page = self.state_pages.get(path)
        if page is not None and (page.shape != tensor.shape or page.dtype != tensor.dtype):
            self._forget_state(path)
            page = None
        if page is None:
            page = self._state_page(path, tensor)
        loan = self._loans.get(page)
        if loan is None:
            with self._runtime.desk.lent(page.page, read=False, write=True) as buffer:
                page.over(buffer).copy_(tensor)
        elif loan.buffer.address != tensor.data_ptr():
            page.over(loan.buffer).copy_(tensor)
        return PagedTensor.of(page)

    # -- pages ---------------------------------------------------------------------------------

    def _like(self, dtype: torch.dtype) -> torch.Tensor:
        stride = self.param.zinf_page.stride if isinstance(self.param, PagedParameter) else ()
        return torch.empty_strided(self.param.shape, stride, dtype=dtype, device="meta")

    def _make_page(self, kind: StateKind, part: str, like: torch.Tensor) -> TensorPage:
        return self._runtime.make_state_page(self.param, kind, part, like)

    def _state_page(self, path: Path, like: torch.Tensor) -> TensorPage:
        if path not in self.state_pages:
            part = part_name(path)
            self.state_pages[path] = self._make_page(StateKind.OPTIMIZER_STATE, part, like)
        return self.state_pages[path]

    def _forget_state(self, path: Path) -> None:
        page = self.state_pages.pop(path)
        loan = self._loans.pop(page, None)
        if loan is not None:
            self._runtime.desk.give_back(loan, written=False)
        page.remove()

    def load(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replace the parameter's state by `state`; return it with handles for what is streamed.

        The tensors are copied, one at a time.
        """
        if not isinstance(self.param, PagedParameter):
            return state
        state = dict(state)
        master = state.pop("master_weight", None)
        if master is not None and self.master is not None:
            self.master.fill(master)
            self._edits_in_master = self.param.zinf_page.edits_so_far()
        elif self.master is not None:
            self.master.drop()
        handles: dict[Path, PagedTensor] = {}
        for path, tensor in streamed_tensors(state):
            old = self.state_pages.get(path)
            if old is not None and (old.shape != tensor.shape or old.dtype != tensor.dtype):
                self._forget_state(path)
            page = self._state_page(path, tensor)
            page.fill(tensor)
            handles[path] = PagedTensor.of(page)
        for path in [path for path in self.state_pages if path not in handles]:
            self._forget_state(path)
        self.stepped = bool(state)
        result: dict[str, Any] = replace_tensors(state, dict(handles))
        return result

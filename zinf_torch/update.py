"""ParameterUpdate: one parameter's states, opened as real tensors while they are updated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from zinf_core.errors import InternalError, UnsupportedError
from zinf_core.runtime.loans import Loan
from zinf_core.runtime.optimizer_step import PageUse
from zinf_core.runtime.pool import Lease
from zinf_torch.optimizer_state import Path, replace_tensors, streamed_tensors
from zinf_torch.parameter import PagedParameter, PagedTensor
from zinf_torch.parameter_states import ParameterStates
from zinf_torch.scaling import copy_scaled
from zinf_torch.tensor_page import TensorPage

Construct = Callable[[torch.Tensor], dict[str, Any]]
"""Returns the state the optimizer's constructor makes for a parameter."""


class EmptyUpdate:
    """Stands for a parameter without elements, which is not paged: the optimizer gets it as it
    is."""

    def __init__(self, param: torch.Tensor) -> None:
        """Prepare for `param`."""
        self.param = param
        self.working = param
        self.working_state: dict[str, Any] = {}
        self.states: ParameterStates | None = None
        self.is_last = True

    def has_gradient(self) -> bool:
        """Return whether the parameter takes part in the next step."""
        return self.param.grad is not None

    def uses(self) -> tuple[PageUse, ...]:
        """Return no pages."""
        return ()

    def open(self, state: dict[str, Any], loans: Iterator[Loan], construct: Construct) -> None:
        """Take the state as it is."""
        del loans, construct
        self.working_state = state

    def close(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return the state as it is."""
        return state


class ParameterUpdate:
    """Brings a parameter, or a part of one, its gradient and its states together for one step.

    `open` builds `working` (a real parameter with its gradient, over working memory) and
    `working_state`; `close` takes what the optimizer made of them.
    """

    def __init__(self, states: ParameterStates) -> None:
        """Prepare for the part that `states` are of."""
        self.states: ParameterStates | None = states
        self.param: PagedParameter = states.param
        self.is_last = states.part.is_last
        """No other part of the parameter is updated after this one."""
        self.working: torch.Tensor = states.param
        self.working_state: dict[str, Any] = {}
        self._states = states
        self._part = states.part
        self._desk = states.room.desk
        self.siblings: list[ParameterStates] = []
        """States of the other parts of the parameter."""
        self._loans: dict[TensorPage, Loan] = {}
        self._scratch: Lease | None = None

    def has_gradient(self) -> bool:
        """Return whether the parameter takes part in the next step. Raises UnsupportedError once
        it is detached."""
        if not hasattr(self.param, "zinf_gradient"):
            raise UnsupportedError(
                "a parameter of this optimizer was detached; make a plain optimizer for the model "
                "and load this one's state_dict"
            )
        return self.param.zinf_gradient.current is not None

    def uses(self) -> tuple[PageUse, ...]:
        """Return the pages to read, in the order in which `open` takes their loans."""
        return tuple(PageUse(page=page.page, written=written) for page, written in self._used())

    def _used(self) -> list[tuple[TensorPage, bool]]:
        page, master = self.param.zinf_page, self._states.master
        used: list[tuple[TensorPage, bool]] = []
        if master is None:
            used.append((page, True))
        else:
            if master.page.has_bytes:
                used.append((master, True))
            if not master.page.has_bytes or page.edits_so_far() != self._states.edits_in_master:
                used.append((page, False))
        used.append((self._gradient_page(), False))
        used.extend((state, True) for state in self._states.in_use())
        return used

    def open(self, state: dict[str, Any], loans: Iterator[Loan], construct: Construct) -> None:
        """Build `working` and `working_state` over the loans of `uses`."""
        self._loans = {page: next(loans) for page, _ in self._used()}
        try:
            self._build(state, construct)
        except BaseException:
            self._abandon()
            raise

    def _build(self, state: dict[str, Any], construct: Construct) -> None:
        weights = self._open_weights()
        self.working = nn.Parameter(weights, requires_grad=self.param.requires_grad)
        self.working.grad = self._open_gradient(weights)
        if not state and not self._states.stepped:
            self.working_state = construct(self.working)
        else:
            tensors = {
                path: page.over(self._loans[page].buffer)
                for path, page in self._states.pages.items()
                if page in self._loans
            }
            self.working_state = replace_tensors(state, dict(tensors))

    def _open_weights(self) -> torch.Tensor:
        page, master = self.param.zinf_page, self._states.master
        if master is None:
            return self._part.of(page, self._loans[page].buffer)
        if master not in self._loans:
            self._loans[master] = self._desk.borrow(master.page, read=False)
            weights = master.over(self._loans[master].buffer)
            weights.copy_(self._part.of(page, self._loans[page].buffer))
        else:
            weights = master.over(self._loans[master].buffer)
            if page in self._loans:  # edited since the last step: the edited elements win
                edited = self._part.of(page, self._loans[page].buffer)
                kept = weights.to(page.dtype) == edited
                weights.copy_(torch.where(kept, weights, edited.float()))
        if page in self._loans:
            self._desk.give_back(self._loans.pop(page), written=False)
        return weights

    def _open_gradient(self, weights: torch.Tensor) -> torch.Tensor:
        stored = self._gradient_page()
        whole = stored.over(self._loans[stored].buffer)
        gradient = self._part.of_tensor(whole)
        if gradient.dtype is weights.dtype:
            for factor in stored.factors:
                whole.mul_(factor)  # counts as a version of `gradient`, too
            stored.factors.clear()
            return gradient
        nbytes = weights.numel() * weights.element_size()
        self._scratch = self._states.room.pager.lease_host(nbytes)
        flat = torch.from_numpy(self._scratch.buffer.array).view(weights.dtype)
        scratch = flat.as_strided(self._part.shape, self._part.stride)
        copy_scaled(scratch, gradient, stored.factors)
        del gradient, whole
        self._desk.give_back(self._loans.pop(stored), written=False)
        return scratch

    def _gradient_page(self) -> TensorPage:
        page: TensorPage | None = self.param.zinf_gradient.current
        if page is None:
            raise InternalError(f"{self.param.zinf_page.label} lost its gradient in its update")
        return page

    def _abandon(self) -> None:
        self.working, self.working_state = self.param, {}
        loans, self._loans = self._loans, {}
        for loan in loans.values():
            self._desk.give_back(loan, written=False)
        self._release_scratch()

    def _release_scratch(self) -> None:
        scratch, self._scratch = self._scratch, None
        if scratch is not None:
            scratch.release()

    def close(self, state: dict[str, Any]) -> dict[str, Any]:
        """Take the updated weights and states home; return the state with handles for what is
        streamed. The loans that remain are given back by the caller."""
        self._close_gradient()
        self._close_weights()
        handles = {path: self._close_state(path, t) for path, t in streamed_tensors(state)}
        for path in self._states.pages.keys() - handles.keys():
            loan = self._loans.pop(self._states.pages[path], None)
            if loan is not None:
                self._desk.give_back(loan, written=False)
        self._states.forget_others(set(handles))
        self._states.stepped = True
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
            self._desk.give_back(self._loans.pop(stored), written=written)
        self._release_scratch()

    def _close_weights(self) -> None:
        page, master = self.param.zinf_page, self._states.master
        before = page.edits_so_far()
        page.note_edit()
        if master is None:
            return
        with self._desk.lent(page.page, read=not self._part.is_whole, write=True) as buffer:
            self._part.of(page, buffer).copy_(self.working)
        self._states.edits_in_master = page.edits_so_far()
        for sibling in self.siblings:
            if sibling.edits_in_master == before:
                sibling.edits_in_master = self._states.edits_in_master
        self.working = self.param
        self._desk.give_back(self._loans.pop(master), written=True)

    def _close_state(self, path: Path, tensor: torch.Tensor) -> PagedTensor:
        old = self._states.pages.get(path)
        if old is not None and (old.shape != tensor.shape or old.dtype != tensor.dtype):
            loan = self._loans.pop(old, None)
            if loan is not None:
                self._desk.give_back(loan, written=False)
            self._states.forget_if_unlike(path, tensor)
        page = self._states.page(path, tensor)
        loan = self._loans.get(page)
        if loan is None:
            with self._desk.lent(page.page, read=False, write=True) as buffer:
                page.over(buffer).copy_(tensor)
        elif loan.buffer.address != tensor.data_ptr():
            page.over(loan.buffer).copy_(tensor)
        return PagedTensor.of(page)

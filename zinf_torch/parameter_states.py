"""ParameterStates: the master weights and optimizer states of one parameter, as pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from zinf_core.keys import StateKind
from zinf_core.runtime.loans import LoanDesk
from zinf_core.runtime.pager import Pager
from zinf_core.units import PAGE_NBYTES, align_up
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
from zinf_torch.parts import Part
from zinf_torch.tensor_page import TensorPage


class StateRoom(Protocol):
    """What states need of the runtime."""

    @property
    def pager(self) -> Pager:
        """Pages of the runtime."""
        ...

    @property
    def desk(self) -> LoanDesk:
        """Loans of those pages."""
        ...

    def make_state_page(
        self, param: PagedParameter, kind: StateKind, part: str, like: torch.Tensor
    ) -> TensorPage:
        """Return a new page for a state of `param`, with room on its home tier."""
        ...

    def home(self, param: PagedParameter, kind: StateKind) -> str:
        """Return the home tier of a state of `param`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedState:
    """A state that will need room at home: what `ParameterStates.reserve` makes."""

    kind: StateKind
    path: Path
    dtype: torch.dtype
    home: str
    nbytes: int
    """In whole pages."""


class ParameterStates:
    """Pages of the states of a paged parameter, or of a part of one. Not thread-safe: the
    optimizer's alone."""

    def __init__(
        self, room: StateRoom, part: Part, *, master_weights: bool, owned: list[TensorPage]
    ) -> None:
        """Describe the states of `part`; nothing is reserved yet. Pages made later are appended
        to `owned`."""
        self.room = room
        self._owned = owned
        self.part = part
        self.param = param = part.param
        self.has_master = master_weights and param.dtype in LOW_PRECISION
        self.working_dtype = torch.float32 if self.has_master else param.dtype
        self.master: TensorPage | None = None
        self.pages: dict[Path, TensorPage] = {}
        self.stepped = False
        """The optimizer has made its states, so `pages` are all it keeps."""
        self.edits_in_master = 0
        """`TensorPage.edits` of the parameter when the master was last equal to it."""
        self._forecast: StateForecast | None = None

    def plan(
        self,
        construct: Callable[[dict[str, Any]], torch.optim.Optimizer],
        group: dict[str, Any],
    ) -> list[PlannedState]:
        """Return what must be reserved before the first step: gradient, master, states."""
        param = self.param
        self._forecast = forecast_state(
            construct, group, ndim=len(self.part.shape), dtype=self.working_dtype
        )
        wanted: list[tuple[StateKind, Path, torch.dtype]] = []
        if self.part.index == 0 and param.requires_grad and param.zinf_gradient.narrow is None:
            wanted.append((StateKind.GRAD, (), param.dtype))
        if self.has_master and self.master is None:
            wanted.append((StateKind.MASTER, (), torch.float32))
        if self._forecast is not None and param.requires_grad:
            states = self._forecast.full_shape
            wanted.extend((StateKind.OPTIMIZER_STATE, path, dtype) for path, dtype in states)
        return [
            PlannedState(
                kind=kind,
                path=path,
                dtype=dtype,
                home=self.room.home(param, kind),
                nbytes=(
                    self._param_nbytes(dtype)
                    if kind is StateKind.GRAD
                    else self._page_nbytes(dtype)
                ),
            )
            for kind, path, dtype in wanted
        ]

    def reserve(self, planned: list[PlannedState]) -> None:
        """Make room for what `plan` returned. Raises TierFullError if a tier has none."""
        for state in planned:
            if state.kind is StateKind.GRAD:
                self.param.zinf_gradient.reserve()
            elif state.kind is StateKind.MASTER:
                self.master = self._make(state.kind, "", self.part.like(state.dtype))
            else:
                self.page(state.path, self.part.like(state.dtype))

    def working_nbytes(self) -> int:
        """Return the host memory one update takes at most.

        Weights and states for the whole update; the gradient and its fp32 copy before, or the
        low-precision parameter after it. States at home in memory the host works in are updated in
        place and take none.
        """
        if self.has_master:
            weights = self._leased(StateKind.MASTER, self._page_nbytes(torch.float32))
        else:
            weights = self._leased(StateKind.PARAM, self._param_nbytes(self.param.dtype))
        gradient = self.param.zinf_gradient
        stored = gradient.current
        stored_dtype = self.param.dtype if stored is None else stored.dtype
        before = self._leased(StateKind.GRAD, self._param_nbytes(stored_dtype))
        if self.has_master and stored_dtype is not torch.float32:
            before += self._page_nbytes(torch.float32)
        after = 0
        if self.has_master:
            after = self._leased(StateKind.PARAM, self._param_nbytes(self.param.dtype))
        return weights + self._states_nbytes() + max(before, after)

    def largest_state_nbytes(self) -> int:
        """Return the bytes of the largest state that reading it would bring to the device."""
        sizes = [0]
        if self.room.home(self.param, StateKind.OPTIMIZER_STATE) != "device":
            full = () if self._forecast is None else self._forecast.full_shape
            sizes.extend(self._page_nbytes(dtype) for _, dtype in full)
            if self.has_master:
                sizes.append(self._page_nbytes(torch.float32))
        return max(sizes)

    def page(self, path: Path, like: torch.Tensor) -> TensorPage:
        """Return the page of the state at `path`, making it like `like` if there is none."""
        if path not in self.pages:
            self.pages[path] = self._make(StateKind.OPTIMIZER_STATE, part_name(path), like)
        return self.pages[path]

    def _make(self, kind: StateKind, part: str, like: torch.Tensor) -> TensorPage:
        page = self.room.make_state_page(self.param, kind, self.part.name(part), like)
        self._owned.append(page)
        return page

    def forget_others(self, kept: set[Path]) -> None:
        """Remove the pages of states the optimizer no longer keeps."""
        for path in self.pages.keys() - kept:
            self._forget(path)

    def load(self, state: dict[str, Any]) -> dict[str, Any]:
        """Replace the states by `state`; return it with handles for what is streamed.

        The tensors are copied, one at a time. Without a ``master_weight`` the master is made anew
        from the parameter.
        """
        state = dict(state)
        self.load_master(state.pop("master_weight", None))
        taken = self.take(state)
        self.keep_only(taken)
        return taken

    def keep_only(self, state: dict[str, Any]) -> None:
        """Remove the pages of states that `state` does not have."""
        self.stepped = bool(state)
        self.forget_others({path for path, _ in streamed_tensors(state)})

    def load_master(self, values: torch.Tensor | None) -> None:
        """Replace the master; without `values` it is made anew from the parameter."""
        if self.master is None:
            return
        if values is None:
            self.master.drop()
        else:
            self.master.fill(values)
            self.edits_in_master = self.param.zinf_page.edits_so_far()

    def take(self, state: dict[str, Any]) -> dict[str, Any]:
        """Copy streamed tensors that are not handles of their own pages yet; return `state` with
        handles for them. Users may put any tensor into an optimizer's state."""
        handles: dict[Path, PagedTensor] = {}
        for path, tensor in streamed_tensors(state):
            page = self.pages.get(path)
            if page is None or getattr(tensor, "zinf_page", None) is not page:
                self.forget_if_unlike(path, tensor)
                page = self.page(path, tensor)
                page.fill(tensor)
                handles[path] = PagedTensor.of(page)
        result: dict[str, Any] = replace_tensors(state, dict(handles)) if handles else state
        return result

    def forget_if_unlike(self, path: Path, tensor: torch.Tensor) -> None:
        """Remove the page at `path` if it cannot hold `tensor`."""
        page = self.pages.get(path)
        if page is not None and (page.shape != tensor.shape or page.dtype != tensor.dtype):
            self._forget(path)

    def in_use(self) -> Iterator[TensorPage]:
        """Iterate over the state pages that have values."""
        return (page for page in self.pages.values() if page.page.has_bytes)

    def _forget(self, path: Path) -> None:
        page = self.pages.pop(path)
        page.remove()
        self._owned.remove(page)

    def _states_nbytes(self) -> int:
        known = sum(align_up(page.page.nbytes) for page in self.pages.values())
        if not self.stepped and self._forecast is not None:
            full = self._forecast.full_shape
            of_full_shape = sum(dtype.itemsize for _, dtype in full)
            other = self._forecast.nbytes_per_element - of_full_shape
            planned = sum(self._page_nbytes(dtype) for _, dtype in full)
            if other > 0:
                planned += align_up(int(other * self.part.numel)) + 4 * PAGE_NBYTES
            known = max(known, planned)
        return self._leased(StateKind.OPTIMIZER_STATE, known)

    def _leased(self, kind: StateKind, nbytes: int) -> int:
        return 0 if self.room.pager.lends_in_place(self.room.home(self.param, kind)) else nbytes

    def _nbytes(self, kind: StateKind, dtype: torch.dtype) -> int:
        return self._param_nbytes(dtype) if kind is StateKind.GRAD else self._page_nbytes(dtype)

    def _page_nbytes(self, dtype: torch.dtype) -> int:
        return align_up(dtype.itemsize * self.part.numel)

    def _param_nbytes(self, dtype: torch.dtype) -> int:
        return align_up(dtype.itemsize * self.param.numel())

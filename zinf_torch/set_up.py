"""SetUp: refuses budgets that cannot work, before anything of the model's size is moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import nn

from zinf_core.errors import BudgetTooSmallError
from zinf_core.keys import StateKind
from zinf_core.runtime.pager import Pager
from zinf_core.units import format_nbytes
from zinf_storage.machine import read_memory
from zinf_torch.budget import NOTHING, Requirement, at_home, device_requirement, page_nbytes
from zinf_torch.homes import Homes
from zinf_torch.parameter import PagedParameter

if TYPE_CHECKING:
    from zinf_torch.parameter_states import ParameterStates, PlannedState


class SetUp:
    """Knows what the models and optimizers so far need at once of the device budget."""

    def __init__(self, pager: Pager, homes: Homes) -> None:
        """Check against the pools of `pager`."""
        self._pager = pager
        self._homes = homes
        self._device = NOTHING

    def check_model(self, model: nn.Module) -> None:
        """Raise BudgetTooSmallError unless the budgets hold what `model` needs of them."""
        requirement = _larger(self._device, [device_requirement(model, self._homes)])
        staging = _larger(NOTHING, self._staging_requirements(model))
        for name, needs in (("device", requirement), ("host", staging)):
            coming = sum(
                page_nbytes(param, param.dtype)
                for param in at_home(model, self._homes, name)
                if not isinstance(param, PagedParameter) or param.zinf_page.page.home != name
            )
            self._check(name, needs, self._fixed(name) + coming)
        self._device = requirement

    def check_parameter(self, param: nn.Parameter, name: str) -> None:
        """Raise BudgetTooSmallError unless the budgets hold `param` beside what lives there."""
        needs = Requirement(nbytes=page_nbytes(param, param.dtype), what=name)
        self._check("device", needs, self._fixed("device"))
        if self._homes.home(name, StateKind.PARAM) == "host":
            self._check("host", needs, self._fixed("host"))

    def check_states(
        self, planned: Sequence[tuple[ParameterStates, list[PlannedState]]], optimizer: str
    ) -> None:
        """Raise BudgetTooSmallError unless what is planned and its largest update fit."""
        fixed = {name: self._fixed(name) for name in ("device", "host")}
        host, device = NOTHING, self._device
        for states, wanted in planned:
            for state in wanted:
                if state.home in fixed:
                    fixed[state.home] += state.nbytes
            page = states.param.zinf_page
            shape = f"{page.label} ({list(page.shape)} {page.dtype})"
            step = f"the {optimizer} step of {shape}: weights, gradient and states"
            host = _larger(host, [Requirement(nbytes=states.working_nbytes(), what=step)])
            largest = f"an optimizer state of {shape}"
            device = _larger(
                device, [Requirement(nbytes=states.largest_state_nbytes(), what=largest)]
            )
        self._check("device", device, fixed["device"])
        self._check("host", host, fixed["host"])
        self._device = device

    def _staging_requirements(self, model: nn.Module) -> Iterator[Requirement]:
        """Iterate over the host memory that parameters need on their way to the device."""
        pager = self._pager
        for name, param in model.named_parameters():
            home = self._homes.home(name, StateKind.PARAM)
            if not pager.tiers[home].capabilities.takes(pager.device_pool.space):
                what = f"{name} on its way from {home} to the device"
                yield Requirement(nbytes=page_nbytes(param, param.dtype), what=what)

    def _check(self, name: str, needs: Requirement, fixed_nbytes: int) -> None:
        pool = self._pager.device_pool if name == "device" else self._pager.host_pool
        needs.check(name, pool.budget_nbytes, fixed_nbytes)

    def _fixed(self, name: str) -> int:
        return self._pager.tiers[name].usage().allocated_nbytes


def check_machine(budgets: Mapping[str, int]) -> None:
    """Raise BudgetTooSmallError if the budgets exceed the memory this process may use."""
    memory = read_memory()
    total = sum(budgets.values())
    limit = min(memory.total_nbytes, memory.cgroup_limit_nbytes or memory.total_nbytes)
    if total > limit:
        raise BudgetTooSmallError(
            f"{' + '.join(budgets)} budgets of {format_nbytes(total)} exceed the "
            f"{format_nbytes(limit)} this process may use; lower them"
        )


def _larger(requirement: Requirement, others: Iterable[Requirement]) -> Requirement:
    return max((requirement, *others), key=lambda each: each.nbytes)

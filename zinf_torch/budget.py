"""Set-up checks: the largest thing that must be resident at once against its budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn

from zinf_core.errors import BudgetTooSmallError
from zinf_core.units import align_up, format_nbytes
from zinf_torch.gradients import LOW_PRECISION


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """The least a budget must hold, and what for."""

    nbytes: int
    what: str

    def check(self, name: str, budget_nbytes: int, fixed_nbytes: int) -> None:
        """Raise BudgetTooSmallError if the budget called `name` is too small.

        `fixed_nbytes` is what lives in the budget for good (states at home there).
        """
        if self.nbytes + fixed_nbytes <= budget_nbytes:
            return
        resident = format_nbytes(fixed_nbytes)
        fixed = f" + {resident} of states that live there" if fixed_nbytes else ""
        raise BudgetTooSmallError(
            f"{name} budget of {format_nbytes(budget_nbytes)} is too small: {self.what} needs "
            f"{format_nbytes(self.nbytes)} at once{fixed}. Set {name} to at least "
            f"{self.nbytes + fixed_nbytes} bytes ({format_nbytes(self.nbytes + fixed_nbytes)})"
        )


def device_requirement(model: nn.Module, is_paged: Callable[[nn.Parameter], bool]) -> Requirement:
    """Return the largest set of parameters that one operation of `model` takes at once.

    That is all parameters a module owns itself (a linear's weight and bias, all weights of an
    LSTM, projections of a multi-head attention), except in lists and dicts of parameters; or the
    gradient of one parameter, which may be stored in fp32. Parameters that `is_paged` denies are
    not counted.
    """
    largest = Requirement(nbytes=0, what="nothing")
    for name, module in model.named_modules():
        owned = module.parameters(recurse=isinstance(module, nn.MultiheadAttention))
        sizes = [_paged_nbytes(param) for param in owned if is_paged(param)]
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            sizes = [max(sizes, default=0)]
        if sum(sizes) > largest.nbytes:
            what = f"module {name or type(module).__name__!r} ({type(module).__name__})"
            largest = Requirement(nbytes=sum(sizes), what=what)
    for name, param in model.named_parameters():
        if is_paged(param) and param.requires_grad and param.dtype in LOW_PRECISION:
            nbytes = align_up(4 * param.numel())
            if nbytes > largest.nbytes:
                largest = Requirement(nbytes=nbytes, what=f"the fp32 gradient of {name}")
    return largest


def _paged_nbytes(param: nn.Parameter) -> int:
    return align_up(param.numel() * param.element_size())


def total_nbytes(params: Iterable[nn.Parameter]) -> int:
    """Return the bytes of `params` in whole pages."""
    return sum(map(_paged_nbytes, params))

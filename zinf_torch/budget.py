"""Set-up checks: the largest thing that must be resident at once against its budget."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from zinf_core.errors import BudgetTooSmallError
from zinf_core.keys import StateKind
from zinf_core.units import align_up, format_nbytes
from zinf_torch.gradients import LOW_PRECISION
from zinf_torch.homes import Homes


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """The least a budget must hold at once, and what for."""

    nbytes: int
    what: str

    def check(self, name: str, budget_nbytes: int, fixed_nbytes: int) -> None:
        """Raise BudgetTooSmallError if the budget called `name` is too small.

        `fixed_nbytes` is what lives in the budget for good (states at home there).
        """
        needed = self.nbytes + fixed_nbytes
        if needed <= budget_nbytes:
            return
        parts = [f"{format_nbytes(self.nbytes)} at once for {self.what}"] if self.nbytes else []
        if fixed_nbytes:
            parts.append(f"{format_nbytes(fixed_nbytes)} for the states at home there")
        raise BudgetTooSmallError(
            f"{name} budget of {format_nbytes(budget_nbytes)} ({budget_nbytes} bytes) is too "
            f"small: it must hold {' and '.join(parts)}. Set {name} to at least {needed} bytes "
            f"({format_nbytes(needed)}), or choose other homes"
        )


NOTHING = Requirement(nbytes=0, what="nothing")


def device_requirement(model: nn.Module, homes: Homes) -> Requirement:
    """Return the most the device must hold at once for `model`, besides what is at home there.

    That is all parameters a module owns itself (a linear's weight and bias, all weights of an
    LSTM, projections of a multi-head attention), except in lists and dicts of parameters; or one
    gradient, which for a low-precision parameter may be stored in fp32. States at home on the
    device are used in place and take no more.
    """
    names = {id(param): name for name, param in model.named_parameters(remove_duplicate=False)}
    largest = NOTHING
    for name, module in model.named_modules():
        owned = module.parameters(recurse=isinstance(module, nn.MultiheadAttention))
        sizes = [
            page_nbytes(param, param.dtype)
            for param in owned
            if homes.home(names[id(param)], StateKind.PARAM) != "device"
        ]
        if isinstance(module, nn.ParameterList | nn.ParameterDict):
            sizes = [max(sizes, default=0)]
        if sum(sizes) > largest.nbytes:
            what = f"module {name or type(module).__name__!r} ({type(module).__name__})"
            largest = Requirement(nbytes=sum(sizes), what=what)
    for name, param in model.named_parameters():
        if param.requires_grad and homes.home(name, StateKind.GRAD) != "device":
            dtype = torch.float32 if param.dtype in LOW_PRECISION else param.dtype
            nbytes = page_nbytes(param, dtype)
            if nbytes > largest.nbytes:
                largest = Requirement(nbytes=nbytes, what=f"the gradient of {name} in {dtype}")
    return largest


def at_home(model: nn.Module, homes: Homes, home: str) -> Iterator[nn.Parameter]:
    """Iterate over the parameters of `model` that live on tier `home`."""
    for name, param in model.named_parameters():
        if homes.home(name, StateKind.PARAM) == home:
            yield param


def page_nbytes(param: torch.Tensor, dtype: torch.dtype) -> int:
    """Return the bytes of a state of `param` in `dtype`, in whole pages."""
    return align_up(param.numel() * dtype.itemsize)

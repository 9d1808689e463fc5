"""Part: what one update of a parameter is about, all of it or a range of its elements.

Optimizers that treat every element alone update a large parameter piece by piece, so that a
sub-group of the streamed step stays small whatever the largest parameter is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from zinf_core.buffers import Buffer
from zinf_torch.parameter import PagedParameter
from zinf_torch.tensor_page import TensorPage

ELEMENTWISE: Final[frozenset[type[torch.optim.Optimizer]]] = frozenset(
    {
        torch.optim.ASGD,
        torch.optim.Adadelta,
        torch.optim.Adagrad,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.NAdam,
        torch.optim.RAdam,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.SGD,
    }
)
"""Classes whose update of an element depends on nothing but that element's values and scalars."""
PIECE_NUMEL = 1 << 21
"""Elements per piece. Not a setting: what is stored must not depend on budgets."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A range of the elements of a parameter, in the order in which they are stored."""

    param: PagedParameter
    start: int
    numel: int
    index: int
    """Which of the parameter's parts it is."""
    is_whole: bool
    is_last: bool

    @property
    def shape(self) -> torch.Size:
        """Shape of its tensors: the parameter's own if it is all of it, else flat."""
        return self.param.zinf_page.shape if self.is_whole else torch.Size((self.numel,))

    @property
    def stride(self) -> tuple[int, ...]:
        """Stride of its tensors."""
        return self.param.zinf_page.stride if self.is_whole else (1,)

    def name(self, part: str) -> str:
        """Return the `TensorKey.part` of a state of this part: ``"exp_avg[2]"``."""
        return part if self.is_whole else f"{part}[{self.index}]"

    def like(self, dtype: torch.dtype) -> torch.Tensor:
        """Return a meta tensor like a state of this part."""
        return torch.empty_strided(self.shape, self.stride, dtype=dtype, device="meta")

    def of(self, page: TensorPage, buffer: Buffer) -> torch.Tensor:
        """Return this part of `page`, which is like the parameter, over its bytes in `buffer`."""
        return self.of_tensor(page.over(buffer))

    def of_tensor(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor of the parameter's shape and stride, sharing its memory."""
        return whole if self.is_whole else whole.as_strided((self.numel,), (1,), self.start)

    def cut(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this part of what `flatten` returned."""
        part = flat[self.start : self.start + self.numel]
        return part.as_strided(self.shape, self.stride, part.storage_offset())


def parts_of(param: PagedParameter, optimizer_class: type[torch.optim.Optimizer]) -> list[Part]:
    """Return the parts in which an optimizer of this class updates `param`."""
    numel = param.numel()
    if optimizer_class not in ELEMENTWISE or numel <= PIECE_NUMEL:
        return [Part(param, 0, numel, 0, is_whole=True, is_last=True)]
    starts = range(0, numel, PIECE_NUMEL)
    return [
        Part(
            param,
            start,
            min(PIECE_NUMEL, numel - start),
            index,
            is_whole=False,
            is_last=index == len(starts) - 1,
        )
        for index, start in enumerate(starts)
    ]


def flatten(param: PagedParameter, tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of `tensor`, which has the shape of `param`, in the order in which those
    of `param` are stored; a copy unless its strides are the same already."""
    page = param.zinf_page
    plain = tensor.detach()
    if plain.stride() != page.stride or type(plain) is not torch.Tensor:
        copy = torch.empty_strided(page.shape, page.stride, dtype=tensor.dtype)
        plain = copy.copy_(plain)
    return plain.as_strided((plain.numel(),), (1,))

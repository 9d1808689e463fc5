"""Stand-ins: meta tensors in place of parameters where an optimizer class is constructed.

Constructors may allocate state for every parameter (Adagrad does); on meta tensors that costs no
memory, and the real state is made when its parameter is first updated.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class StandIns:
    """Maps parameters to their stand-ins and back."""

    def __init__(self, optimizer_class: type[torch.optim.Optimizer]) -> None:
        """Build instances of `optimizer_class`."""
        self._class = optimizer_class
        self._real: dict[nn.Parameter, torch.Tensor] = {}
        self._stand_in: dict[torch.Tensor, nn.Parameter] = {}

    def build(self, params: list[Any], options: dict[str, Any]) -> torch.optim.Optimizer:
        """Return the optimizer over stand-ins for `params` (tensors, named tensors or groups)."""
        return self._class([self._map_entry(entry) for entry in params], **options)

    def map_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return `group` with stand-ins for its parameters."""
        params = group["params"]
        entries = [params] if isinstance(params, torch.Tensor) else list(params)
        return {**group, "params": [self._map_entry(entry) for entry in entries]}

    def real(self, stand_in: nn.Parameter) -> torch.Tensor:
        """Return the parameter that `stand_in` stands for."""
        return self._real[stand_in]

    def stand_in(self, param: torch.Tensor) -> nn.Parameter:
        """Return what stands for `param`."""
        return self._stand_in[param]

    def _map_entry(self, entry: Any) -> Any:
        if isinstance(entry, dict):
            return self.map_group(entry)
        if isinstance(entry, tuple):
            return entry[0], self._map_entry(entry[1])
        if not isinstance(entry, torch.Tensor) or not entry.is_leaf:
            return entry  # the optimizer class raises its usual error
        stand_in = self._stand_in.get(entry)
        if stand_in is None:
            meta = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            stand_in = nn.Parameter(meta, requires_grad=entry.requires_grad)
            self._stand_in[entry] = stand_in
            self._real[stand_in] = entry
        return stand_in

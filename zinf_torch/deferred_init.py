"""Deferred init: parameters go home as modules are constructed, so a model is never held whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def parameters_on_registration(
    adopt: Callable[[nn.Module, str, nn.Parameter], object],
) -> Iterator[None]:
    """Call `adopt(module, name, param)` for each parameter a module registers in the block.

    A parameter is registered before or while its values are initialised; initialisation then
    works on the paged parameter, with the same random numbers as on a plain one. Blocks may be
    nested; `adopt` must accept a parameter it has seen.
    """

    def hook(module: nn.Module, name: str, param: object) -> None:
        if isinstance(param, nn.Parameter) and not isinstance(
            param, nn.parameter.UninitializedParameter
        ):
            with torch.inference_mode(mode=False):
                adopt(module, name, param)

    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()

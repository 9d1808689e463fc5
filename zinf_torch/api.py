"""Runtime: budgets, tiers and the pager behind a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import nn

from zinf_core.device import Device
from zinf_core.errors import ConfigError
from zinf_core.runtime.events import Observer, Traffic, TrafficCounter
from zinf_core.runtime.pager import Pager
from zinf_core.runtime.pool import PoolUsage
from zinf_core.tier import Tier
from zinf_torch.arguments import check_arguments
from zinf_torch.attachment import Attachment, refuse_shared_memory
from zinf_torch.compute import Compute
from zinf_torch.deferred_init import parameters_on_registration
from zinf_torch.home_tiers import HomeTiers
from zinf_torch.homes import HomeRule, Homes
from zinf_torch.memory import Memory
from zinf_torch.optimizer import ParamGroups, StreamedOptimizer
from zinf_torch.parameter import PagedParameter
from zinf_torch.scratch import ScratchFolder

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Runtime:
    """Trains models whose states do not fit: keeps them on tiers and pages them in on demand.

    ::

        with zt.Runtime(device="512MiB", host="1GiB", nvme="/scratch/zinf") as runtime:
            model = runtime.attach(model)
            optimizer = runtime.optimizer(torch.optim.AdamW, model.parameters(), lr=1e-4)

    One process computes on one device; "device" is the memory budget of what is resident for
    compute. Thread-safe as far as the model's own code is.

    Parameters
    ----------
    device, host
        Budgets in bytes, or text like ``"512MiB"``. Hard limits for resident pages, states at
        home there, and working memory. Activations are torch's own and not counted.
    nvme
        Folder for the NVMe tier, made if missing, removed at `close` if it was made here.
        One process at a time. Left-overs of a killed run are reclaimed, with a warning.
    nvme_capacity
        Most bytes to use there; default: what the disk has.
    tiers
        Further tiers by name: objects, which stay the caller's, or URLs (``"sqlite:///x.db"``),
        which are opened and must be empty.
    parameters, gradients, optimizer_states
        Home tier of each state: ``"device"``, ``"host"``, ``"nvme"``, a name of `tiers`, a URL, or
        a mapping of parameter-name patterns to those. Default: nvme if given, else host.
    compute
        ``"cpu"``, ``"cuda"``, ``"cuda:1"``, or a simulated device. Optimizers always update on
        the CPU.
    observers
        Called with each `zinf_core.runtime.events.Event`.

    Raises
    ------
    ConfigError
        A size or home is not valid, or the budgets exceed the memory of the machine.
    TierError
        The folder cannot be used; the message says why.
    """

    def __init__(  # noqa: PLR0913 - settings, keyword-only
        self,
        *,
        device: int | str,
        host: int | str,
        nvme: str | PathLike[str] | None = None,
        nvme_capacity: int | str | None = None,
        parameters: HomeRule | None = None,
        gradients: HomeRule | None = None,
        optimizer_states: HomeRule | None = None,
        tiers: Mapping[str, Tier | str] | None = None,
        compute: str | torch.device | Device = "cpu",
        observers: Sequence[Observer] = (),
    ) -> None:
        """Open the tiers."""
        check_arguments(tiers, nvme=nvme, nvme_capacity=nvme_capacity, observers=observers)
        self.homes = Homes.of(
            parameters=parameters,
            gradients=gradients,
            optimizer_states=optimizer_states,
            tiers=("device", *(tiers or ()), "host", *(() if nvme is None else ("nvme",))),
        )
        self.compute = Compute.of(compute)
        memory = Memory.of(self.compute, device=device, host=host)
        scratch = None
        if nvme is not None:
            scratch = ScratchFolder(nvme, capacity=nvme_capacity, device=self.compute.memory)
        urls = self.homes.urls()
        self._tiers = HomeTiers(memory.tiers, scratch=scratch, given=tiers or {}, urls=urls)
        self._traffic = TrafficCounter()
        self.pager = Pager(
            tiers=self._tiers.tiers,
            device_pool=memory.device_pool,
            host_pool=memory.host_pool,
            observers=(self._traffic, *observers),
            device=self.compute.memory,
        )
        self._attachment = Attachment(self.pager, self.homes, self.compute)
        self._closed = False

    # -- model and optimizer -------------------------------------------------------------------

    def attach(self, model: ModuleT) -> ModuleT:
        """Send the parameters of `model` home and return it; its code is not changed.

        In place: every parameter stays the same object, so optimizers, hooks and tied weights
        that refer to it keep working. Buffers move to the device that computes. May be called
        again after parameters were added. Blocks.

        Raises
        ------
        BudgetTooSmallError
            The device budget cannot hold what one operation needs at once.
        TierFullError
            A home tier has no room; the message has path, needed and free bytes.
        KeyExistsError
            A tier given as an object holds tensors of these names that are somebody else's.
        UnsupportedError
            A parameter is on the meta device, not on the CPU, or shares memory with another.
        """
        self._check_open()
        self._attachment.bury()
        named = list(model.named_parameters())
        refuse_shared_memory(named)
        self._attachment.set_up.check_model(model)
        for name, param in named:
            if isinstance(param, PagedParameter):
                self._attachment.rename(param, name)
            else:
                self._attachment.page(param, name)
        self._attachment.move_buffers(model)
        return model

    @contextmanager
    def deferred_init(self) -> Iterator[None]:
        """Send each parameter home as soon as a module constructed in the block registers it.

        The model has the values a plain construction with the same seed gives it. Peak memory is
        the device budget plus one parameter. Call `attach` on the finished model.
        """
        self._check_open()

        def adopt(module: nn.Module, name: str, param: nn.Parameter) -> None:
            self._attachment.adopt(param, f"{type(module).__name__}.{name}")

        with parameters_on_registration(adopt):
            yield

    def optimizer(
        self,
        optimizer_class: type[torch.optim.Optimizer],
        params: ParamGroups,
        *,
        master_weights: bool = True,
        **options: Any,
    ) -> StreamedOptimizer:
        """Return `optimizer_class(params, **options)` with its states on their home tier.

        `master_weights` keeps an fp32 copy of bf16 and fp16 parameters, which is what the
        optimizer updates. Room is reserved and the host budget is checked here.

        Raises BudgetTooSmallError, TierFullError, UnsupportedError (LBFGS), or what the class
        raises for its options.
        """
        self._check_open()
        return StreamedOptimizer(
            self._attachment,
            optimizer_class,
            params,
            master_weights=master_weights,
            options=options,
        )

    def detach(self, model: ModuleT) -> ModuleT:
        """Make the parameters of `model` plain again, in ordinary memory, and return it.

        Needs memory for the whole model outside the budgets. Optimizers of this runtime still give
        their `state_dict`, and no longer step.
        """
        for param in model.parameters():
            if isinstance(param, PagedParameter):
                page = param.zinf_page
                grad = param.zinf_gradient
                value = None if grad.current is None else grad.current.clone()
                grad.clear()
                grad.unwatch()
                page.release_handles()
                for state in param.zinf_states:
                    state.remove()
                del param.zinf_states, param.zinf_gradient
                param.grad = value
        return model

    # -- what is happening ---------------------------------------------------------------------

    def usage(self) -> dict[str, PoolUsage]:
        """Return the tracked bytes of each memory budget: ``"device"`` and ``"host"``."""
        return {"device": self.pager.device_pool.usage(), "host": self.pager.host_pool.usage()}

    def traffic(self) -> dict[str, Traffic]:
        """Return the bytes read from and written to each tier since the runtime was opened."""
        return {name: self._traffic.of(name) for name in self.pager.tiers}

    def paths(self) -> dict[str, str]:
        """Return the path taken by each tier that has one, e.g. ``{"nvme": "posix-direct"}``."""
        return self._tiers.paths()

    # -- closing -------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for transfers, free all memory and remove the files. Twice is fine.

        Parameters that are still attached have no values afterwards; `detach` the model first,
        or save its `state_dict`, to keep them.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.pager.settle()
            self.pager.forget_cached()
        finally:
            self._tiers.close(self.pager)
            for pool in (self.pager.device_pool, self.pager.host_pool):
                pool.trim()

    def __enter__(self) -> Self:
        """Return the runtime."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close. An error of the block is not hidden by one of closing."""
        try:
            self.close()
        except Exception as closing:
            if exc is None:
                raise
            exc.add_note(f"closing the runtime failed as well: {closing}")

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this runtime is closed; make a new one")

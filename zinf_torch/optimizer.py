"""StreamedOptimizer: any `torch.optim` class, its states streamed from and to their tiers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zinf_core.errors import UnsupportedError
from zinf_core.policy.partition import sub_group_ranges
from zinf_core.runtime.optimizer_step import SubGroup, stream_sub_groups
from zinf_core.units import MiB
from zinf_torch.optimizer_load import match_groups, merge_options
from zinf_torch.optimizer_state import copy_scalars
from zinf_torch.parameter import PagedParameter
from zinf_torch.parameter_states import ParameterStates, PlannedState
from zinf_torch.part_states import (
    Update,
    join_state,
    load_state,
    master_of,
    take_state,
    updates_of,
)
from zinf_torch.parts import parts_of
from zinf_torch.stand_ins import StandIns
from zinf_torch.update import EmptyUpdate

if TYPE_CHECKING:
    from zinf_core.runtime.loans import Loan
    from zinf_torch.attachment import Attachment
    from zinf_torch.tensor_page import TensorPage

_SUB_GROUP_NBYTES = 32 * MiB
"""Working memory of a sub-group: enough for the drive to be busy with its neighbours."""
ParamGroups = Iterable[torch.Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Any]]


class StreamedOptimizer(torch.optim.Optimizer):
    """Behaves as the wrapped class on the same parameters; made by `Runtime.optimizer`.

    In `step`, real parameters of the wrapped class with their true shapes are built over working
    memory, one sub-group at a time, in the order of `param_groups`. Tensor state of more than one
    element is streamed; `state` shows handles of it. Scalars stay in memory.
    """

    def __init__(
        self,
        room: Attachment,
        optimizer_class: type[torch.optim.Optimizer],
        params: ParamGroups,
        *,
        master_weights: bool,
        options: dict[str, Any],
    ) -> None:
        """Wrap `optimizer_class(params, **options)`, reserve room for what it will keep and
        check it against the host budget.

        Raises BudgetTooSmallError, TierFullError, UnsupportedError, or whatever the wrapped
        class raises for its options.
        """
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise UnsupportedError(
                "LBFGS updates all parameters at once and cannot be streamed; "
                "use an optimizer that updates parameter by parameter"
            )
        self._room = room
        self._class = optimizer_class
        self._master_weights = master_weights
        self._options = dict(options)
        self._owned: list[TensorPage] = []
        room.own(self, self._owned)
        self._stand_ins = StandIns(optimizer_class)
        self._inner = self._stand_ins.build(list(params), options)
        self._attributes: dict[str, int | float | str] = {}
        """Counters the wrapped class keeps on itself, as they were when the step began: every
        sub-group starts from them, so that they advance once per step."""
        super().__init__([nn.Parameter(torch.empty(0))], dict(self._inner.defaults))
        self._updates: dict[torch.Tensor, list[Update]] = {}
        """The parts in which each parameter is updated."""
        self.param_groups: list[dict[str, Any]] = []
        self.state: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        for group in self._inner.param_groups:
            self._take_group(group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch's optimizers do; plain ones are attached to the runtime."""
        if not hasattr(self, "_updates"):  # torch's constructor, before there are any groups
            super().add_param_group(param_group)
            return
        group = self._stand_ins.map_group(param_group)
        self._inner.add_param_group(group)
        self._take_group(self._inner.param_groups[-1])

    def _take_group(self, inner_group: dict[str, Any]) -> None:
        """Make the group ours: check the budgets for all of it, then reserve room."""
        params = [self._stand_ins.real(param) for param in inner_group["params"]]
        group = {**inner_group, "params": params}
        planned: list[tuple[ParameterStates, list[PlannedState]]] = []
        updates: dict[torch.Tensor, list[Update]] = {}
        for param in params:
            self._room.adopt(param, f"parameter_{len(self._updates) + len(updates)}")
            if isinstance(param, PagedParameter):
                all_states = self._states_of(param)
                planned.extend((each, each.plan(self._construct, group)) for each in all_states)
                updates[param] = list(updates_of(all_states))
            else:
                updates[param] = [EmptyUpdate(param)]
        self._room.set_up.check_states(planned, self._class.__name__)
        for states, wanted in planned:
            states.reserve(wanted)
        self._updates.update(updates)
        self.param_groups.append(group)

    def _states_of(self, param: PagedParameter) -> list[ParameterStates]:
        return [
            ParameterStates(
                self._room, part, master_weights=self._master_weights, owned=self._owned
            )
            for part in parts_of(param, self._class)
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return what `closure` returned.

        Blocks until the last sub-group is updated; its write may still be in flight.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._attributes = {
            name: value
            for name, value in vars(self._inner).items()
            if isinstance(value, int | float | str)
        }
        with torch.inference_mode(mode=False), torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)
        self._room.pager.end_iteration()
        return result

    def _step_group(self, group: dict[str, Any]) -> None:
        active = [p for p in group["params"] if self._updates[p][0].has_gradient()]
        if not active:
            return
        for param in active:
            if param in self.state:
                self.state[param] = take_state(self._updates[param], self.state[param])
        updates = [update for param in active for update in self._updates[param]]
        available = self._room.available_host_nbytes()
        sizes = [0 if u.states is None else u.states.working_nbytes() for u in updates]
        limit = max(*sizes, min(available // 3, _SUB_GROUP_NBYTES))
        ranges = sub_group_ranges(sizes, limit)
        sub_groups = [
            SubGroup(
                uses=tuple(use for i in range_ for use in updates[i].uses()),
                working_nbytes=sum(sizes[i] for i in range_),
                is_complete=all(_is_complete(updates[i]) for i in range_),
            )
            for range_ in ranges
        ]
        original = {name: value for name, value in group.items() if name != "params"}
        changed = original

        def update(index: int, loans: Sequence[Loan]) -> None:
            nonlocal changed
            members = [updates[i] for i in ranges[index]]
            changed = self._update_sub_group(original, members, loans)

        try:
            stream_sub_groups(self._room.desk, sub_groups, update, available_nbytes=available)
        finally:
            group.update(changed)

    def _update_sub_group(
        self, options: dict[str, Any], members: Sequence[Update], loans: Sequence[Loan]
    ) -> dict[str, Any]:
        """Run the wrapped class on the members in working memory; return the group's options as
        it left them."""
        inner = self._inner
        vars(inner).update(self._attributes)
        idle_groups, idle_state = inner.param_groups, inner.state
        remaining = iter(loans)
        group = {**options}
        opened: list[Update] = []
        try:
            for member in members:
                construct = partial(self._constructed_state, member.param, options)
                state = self.state.get(member.param, {})
                # every part counts on from the same scalars
                state = state if member.is_last else copy_scalars(state)
                member.open(state, remaining, construct)
                opened.append(member)
            inner.param_groups = [{**options, "params": [m.working for m in opened]}]
            inner.state = defaultdict(dict, {m.working: m.working_state for m in opened})
            _undecorated_step(self._class)(inner)
        finally:
            if opened:
                group = {**inner.param_groups[0]}
                group.pop("params")
            states = {member: inner.state.get(member.working) for member in opened}
            inner.param_groups, inner.state = idle_groups, idle_state
            for member in opened:
                state = states.pop(member)
                closed = member.close(state or {})
                if not member.is_last:
                    continue
                was_kept = self.state.pop(member.param, None) is not None
                if state or (state is not None and was_kept):
                    self.state[member.param] = join_state(self._updates[member.param], closed)
        return group

    def _constructed_state(
        self, param: torch.Tensor, options: dict[str, Any], working: torch.Tensor
    ) -> dict[str, Any]:
        """Return the state the wrapped class makes for a parameter when it is constructed."""
        if not self._inner.state.get(self._stand_ins.stand_in(param)):
            return {}
        fresh = self._construct({**options, "params": [working]})
        return dict(fresh.state[working])

    def _construct(self, group: dict[str, Any]) -> torch.optim.Optimizer:
        """Return a plain instance of the wrapped class over one group."""
        construct: Callable[..., torch.optim.Optimizer] = self._class
        return construct([group], **self._options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over a state dict of the wrapped class or of this one, tensor by tensor.

        States keep the dtype they come in. Raises ValueError, as torch does, if the groups do not
        match. A ``master_weight`` entry restores the fp32 master.
        """
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = hook(self, state_dict)
            state_dict = state_dict if replaced is None else replaced
        saved_groups = state_dict["param_groups"]
        params = match_groups(self.param_groups, saved_groups)
        for index, state in state_dict["state"].items():
            if index in params:
                param = params[index]
                self.state[param] = load_state(self._updates[param], state)
        for group, merged in zip(
            self.param_groups, merge_options(self.param_groups, saved_groups), strict=True
        ):
            group.clear()
            group.update(merged)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def state_dict(self) -> dict[str, Any]:
        """Return what torch's optimizers return, with a ``master_weight`` beside the states of
        parameters that have one. Streamed tensors are handles, fetched when they are read."""
        packed: dict[str, Any] = super().state_dict()
        indices = (i for group in packed["param_groups"] for i in group["params"])
        params = (param for group in self.param_groups for param in group["params"])
        for index, param in zip(indices, params, strict=True):
            master = master_of(self._updates[param])
            if master is not None:
                entry = dict(packed["state"].get(index, {}))
                packed["state"][index] = {**entry, "master_weight": master}
        return packed


def _is_complete(update: Update) -> bool:
    return update.states is None or update.states.stepped


def _undecorated_step(optimizer_class: type[torch.optim.Optimizer]) -> Callable[..., Any]:
    """Return the class's step without torch's profiling wrapper, whose hooks belong to the outer
    optimizer and run once per step, not once per sub-group."""
    step = optimizer_class.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step

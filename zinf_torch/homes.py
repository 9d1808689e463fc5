"""Homes: on which tier each state of each parameter lives when idle (paper, table 2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from zinf_core.errors import ConfigError
from zinf_core.keys import StateKind

HomeRule = str | Mapping[str, str]
"""A tier's name or URL, or those by parameter-name pattern
(``{"layers.0.*": "device", "*": "nvme"}``); the first pattern that matches decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Homes:
    """Home tiers of parameters, gradients and optimizer states (masters included)."""

    parameters: tuple[tuple[str, str], ...]
    gradients: tuple[tuple[str, str], ...]
    optimizer_states: tuple[tuple[str, str], ...]

    @classmethod
    def of(
        cls,
        *,
        parameters: HomeRule | None,
        gradients: HomeRule | None,
        optimizer_states: HomeRule | None,
        tiers: tuple[str, ...],
    ) -> Homes:
        """Return the homes after checking every name that is no URL against `tiers`, of which
        the last is the default. Raises ConfigError."""
        return cls(
            parameters=_rules("parameters", parameters, tiers),
            gradients=_rules("gradients", gradients, tiers),
            optimizer_states=_rules("optimizer_states", optimizer_states, tiers),
        )

    def urls(self) -> list[str]:
        """Return each tier that a rule names by URL, once."""
        rules = (*self.parameters, *self.gradients, *self.optimizer_states)
        return [tier for tier in dict.fromkeys(tier for _, tier in rules) if "://" in tier]

    def home(self, name: str, kind: StateKind) -> str:
        """Return the home tier of one state of the parameter called `name`."""
        rules = {StateKind.PARAM: self.parameters, StateKind.GRAD: self.gradients}.get(
            kind, self.optimizer_states
        )
        return next(tier for pattern, tier in rules if fnmatchcase(name, pattern))


def _rules(what: str, rule: HomeRule | None, tiers: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    rule = tiers[-1] if rule is None else rule
    pairs = tuple(rule.items()) if isinstance(rule, Mapping) else (("*", rule),)
    for pattern, tier in pairs:
        _require_text(what, pattern)
        _require_text(what, tier)
        if tier not in tiers and "://" not in tier:
            hint = 'give nvme="/path"' if tier == "nvme" else "or write a URL, scheme://path"
            raise ConfigError(f"{what} = {tier!r}: there are the tiers {', '.join(tiers)}; {hint}")
    if not pairs or pairs[-1][0] != "*":
        raise ConfigError(f'{what}: the last pattern must be "*", for every other parameter')
    return pairs


def _require_text(what: str, given: object) -> None:
    if not isinstance(given, str):
        raise ConfigError(
            f"{what} = {given!r} is no name; name a tier that is given as an object: "
            f'tiers={{"mine": tier}}, {what}="mine"'
        )

"""Names of what is stored: which tensor, which of its states, and where its bytes lie."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from zinf_core.errors import ConfigError


class StateKind(enum.Enum):
    """Which model state of a parameter a key names (paper, section 2: model states)."""

    PARAM = "param"
    """Parameter in the dtype compute uses."""
    GRAD = "grad"
    """Gradient, accumulated over micro-batches."""
    MASTER = "master"
    """fp32 copy the optimizer updates when the parameter has a lower precision."""
    OPTIMIZER_STATE = "optimizer_state"
    """One tensor the optimizer keeps, e.g. exp_avg."""


@dataclass(frozen=True, slots=True, order=True)
class TensorKey:
    """Name of one stored tensor: ``layers.0.weight/optimizer_state/exp_avg``."""

    name: str
    kind_value: str
    part: str = ""
    """Which of several tensors of this kind, e.g. ``"exp_avg"``; empty when there is one."""

    def __post_init__(self) -> None:
        """Refuse parts that are not text: a tier that stored them could not read them back."""
        for text in (self.name, self.kind_value, self.part):
            if not isinstance(text, str):
                raise ConfigError(f"{text!r} in a TensorKey is a {type(text).__name__}, not a str")

    @classmethod
    def of(cls, name: str, kind: StateKind, part: str = "") -> TensorKey:
        """Return the key for one state of the parameter called `name`."""
        return cls(name, kind.value, part)

    @property
    def kind(self) -> StateKind:
        """Which model state this is."""
        return StateKind(self.kind_value)

    def __str__(self) -> str:
        """Return the form used in messages."""
        return "/".join(filter(None, (self.name, self.kind_value, self.part)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Where a key's bytes lie on a tier."""

    nbytes: int
    """Logical bytes: what was reserved, and exactly what can be read."""
    allocated_nbytes: int
    """Bytes taken from the tier, padding included."""
    segment: int = 0
    """Index of the segment file, 0 for tiers without files."""
    offset: int = 0
    """First byte within the segment."""

"""What a process that is killed was doing, and what may be found afterwards. Pure: no process here.

The child and the parent of a crash test both draw the workload from the seed; the child carries it
out on a tier, the parent on a dict.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from zinf_core.keys import StateKind, TensorKey

_KEYS: Final = tuple(TensorKey.of(f"layers.{i}.weight", StateKind.MASTER) for i in range(10))
_SIZES: Final = (0, 1, 511, 4096, 4097, 12000, 65537)

State = Mapping[TensorKey, bytes]


class FlushScope(enum.Enum):
    """What a flush that was acknowledged means for work that came after it and was cut short."""

    TIER = "tier"
    """The tier is as it was at one flush: the last one acknowledged, or one submitted later."""
    KEY = "key"
    """Each key is as it was at the last flush acknowledged, or as it was put later; keys that
    were changed since may also read as CorruptDataError."""


class StepKind(enum.Enum):
    """One call of the workload."""

    STORE = "store"
    """Reserve a key and write it whole."""
    WRITE = "write"
    """Overwrite a key from `Step.offset` on."""
    DISCARD = "discard"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call and its arguments."""

    kind: StepKind
    key: TensorKey = _KEYS[0]
    """Not used by a flush."""
    offset: int = 0
    data: bytes = b""

    def apply(self, state: dict[TensorKey, bytes]) -> None:
        """Do to `state` what the step does to a tier."""
        if self.kind is StepKind.DISCARD:
            del state[self.key]
        elif self.kind is not StepKind.FLUSH:
            old = state.get(self.key, b"")
            end = self.offset + len(self.data)
            state[self.key] = old[: self.offset] + self.data + old[end:]


def workload(
    seed: int, sizes: Mapping[TensorKey, int], *, unit: int, num_steps: int
) -> Iterator[Step]:
    """Yield `num_steps` steps on a tier that holds keys of `sizes`, then a flush.

    `unit` is what the tier's offsets and lengths must be multiples of, in bytes.
    """
    rng, held = random.Random(seed), dict(sizes)
    for _ in range(num_steps):
        key = rng.choice(_KEYS)
        luck = rng.random()
        if luck < 0.15:
            yield Step(kind=StepKind.FLUSH)
        elif key not in held:
            held[key] = rng.choice(_SIZES)
            yield Step(kind=StepKind.STORE, key=key, data=rng.randbytes(held[key]))
        elif luck < 0.3:
            del held[key]
            yield Step(kind=StepKind.DISCARD, key=key)
        else:
            offset = unit * rng.randrange(held[key] // unit + 1) if luck > 0.7 else 0
            data = rng.randbytes(held[key] - offset)
            yield Step(kind=StepKind.WRITE, key=key, offset=offset, data=data)
    yield Step(kind=StepKind.FLUSH)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a child had come when it was killed, by its own account."""

    num_steps: int
    """Steps begun."""
    num_flushes: int
    """Flushes submitted, or about to be."""
    num_acknowledged: int
    """Flushes whose wait returned."""


def states_at_flushes(start: State, steps: Iterable[Step], progress: Progress) -> list[State]:
    """Return what the tier may be: its state at the flush acknowledged last and at later ones."""
    states: list[State] = [dict(start)]
    state = dict(start)
    for step in steps:
        if len(states) > progress.num_flushes:
            break
        step.apply(state)
        if step.kind is StepKind.FLUSH:
            states.append(dict(state))
    return states[progress.num_acknowledged :]


@dataclass(slots=True)
class KeyOutcomes:
    """What one key may be after a kill, where flushes promise nothing about the tier as a whole."""

    versions: list[bytes | None]
    """Contents since the flush acknowledged last, oldest first; None: no such key."""
    unwritten: set[int] = field(default_factory=set)
    """Sizes with which it was reserved since then: until it is written its bytes are anything."""

    def allows(self, found: bytes | None) -> bool:
        """Return whether `found` is one of the outcomes."""
        return found in self.versions or (found is not None and len(found) in self.unwritten)


def outcomes_by_key(
    start: State, steps: Sequence[Step], progress: Progress
) -> dict[TensorKey, KeyOutcomes]:
    """Return what each key may be, after the flush acknowledged last and any of the later steps."""
    state, num_flushes = dict(start), 0
    outcomes: dict[TensorKey, KeyOutcomes] = {}
    for step in steps[: progress.num_steps]:
        before = state.get(step.key)
        step.apply(state)
        if step.kind is StepKind.FLUSH:
            num_flushes += 1
        elif num_flushes >= progress.num_acknowledged:
            outcome = outcomes.setdefault(step.key, KeyOutcomes([before]))
            outcome.versions.append(state.get(step.key))
            if step.kind is StepKind.STORE:
                outcome.unwritten.add(len(step.data))
    for key, data in state.items():
        outcomes.setdefault(key, KeyOutcomes([data]))
    return outcomes

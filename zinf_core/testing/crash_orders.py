"""What the parent of a crash test tells its child, and what the child reports."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zinf_core.errors import ConfigError

if TYPE_CHECKING:
    from zinf_core.testing.bench import TierHooks


class Report(enum.Enum):
    """Byte that says what the child is about to do, or has done."""

    OPEN = b"o"
    """About to open the tier."""
    STEP = b"s"
    """About to do the next step of the workload."""
    FLUSH = b"f"
    """About to submit a flush."""
    FLUSHED = b"F"
    """The wait of the flush returned."""
    CLOSED = b"c"
    """Everything was done and the tier is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteReference:
    """A suite that another process can make: nothing of it may live in memory alone."""

    suite: str
    """Class of the suite, ``module:name``; called without arguments."""
    settings: Mapping[str, str | int | None] = field(default_factory=dict)
    """Attributes set on the new suite."""

    @classmethod
    def of(
        cls, kind: type[object], *, settings: Mapping[str, str | int | None] | None = None
    ) -> SuiteReference:
        """Return the reference of `kind`. Raises ConfigError if it is not at a module's level."""
        if "<locals>" in kind.__qualname__:
            raise ConfigError(
                f"{kind.__qualname__} is defined inside a function, where no child process finds "
                "it; move it to the level of its module"
            )
        return cls(suite=f"{kind.__module__}:{kind.__qualname__}", settings=settings or {})

    def load(self) -> TierHooks:
        """Import and make the suite."""
        module, _, name = self.suite.partition(":")
        kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        suite: TierHooks = kind()
        for attribute, value in self.settings.items():
            setattr(suite, attribute, value)
        return suite


@dataclass(frozen=True, slots=True, kw_only=True)
class Orders:
    """What one child does."""

    reference: SuiteReference
    folder: str
    seed: int
    num_steps: int
    report_fd: int
    """Descriptor of the pipe that reports are written to."""

    def to_json(self) -> str:
        """Return the orders as text."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Orders:
        """Return the orders that `to_json` made `text` of."""
        fields = json.loads(text)
        return cls(**{**fields, "reference": SuiteReference(**fields["reference"])})

    def report(self, report: Report) -> None:
        """Write `report`; the parent finds it even if this process is killed right afterwards."""
        os.write(self.report_fd, report.value)

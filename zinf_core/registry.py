"""Registry: opens a tier by URL, from whichever installed package offers its scheme.

A package offers a tier with an entry point in the group ``zinf.tiers`` whose name is the URL scheme
and whose object is a TierFactory. Nothing is imported before its scheme is asked for.
"""

from __future__ import annotations

import enum
import itertools
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import Final, Protocol, TypeVar

from zinf_core.errors import ConfigError
from zinf_core.tier import Tier
from zinf_core.units import parse_nbytes

Choice = TypeVar("Choice", bound=enum.Enum)

TIER_GROUP: Final = "zinf.tiers"

_MAX_DIGITS: Final = 18
"""Of a number in a URL: it then fits whatever a tier hands it to."""
_SWITCH: Final = MappingProxyType({"0": False, "1": True, "false": False, "true": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUrl:
    """A tier's address, taken apart: ``nvme:///scratch/zinf?queue_depth=8``."""

    scheme: str
    path: str = ""
    """Everything between ``://`` and the query; for local tiers a folder, percent-decoded."""
    options: Mapping[str, str] = field(default_factory=dict)
    """The query; a factory refuses options it does not know."""
    inner: tuple[str, ...] = ()
    """URLs in brackets, of the tiers this one is built over:
    ``striped://[nvme:///a][nvme:///b]?chunk_nbytes=4MiB``."""

    @classmethod
    def parse(cls, url: str) -> TierUrl:
        """Return the parts of `url`. Raises ConfigError for no scheme, brackets that do not match,
        a zero byte or a repeated option."""
        scheme, separator, rest = url.partition("://")
        if not separator or not scheme:
            raise ConfigError(f"tier {url!r} is not of the form scheme://path?option=value")
        inner, rest = _split_brackets(url, rest)
        path, _, query = rest.partition("?")
        if inner and path:
            raise ConfigError(f"tier {url!r} has {path!r} after its last bracket; write ]?options")
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True)
        options = dict(pairs)
        if len(options) != len(pairs):
            raise ConfigError(f"tier {url!r} sets an option twice")
        path = urllib.parse.unquote(path)
        if "\0" in path:
            raise ConfigError(f"tier {url!r} has a zero byte in its path")
        return cls(scheme=scheme, path=path, options=options, inner=inner)

    def refuse_unknown(self, known: frozenset[str]) -> None:
        """Raise ConfigError if an option is not one of `known`. For use by factories."""
        unknown = sorted(set(self.options) - known)
        if unknown:
            valid = ", ".join(sorted(known)) or "none"
            raise ConfigError(f"{self.scheme}: unknown option {unknown[0]!r}; valid: {valid}")

    # Options as values, for use by factories. Each raises ConfigError for text that is none.

    def number(self, option: str, default: int, *, is_signed: bool = False) -> int:
        """Return a whole number, which may be negative only if `is_signed`."""
        text = self.options.get(option)
        if text is None:
            return default
        digits = text.removeprefix("-") if is_signed else text
        if not digits.isdecimal() or len(digits) > _MAX_DIGITS:
            raise ConfigError(f"{self.scheme}: {option} = {text!r} is not a whole number")
        return int(text)

    def seconds(self, option: str, default: float) -> float:
        """Return a number of seconds."""
        text = self.options.get(option)
        try:
            return default if text is None else float(text)
        except ValueError:
            raise ConfigError(
                f"{self.scheme}: {option} = {text!r} is not a number of seconds"
            ) from None

    def nbytes(self, option: str, default: int) -> int:
        """Return a size in bytes."""
        return parse_nbytes(self.options.get(option, default), what=option)

    def switch(self, option: str, *, default: bool) -> bool:
        """Return whether something is on."""
        text = self.options.get(option)
        if text is None:
            return default
        if text not in _SWITCH:
            known = ", ".join(_SWITCH)
            raise ConfigError(f"{self.scheme}: {option} = {text!r} is not one of {known}")
        return _SWITCH[text]

    def choice(self, option: str, default: Choice) -> Choice:
        """Return the member of the enum of `default` with that value."""
        choices = {member.value: member for member in type(default)}
        text = self.options.get(option, default.value)
        if text not in choices:
            known = ", ".join(choices)
            raise ConfigError(f"{self.scheme}: {option} = {text!r} is not one of {known}")
        return choices[text]


class TierFactory(Protocol):
    """What an entry point of the group ``zinf.tiers`` names."""

    def __call__(self, url: TierUrl, *, capacity_nbytes: int | None) -> Tier:
        """Open the tier at `url`, of at most `capacity_nbytes` bytes (None: no limit of ours).

        The caller closes it. Raises ConfigError for a path or option the tier cannot use.
        """
        ...


def tier_schemes() -> tuple[str, ...]:
    """Return the URL schemes that installed packages offer, sorted. Imports none of them."""
    return tuple(sorted({entry.name for entry in metadata.entry_points(group=TIER_GROUP)}))


def open_tier(url: str, *, capacity_nbytes: int | None = None) -> Tier:
    """Return an open tier for `url`; the caller closes it. May block on the device.

    Raises ConfigError if no installed package offers the scheme, if several do, or if the one that
    does cannot be imported, or for a capacity that is no size; and whatever its factory raises.
    """
    parsed = TierUrl.parse(url)
    if capacity_nbytes is not None:
        capacity_nbytes = parse_nbytes(capacity_nbytes, what=f"{parsed.scheme}: capacity_nbytes")
    return _load_factory(parsed.scheme)(parsed, capacity_nbytes=capacity_nbytes)


def _split_brackets(url: str, rest: str) -> tuple[tuple[str, ...], str]:
    """Return (texts of the leading ``[...]`` groups, what follows them)."""
    groups = []
    while rest.startswith("["):
        depths = itertools.accumulate((letter == "[") - (letter == "]") for letter in rest)
        end = next((i for i, depth in enumerate(depths) if depth == 0), None)
        if end is None:
            raise ConfigError(f"tier {url!r} has a [ without its ]")
        groups.append(rest[1:end])
        rest = rest[end + 1 :]
    return tuple(groups), rest


def _load_factory(scheme: str) -> TierFactory:
    """Import the one factory registered for `scheme`."""
    entries = tuple(metadata.entry_points(group=TIER_GROUP, name=scheme))
    if not entries:
        known = ", ".join(tier_schemes()) or "none"
        raise ConfigError(f"no installed package offers {scheme}:// tiers; available: {known}")
    if len(entries) > 1:
        places = ", ".join(entry.value for entry in entries)
        raise ConfigError(
            f"{scheme}:// is offered more than once ({places}); uninstall all but one"
        )
    try:
        factory: TierFactory = entries[0].load()
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"{scheme}:// cannot be used: {entries[0].value}: {exc}") from exc
    return factory
